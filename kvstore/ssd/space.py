"""The slots of segments, and which of them are free."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class SegmentSlot(NamedTuple):
    """A slot of a segment."""

    segment: int
    slot: int


class Space:
    """The free slots of all segments. A slot is free, held (by a block or by a write), or retired. What is being read is not given away,
    though its block be removed."""

    def __init__(self) -> None:
        self._free: dict[int, list[int]] = {}
        """Heaps: slots are taken in order, so that those of one batch lie side by side."""
        self._readers: Counter[SegmentSlot] = Counter()
        self._waiting: set[SegmentSlot] = set()
        """Given back, but being read."""
        self.num_free = 0

    def add(self, segment: int, num_slots: int, held: Collection[int] = ()) -> None:
        self._free[segment] = [slot for slot in range(num_slots) if slot not in held]
        self.num_free += len(self._free[segment])

    def take(self, count: int) -> list[SegmentSlot]:
        """Takes `count` slots, or all there are, from the emptiest segments first."""
        places: list[SegmentSlot] = []
        while len(places) < count and self.num_free:
            segment = max(self._free, key=lambda number: len(self._free[number]))
            heap = self._free[segment]
            taken = [SegmentSlot(segment, heapq.heappop(heap)) for _ in range(min(count - len(places), len(heap)))]
            self.num_free -= len(taken)
            places += taken
        return places

    def give_back(self, place: SegmentSlot) -> None:
        """Frees the slot when nobody reads it any more."""
        if self._readers[place]:
            self._waiting.add(place)
        else:
            heapq.heappush(self._free[place.segment], place.slot)
            self.num_free += 1

    def begin_read(self, place: SegmentSlot) -> None:
        self._readers[place] += 1

    def end_read(self, place: SegmentSlot) -> None:
        self._readers[place] -= 1
        if not self._readers[place]:
            del self._readers[place]
            if place in self._waiting:
                self._waiting.remove(place)
                self.give_back(place)


def runs(placed: Sequence[tuple[SegmentSlot, T]], longest: int) -> Iterator[tuple[SegmentSlot, list[T]]]:
    """The items of `placed`, in the order of the disk, in runs of at most `longest` that lie side by side, each with the place where it
    begins."""
    ordered = sorted(placed, key=lambda item: item[0])
    begin = 0
    for i in range(1, len(ordered) + 1):
        first = ordered[begin][0]
        if i == len(ordered) or i - begin == longest or ordered[i][0] != SegmentSlot(first.segment, first.slot + i - begin):
            yield first, [value for _, value in ordered[begin:i]]
            begin = i
