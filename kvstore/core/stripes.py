"""How the slots of a bundle lie in the memories of its stores, and how a batch between two bundles, or a bundle and a store, is cut into
batches between two memories each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from messenger.base import Slice
from springtide.modelinfo import KVSpec


@dataclass(frozen=True, slots=True)
class Stripe:
    """Bytes [begin, end) of every slot, which one memory has: those of slot s from s * (end - begin) on."""

    begin: int
    end: int

    @classmethod
    def of(cls, layers: range, spec: KVSpec) -> Stripe:
        """The slabs of these layers, of slots that have all of `spec`."""
        return cls(layers.start * spec.bytes_per_slab, layers.stop * spec.bytes_per_slab)

    def place(self, offset: int, slot_bytes: int) -> int:
        """Where the byte at `offset` of all slots, whole ones one after another, is in the memory that has it."""
        slot, within = divmod(offset, slot_bytes)
        return slot * (self.end - self.begin) + within - self.begin


def are_whole(ranges: Sequence[range], layers: int) -> bool:
    """Whether these ranges are all layers of a model, in order and once each."""
    return [layer for each in ranges for layer in each] == [*range(layers)]


Cut = Mapping[tuple[int, int], Sequence[tuple[int, Slice]]]
"""By the numbers of the own stripe and of theirs: the pieces to move between these, each with the index of the slice that it is of."""


def cut(batch: Sequence[Slice], slot_bytes: int, own: Sequence[Stripe], theirs: Sequence[Stripe]) -> Cut:
    """Cuts slices, whose offsets count whole slots of `slot_bytes`, to what one memory here and one there have. The stripes of each side
    are all of a slot, in order; a slice is within a slot, and at the same place in both."""
    pieces: defaultdict[tuple[int, int], list[tuple[int, Slice]]] = defaultdict(list)
    for index, whole in enumerate(batch):
        begin = whole.local_offset % slot_bytes
        assert begin == whole.remote_offset % slot_bytes, "layers lie at the same place in every slot"
        end = begin + whole.length
        for i, here in enumerate(own):
            for j, there in enumerate(theirs):
                first, last = max(begin, here.begin, there.begin), min(end, here.end, there.end)
                if first < last:
                    local = here.place(whole.local_offset - begin + first, slot_bytes)
                    remote = there.place(whole.remote_offset - begin + first, slot_bytes)
                    pieces[i, j].append((index, Slice(local, remote, last - first, whole.generation)))
    return pieces
