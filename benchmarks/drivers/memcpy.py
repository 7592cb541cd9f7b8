"""The least that moving bytes costs: numpy copies the slices from one array of this process to another, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.drivers.protocol import repeat, run
from benchmarks.drivers.slices import Slices, Transfer


class Memcpy(Transfer):
    def __init__(self, arguments: Sequence[str]) -> None:
        self.slices = slices = Slices.from_arguments(arguments)
        self.memory, other = slices.new_memory(), slices.new_memory()
        here = [self.memory[offset : offset + slices.size] for offset in slices.here]
        there = [other[offset : offset + slices.size] for offset in slices.there]
        self._pairs = {"write": list(zip(there, here, strict=True)), "read": list(zip(here, there, strict=True))}

    def measure(self, operation: str, times: int) -> list[float]:
        pairs = self._pairs[operation]

        def once() -> None:
            for to, source in pairs:
                np.copyto(to, source)

        return repeat(once, times)

    def close(self) -> None:
        """Nothing was started."""


if __name__ == "__main__":
    run(Memcpy)
