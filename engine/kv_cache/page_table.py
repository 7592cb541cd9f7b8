"""Which slots of the arena have a page on the device, and which of these are newer than the arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.batch import Int32Array, SequenceChunk
from springtide.blocks import blocks_for
from springtide.errors import SpringtideError

_NONE = -1


class OutOfPages(SpringtideError):
    """A pass needs more pages than there are."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Slots and their pages, int32 [n] each."""

    slots: Int32Array
    pages: Int32Array

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class PagePlacement:
    """Where the blocks of one pass are, and what is to be copied. The steps are taken in the order of the fields."""

    evicted: Pairs
    """Were newer than the arena and have lost their pages: to be copied there before anything is written into these."""
    loaded: Pairs
    """To be copied from the arena before they are attended to."""
    pages: Sequence[Int32Array]
    """Of each chunk's blocks, up to the one in which it ends."""
    written: Pairs
    """Get keys and values in this pass."""
    completed: Pairs
    """Those of them that are full when it ends."""
    begun: Pairs
    """Those of them of which nothing was there before."""
    new: Int32Array
    """Slots whose pages hold nothing if the pass does not come to its end."""


class PageTable:
    """A page holds all that its slot has in the arena, or more: it was copied from there as a whole, or its block began in a pass on it.
    Nobody but the passes writes into a slot that is in use by them: whoever gives slots back says so (`forget`)."""

    def __init__(self, num_slots: int, num_pages: int, block_tokens: int) -> None:
        self.num_pages = num_pages
        self._block_tokens = block_tokens
        self._page_of = np.full(num_slots, _NONE, np.int32)
        self._slot_of = np.full(num_pages, _NONE, np.int32)
        self._dirty = np.zeros(num_pages, bool)
        self._used_at = np.zeros(num_pages, np.int64)
        self._ahead = np.zeros(num_pages, bool)
        """Kept for a sequence that has not been in a pass since its slots were placed ahead."""
        self._clock = 0

    def place(self, batch: Sequence[SequenceChunk]) -> PagePlacement:
        """Gives every block of the batch a page, taking those that were not used for longest. Ends in `done` or `undo`.

        Raises ValueError when slots are outside the arena, OutOfPages when there are not enough pages; nothing is changed then."""
        size = self._block_tokens
        held = [np.asarray(chunk.slots[: blocks_for(chunk.start + len(chunk.token_ids), size)], np.int32) for chunk in batch]
        wanted = np.concatenate(held)
        self._check(wanted)
        # Of each chunk: the blocks that begin in the pass, those that it writes into, and those of them that are full at its end.
        spans = [(chunk.start, chunk.start + len(chunk.token_ids), slots) for chunk, slots in zip(batch, held, strict=True)]
        begun = np.concatenate([slots[-(-start // size) :] for start, _, slots in spans])
        written = np.concatenate([slots[start // size :] for start, _, slots in spans])
        completed = np.concatenate([slots[start // size : end // size] for start, end, slots in spans])
        missing = np.unique(wanted[self._page_of[wanted] == _NONE])
        evicted = self._make_room(missing, self._others(wanted) if len(missing) else missing)
        if evicted is None:
            raise OutOfPages(
                f"the pass needs {len(np.unique(wanted))} pages of the device's {self.num_pages}: raise device_memory, or lower the "
                "number of sequences of a step or the length of the context"
            )
        pages = self._page_of[wanted]
        self._clock += 1
        self._used_at[pages] = self._clock
        self._ahead[pages] = False
        return PagePlacement(
            evicted=evicted,
            loaded=self._pairs(np.setdiff1d(missing, begun) if len(missing) else missing),
            pages=np.split(pages, np.cumsum([len(slots) for slots in held[:-1]])),
            written=self._pairs(written),
            completed=self._pairs(completed),
            begun=self._pairs(begun),
            new=np.union1d(missing, begun),
        )

    def place_ahead(self, slots: Sequence[int] | Int32Array) -> Pairs | None:
        """Keeps pages for the blocks in `slots`, of which all is in the arena, until a pass uses them: other blocks give way to them, but
        none of the last pass, none that is kept like these, and none that is newer than the arena. Returns those that had no page, which
        are to be copied from the arena; None where there are not enough pages.

        Raises ValueError when slots are outside the arena; nothing is changed then, as where it returns None."""
        wanted = np.asarray(slots, np.int32)
        self._check(wanted)
        missing = np.unique(wanted[self._page_of[wanted] == _NONE])
        others = self._others(wanted)
        in_use = self._dirty[others] | self._ahead[others] | (self._used_at[others] == self._clock)
        if self._make_room(missing, others[~in_use]) is None:
            return None
        pages = self._page_of[wanted]
        self._used_at[pages] = self._clock
        self._ahead[pages] = True
        return self._pairs(missing)

    def pages_of(self, slots: Sequence[int] | Int32Array) -> Int32Array:
        """The pages of those that have one."""
        pages = self._page_of[np.asarray(slots, np.int32)]
        there: Int32Array = pages[pages != _NONE]
        return there

    def done(self, placement: PagePlacement, stored: Pairs) -> None:
        """The pass is through, and `stored`, some of what it has written, are in the arena."""
        self._dirty[placement.written.pages] = True
        self._dirty[stored.pages] = False

    def undo(self, placement: PagePlacement) -> None:
        """The pass was not completed. What was there before it begins still is: it wrote only behind that."""
        self.forget(placement.new)

    def forget(self, slots: Sequence[int] | Int32Array) -> None:
        """Forgets slots that were given back: what comes into them is another block's."""
        self._clear(self.pages_of(slots))

    def dirty_slots(self) -> Int32Array:
        """Whose pages are newer than the arena."""
        return self._slot_of[self._dirty]

    def validate(self) -> None:
        """Raises AssertionError when it contradicts itself."""
        slots = np.flatnonzero(self._page_of != _NONE)
        assert np.array_equal(self._slot_of[self._page_of[slots]], slots), "a slot's page is another slot's"
        assert (self._slot_of != _NONE).sum() == len(slots), "a page is in use without its slot knowing"
        assert not self._dirty[self._slot_of == _NONE].any(), "an unused page is dirty"
        assert not self._ahead[self._slot_of == _NONE].any(), "an unused page is kept"

    def _check(self, slots: Int32Array) -> None:
        if slots.min() < 0 or slots.max() >= len(self._page_of):
            outside = slots[(slots < 0) | (slots >= len(self._page_of))]
            raise ValueError(f"slot {outside[0]} is outside the arena of {len(self._page_of)} slots")

    def _make_room(self, missing: Int32Array, others: Int32Array) -> Pairs | None:
        """Gives `missing` pages: unused ones, then the first of `others`. Returns who has lost a page that must be written back; None, and
        nothing is changed, where these are not enough."""
        if not len(missing):
            return self._pairs(missing)
        unused = np.flatnonzero(self._slot_of == _NONE)[: len(missing)].astype(np.int32)
        taken = np.concatenate((unused, others[: len(missing) - len(unused)]))
        if len(taken) < len(missing):
            return None
        dirty = taken[self._dirty[taken]]
        evicted = Pairs(self._slot_of[dirty], dirty)
        self._clear(taken)
        self._page_of[missing], self._slot_of[taken] = taken, missing
        return evicted

    def _others(self, wanted: Int32Array) -> Int32Array:
        """Pages of other slots than `wanted`, as they give way: those first that were not used for longest, those last that are kept."""
        candidates = self._slot_of != _NONE
        candidates[self.pages_of(wanted)] = False
        others = np.flatnonzero(candidates)
        return others[np.lexsort((self._used_at[others], self._ahead[others]))].astype(np.int32)

    def _clear(self, pages: Int32Array) -> None:
        slots = self._slot_of[pages]
        self._page_of[slots[slots != _NONE]] = _NONE
        self._slot_of[pages] = _NONE
        self._dirty[pages] = self._ahead[pages] = False

    def _pairs(self, slots: Int32Array) -> Pairs:
        return Pairs(slots, self._page_of[slots])
