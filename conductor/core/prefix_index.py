"""Which store holds which block, and how much of a prompt each of them holds.

A block's holders are one integer, a bit for each holder. What a store holds is prefix-closed in each of its tiers (it evicts leaf by leaf,
and tells of ancestors first when it stores and last when it removes), and a block's key stands for all that comes before it. So along a
prompt the mask of holders only ever loses bits, and where it does is found by search instead of by a walk: look at the first block and at
the last, go from the front in doubling steps until the mask is that of the last, and bisect wherever two looks differ. A cold prompt costs
one look, one that is held whole two, and a match of n blocks some 2 log2(n) for each depth at which holders drop out.

A bit stands for one *view* of a store: what it held since one snapshot. A store's new snapshot is gathered under a fresh bit while the old
view goes on serving, and forgetting a view is the clearing of one bit in the mask of live ones; the bits it leaves in the table are swept
away a few at a time and only then used again. So a large store's death costs no pause.

Blocks with equal holders share one int, so a block costs its key and its place in the table whoever holds it (docs/packages/conductor.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from conductor._native import HolderTable, match_ends, spread
from conductor.core.types.arrays import Ints
from springtide.ids import BlockKey, NodeId
from springtide.protocol.storage import Tier

_SHARED_MASKS = 1 << 16
"""Masks of several holders that are kept at hand to be shared. When there are more, they are gathered anew; blocks keep what they have."""
_FEW = 4
"""So many bits are sooner picked out one by one."""


class Matches(Mapping[NodeId, int]):
    """How much of one prompt each store holds: store -> blocks; stores that hold none are left out. Valid until the index takes in the next
    event.

    A prompt's holders drop out at few depths, however many they are, so the answer is kept as those: `ends` are pairs of a number of
    blocks and the holders of exactly so many, a bit each, the longest first. As a mapping it costs time with the number of holders, and is
    for those who want to see all of them; decisions look at `blocks_by_bit` and `longest`.
    """

    __slots__ = ("_by_bit", "_by_node_id", "ends", "node_of_bit")

    def __init__(self, ends: Sequence[tuple[int, int]], node_of_bit: Sequence[NodeId]) -> None:
        self.ends = ends
        self.node_of_bit = node_of_bit
        self._by_bit: Ints | None = None
        self._by_node_id: dict[NodeId, int] | None = None

    def blocks_by_bit(self) -> Ints:
        """[bits of the index] blocks that each view's store holds, 0 for none."""
        if self._by_bit is not None:
            return self._by_bit
        blocks = self._by_bit = np.zeros(len(self.node_of_bit), np.int64)
        for num_blocks, holders in self.ends:
            if holders & (holders - 1):
                spread(blocks, num_blocks, holders.to_bytes((holders.bit_length() + 7) // 8, "little"))
            else:
                blocks[holders.bit_length() - 1] = num_blocks
        return blocks

    def longest(self, at_most: int) -> tuple[int, int]:
        """The longest match, cut at `at_most` blocks, and a bit for everybody who holds that much: FindBestPrefixMatch of Algorithm 1
        (arXiv 2407.00079, section 6). (0, 0) when nobody holds anything that counts."""
        if not self.ends or at_most < 1:
            return 0, 0
        best = min(self.ends[0][0], at_most)
        holders = 0
        for num_blocks, of_so_many in self.ends:
            if num_blocks < best:
                break
            holders |= of_so_many
        return best, holders

    def __getitem__(self, node_id: NodeId) -> int:
        return self._by_node()[node_id]

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._by_node())

    def __len__(self) -> int:
        return sum(holders.bit_count() for _, holders in self.ends)

    def _by_node(self) -> dict[NodeId, int]:
        if self._by_node_id is None:
            names = self.node_of_bit
            self._by_node_id = {names[bit]: num_blocks for num_blocks, holders in self.ends for bit in bits(holders)}
        return self._by_node_id


@dataclass(slots=True)
class _View:
    """What one incarnation of a store held from its snapshot on."""

    node_id: NodeId
    incarnation: int
    sequence: int
    mask: int
    """The view's bit. The same int object stands in the table for every block that only this store holds."""
    num_blocks: int = 0
    ssd_blocks: int = 0
    """Of these."""
    gap: bool = False
    """Events were missed: what follows is ignored until a new snapshot takes this view's place."""


class PrefixIndex:
    """The blocks of every store, by what the stores say; asked, how much of a prompt each of them holds."""

    def __init__(self) -> None:
        self._holders = {tier: HolderTable() for tier in Tier}
        self._live: dict[NodeId, _View] = {}
        self._gathering: dict[NodeId, _View] = {}
        self._live_mask = 0
        self._retired_mask = 0
        self._node_of_bit: list[NodeId] = []
        self._shared: dict[int, int] = {}
        self.version = 0
        """Counts the times that a store's live view became another, or none."""
        self._free_bits: list[int] = []
        self._retired_blocks = 0
        """Entries, over both tiers, in which bits of the retired mask are still set, a bit each."""
        self._sweep_mask = self._sweep_left = self._sweep_place = 0
        self._sweep_tier = Tier.DRAM

    # ---- what stores say ----

    def snapshot(self, node_id: NodeId, incarnation: int, sequence: int, keys: Sequence[BlockKey], tier: Tier, complete: bool) -> None:
        """Takes in one part of a snapshot. With the last part it replaces what was known of the store."""
        view = self._gathering.get(node_id)
        if view is None or (view.incarnation, view.sequence) != (incarnation, sequence):
            self._retire(self._gathering.pop(node_id, None))
            view = self._gathering[node_id] = _View(node_id, incarnation, sequence, self._take_bit(node_id))
        self._add(view, keys, tier)
        if complete:
            self._retire(self._live.pop(node_id, None))
            self._live[node_id] = self._gathering.pop(node_id)
            self._live_mask |= view.mask
            self.version += 1

    def stored(self, node_id: NodeId, incarnation: int, sequence: int, keys: Sequence[BlockKey], tier: Tier) -> bool:
        """False when events were missed, so that a new snapshot is needed. An event that was seen before is a no-op."""
        view, in_order = self._expect(node_id, incarnation, sequence)
        if view is not None:
            self._add(view, keys, tier)
        return in_order

    def removed(self, node_id: NodeId, incarnation: int, sequence: int, keys: Sequence[BlockKey], tier: Tier) -> bool:
        """Takes blocks out; as `stored`."""
        view, in_order = self._expect(node_id, incarnation, sequence)
        if view is not None:
            self._discard(view, keys, tier)
        return in_order

    def still_at(self, node_id: NodeId, sequence: int) -> bool:
        """False when the store's last event, which this is, was missed, so that a new snapshot is needed."""
        view = self._live.get(node_id)
        if view is None or node_id in self._gathering:
            return node_id in self._gathering
        view.gap |= sequence > view.sequence
        return not view.gap

    def forget(self, node_id: NodeId) -> None:
        """Forgets a store: nothing that it holds is found any more."""
        self.version += 1
        self._retire(self._live.pop(node_id, None))
        self._retire(self._gathering.pop(node_id, None))

    def sweep(self, max_blocks: int) -> bool:
        """Clears the bits of retired views out of at most `max_blocks` table entries, going on where it stopped. Returns whether there is
        more to be cleared."""
        if not self._sweep_mask:
            self._sweep_mask, self._sweep_left = self._retired_mask, self._retired_blocks
            self._retired_mask = self._retired_blocks = 0
        for _ in Tier:
            if self._sweep_left:
                place, cleared = self._holders[self._sweep_tier].sweep(self._sweep_place, max_blocks, self._sweep_mask, self._share)
                self._sweep_place, self._sweep_left = place, self._sweep_left - cleared
                if place:
                    break
                self._sweep_tier = Tier.SSD if self._sweep_tier is Tier.DRAM else Tier.DRAM
        if not self._sweep_left:
            self._free_bits += map(int, bits(self._sweep_mask))
            self._sweep_mask = self._sweep_place = 0
        return self._sweep_mask != 0

    # ---- questions ----

    def match(self, keys: Sequence[BlockKey]) -> Matches:
        """How many of the first `keys` each store holds, in whichever tier."""
        ssd = self._holders[Tier.SSD] if self.has_ssd else None
        return Matches(match_ends(self._holders[Tier.DRAM], ssd, keys, self._live_mask), self._node_of_bit)

    def match_in_dram(self, keys: Sequence[BlockKey]) -> Matches:
        """The same as `match`, counting only what can be read at once."""
        return Matches(match_ends(self._holders[Tier.DRAM], None, keys, self._live_mask), self._node_of_bit)

    @property
    def has_ssd(self) -> bool:
        """Whether some store holds blocks on SSD."""
        return len(self._holders[Tier.SSD]) > 0

    def live_bit(self, node_id: NodeId) -> int | None:
        """The bit of the store's live view, None while there is none."""
        view = self._live.get(node_id)
        return None if view is None else view.mask.bit_length() - 1

    def live_nodes(self) -> Iterator[tuple[NodeId, int]]:
        """Every store with a live view, and its bit."""
        return ((node_id, view.mask.bit_length() - 1) for node_id, view in self._live.items())

    @property
    def num_bits(self) -> int:
        """The number of bits in a mask of holders."""
        return len(self._node_of_bit)

    def knows(self, node_id: NodeId) -> bool:
        """Whether a snapshot of this store is complete."""
        return node_id in self._live

    def blocks_of(self, node_id: NodeId) -> int:
        """Blocks that the store holds; one in both tiers counts twice."""
        view = self._live.get(node_id)
        return view.num_blocks if view else 0

    def ssd_blocks_of(self, node_id: NodeId) -> int:
        """Of the blocks that the store holds, those on its SSD."""
        view = self._live.get(node_id)
        return view.ssd_blocks if view else 0

    def __len__(self) -> int:
        """Entries in the table, those that are still to be swept included."""
        return sum(map(len, self._holders.values()))

    def validate(self) -> None:
        """Asserts what must hold between the views and the table."""
        views = [*self._live.values(), *self._gathering.values()]
        counts = dict.fromkeys((view.mask for view in views), 0)
        known = sum(counts) | self._retired_mask | self._sweep_mask
        assert len(counts) == len(views), "two views share a bit"
        assert not sum(counts) & (self._retired_mask | self._sweep_mask), "a view in use is retired"
        assert self._live_mask == sum(view.mask for view in self._live.values()), "the live mask is not that of the live views"
        on_ssd = dict(counts)
        stale, swept = self._retired_mask | self._sweep_mask, 0
        for tier, table in self._holders.items():
            for _, holders in table.items():
                swept += (holders & stale).bit_count()
                assert holders and not holders & ~known, "an entry names an unknown view"
                for bit in bits(holders & sum(counts)):
                    counts[1 << int(bit)] += 1
                    on_ssd[1 << int(bit)] += tier is Tier.SSD
        assert swept == self._retired_blocks + self._sweep_left, "what is to be swept is miscounted"
        assert all(counts[view.mask] == view.num_blocks for view in views), "a view's blocks are miscounted"
        assert all(on_ssd[view.mask] == view.ssd_blocks for view in views), "a view's blocks on SSD are miscounted"

    # ---- within ----

    def _expect(self, node_id: NodeId, incarnation: int, sequence: int) -> tuple[_View | None, bool]:
        """The view to change, if any, and False when a snapshot has to be asked for."""
        view = self._live.get(node_id)
        if view is None:
            return None, node_id in self._gathering
        if view.incarnation == incarnation and not view.gap:
            if sequence <= view.sequence:
                return None, True
            if sequence == view.sequence + 1:
                view.sequence = sequence
                return view, True
        view.gap = True
        return None, False

    def _add(self, view: _View, keys: Sequence[BlockKey], tier: Tier) -> None:
        added = self._holders[tier].add(keys, view.mask, self._share)
        view.num_blocks += added
        view.ssd_blocks += added if tier is Tier.SSD else 0

    def _discard(self, view: _View, keys: Sequence[BlockKey], tier: Tier) -> None:
        discarded = self._holders[tier].discard(keys, view.mask, self._share)
        view.num_blocks -= discarded
        view.ssd_blocks -= discarded if tier is Tier.SSD else 0

    def _share(self, holders: int) -> int:
        """The int that stands in the table for these holders."""
        if len(self._shared) >= _SHARED_MASKS:
            self._shared.clear()
        return self._shared.setdefault(holders, holders)

    def _take_bit(self, node_id: NodeId) -> int:
        if self._free_bits:
            bit = self._free_bits.pop()
            self._node_of_bit[bit] = node_id
        else:
            bit = len(self._node_of_bit)
            self._node_of_bit.append(node_id)
        return 1 << bit

    def _retire(self, view: _View | None) -> None:
        if view is not None:
            self._live_mask &= ~view.mask
            self._retired_mask |= view.mask
            self._retired_blocks += view.num_blocks


def bits(mask: int) -> Sequence[int] | Ints:
    """Which bits are set, lowest first."""
    if mask.bit_count() > _FEW:
        held = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
        found: Ints = np.unpackbits(held, bitorder="little").nonzero()[0]
        return found
    few = []
    while mask:
        lowest = mask & -mask
        few.append(lowest.bit_length() - 1)
        mask ^= lowest
    return few
