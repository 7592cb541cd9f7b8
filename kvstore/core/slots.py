"""The arena's slots by number: which are free, and the generation of each."""

from __future__ import annotations

from array import array
from collections.abc import Callable, MutableSequence, Sequence
from typing import TYPE_CHECKING, cast

from springtide.ids import Slot

if TYPE_CHECKING:
    import numpy as np


class SlotTable:
    """The slots that are free, and the generation of each. `generations` (one per slot) is where peers look to see whether a handle is
    stale: the arena's own array, or a list. A slot that is given back changes its generation at once, so whoever still has a handle to it
    is refused from then on: for certain once `settle`, which is called then with these slots, has returned (Transport.settle)."""

    def __init__(self, generations: MutableSequence[int] | np.ndarray, settle: Callable[[Sequence[Slot]], None] | None = None) -> None:
        self._generations = generations
        self._settle = settle
        self.num_slots = len(generations)
        for slot in range(self.num_slots):
            generations[slot] = 1  # so that a handle of zeros never fits
        self._free = array("I", range(self.num_slots - 1, -1, -1))
        """The free ones, last in, first out: memory that was touched before is used again first."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def free(self) -> list[Slot]:
        return [Slot(slot) for slot in self._free]

    def generation(self, slot: Slot) -> int:
        return int(self._generations[slot])

    def take(self, count: int) -> list[Slot]:
        """Takes `count` slots, at most `num_free`. They are the caller's."""
        assert count <= len(self._free), "more slots than are free"
        if not count:
            return []
        taken = cast(list[Slot], self._free[-count:].tolist())
        taken.reverse()
        del self._free[-count:]
        return taken

    def give_back(self, slots: Sequence[Slot]) -> None:
        generations, free = self._generations, self._free
        for slot in slots:
            generations[slot] += 1
        free.extend(slots)
        if self._settle is not None:
            self._settle(slots)
