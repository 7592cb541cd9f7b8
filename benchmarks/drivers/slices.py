"""The work of the transfer drivers: as many slices of one size, moved between two processes in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Slices:
    """`count` slices of `size` bytes. On both sides they lie at the beginning of cells of twice their size, so that none is the next one's
    neighbour; and in another order there than here, as blocks in two arenas do."""

    count: int
    size: int

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> Slices:
        count, size = map(int, arguments[-2:])
        return cls(count, size)

    @property
    def arguments(self) -> list[str]:
        return [str(self.count), str(self.size)]

    @property
    def cell(self) -> int:
        return 2 * self.size

    @property
    def region_bytes(self) -> int:
        return self.count * self.cell

    @property
    def here(self) -> list[int]:
        """Offsets, bytes."""
        return [index * self.cell for index in range(self.count)]

    @property
    def there(self) -> list[int]:
        """Offsets, bytes, in the order of `here`."""
        return [int(index) * self.cell for index in np.random.default_rng(self.count).permutation(self.count)]

    def new_memory(self) -> np.ndarray:
        """Zeroed and present: uint8 [region_bytes]."""
        memory = np.empty(self.region_bytes, np.uint8)
        memory[:] = 0
        return memory

    def fill(self, memory: np.ndarray) -> np.ndarray:
        """Puts random bytes everywhere, and returns those of the slices: uint8 [count, size]."""
        memory[:] = np.random.default_rng().integers(0, 256, memory.nbytes, np.uint8)
        return self.of(memory).copy()

    def of(self, memory: np.ndarray) -> np.ndarray:
        """The slices here, uint8 [count, size]."""
        return memory.reshape(self.count, self.cell)[:, : self.size]


class Transfer:
    """Base of the jobs: `verify` for any of them that has `slices`, `memory` (uint8 [slices.region_bytes]) and the operations `write` and
    `read`."""

    slices: Slices
    memory: np.ndarray

    def measure(self, operation: str, times: int) -> list[float]:
        raise NotImplementedError

    def verify(self) -> None:
        """What is written comes back when it is read."""
        sent = self.slices.fill(self.memory)
        self.measure("write", 1)
        self.memory[:] = 0
        self.measure("read", 1)
        assert np.array_equal(self.slices.of(self.memory), sent), "the bytes that came back are not those that were written"
