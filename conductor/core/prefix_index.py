"""Which store holds which block, and how much of a prompt each of them holds.

A block's holders are one integer, a bit for each holder, so that one pass over a prompt's keys finds the longest match of every holder at
once: the mask of those that hold everything so far only ever gets narrower, and where a bit drops out is that holder's match.

A bit stands for one *view* of a store: what it held since one snapshot. A store's new snapshot is gathered under a fresh bit while the old
view goes on serving, and forgetting a view is the clearing of one bit in the mask of live ones; the bits it leaves in the table are swept
away a few at a time and only then used again. So a large store's death costs no pause.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat

from conductor.core.events import Tier
from springtide.ids import BlockKey, NodeId


@dataclass(slots=True)
class _View:
    """What one incarnation of a store held from its snapshot on."""

    node_id: NodeId
    incarnation: int
    sequence: int
    mask: int
    """The view's bit. The same int object stands in the table for every block that only this store holds."""
    num_blocks: int = 0
    gap: bool = False
    """Events were missed: what follows is ignored until a new snapshot takes this view's place."""


class PrefixIndex:
    def __init__(self) -> None:
        self._holders: dict[Tier, dict[BlockKey, int]] = {tier: {} for tier in Tier}
        self._live: dict[NodeId, _View] = {}
        self._gathering: dict[NodeId, _View] = {}
        self._live_mask = 0
        self._retired_mask = 0
        self._node_of_bit: list[NodeId] = []
        self._free_bits: list[int] = []
        self._sweep: Iterator[tuple[Tier, BlockKey]] | None = None
        self._sweep_mask = 0

    # ---- what stores say ----

    def snapshot(self, node_id: NodeId, incarnation: int, sequence: int, keys: Sequence[BlockKey], tier: Tier, complete: bool) -> None:
        """One part of a snapshot. With the last part it replaces what was known of the store."""
        view = self._gathering.get(node_id)
        if view is None or (view.incarnation, view.sequence) != (incarnation, sequence):
            self._retire(self._gathering.pop(node_id, None))
            view = self._gathering[node_id] = _View(node_id, incarnation, sequence, self._take_bit(node_id))
        self._add(view, keys, tier)
        if complete:
            self._retire(self._live.pop(node_id, None))
            self._live[node_id] = self._gathering.pop(node_id)
            self._live_mask |= view.mask

    def stored(self, node_id: NodeId, incarnation: int, sequence: int, keys: Sequence[BlockKey], tier: Tier) -> bool:
        """False when events were missed, so that a new snapshot is needed. An event that was seen before is a no-op."""
        view, in_order = self._expect(node_id, incarnation, sequence)
        if view is not None:
            self._add(view, keys, tier)
        return in_order

    def removed(self, node_id: NodeId, incarnation: int, sequence: int, keys: Sequence[BlockKey], tier: Tier) -> bool:
        """Like `stored`."""
        view, in_order = self._expect(node_id, incarnation, sequence)
        if view is not None:
            self._discard(view, keys, tier)
        return in_order

    def forget(self, node_id: NodeId) -> None:
        """Nothing that this store holds is found any more."""
        self._retire(self._live.pop(node_id, None))
        self._retire(self._gathering.pop(node_id, None))

    def sweep(self, max_blocks: int) -> None:
        """Clears the bits of retired views out of at most `max_blocks` table entries, going on where it stopped."""
        if self._sweep is None:
            if not self._retired_mask:
                return
            self._sweep_mask, self._retired_mask = self._retired_mask, 0
            self._sweep = chain.from_iterable(zip(repeat(tier), list(table)) for tier, table in self._holders.items())
        swept = 0
        for tier, key in islice(self._sweep, max_blocks):
            swept += 1
            self._clear(self._holders[tier], key, self._sweep_mask)
        if swept < max_blocks:
            self._free_bits += _bits(self._sweep_mask)
            self._sweep, self._sweep_mask = None, 0

    # ---- questions ----

    def match(self, keys: Sequence[BlockKey]) -> dict[NodeId, int]:
        """How many of the first `keys` each store holds, in whichever tier. Stores that hold none are left out."""
        dram, ssd = self._holders[Tier.DRAM], self._holders[Tier.SSD]
        masks: Iterator[int] = map(dram.get, keys, repeat(0))
        if ssd:
            masks = (mask | ssd.get(key, 0) for key, mask in zip(keys, masks, strict=True))
        return self._longest(keys, masks)

    def match_in_dram(self, keys: Sequence[BlockKey]) -> dict[NodeId, int]:
        """As `match`, counting only what can be read at once."""
        return self._longest(keys, map(self._holders[Tier.DRAM].get, keys, repeat(0)))

    @property
    def has_ssd(self) -> bool:
        """Some store holds blocks on SSD."""
        return bool(self._holders[Tier.SSD])

    def _longest(self, keys: Sequence[BlockKey], masks: Iterator[int]) -> dict[NodeId, int]:
        matches: dict[NodeId, int] = {}
        holding = self._live_mask
        for depth, mask in enumerate(masks):
            still = holding & mask
            if still != holding:
                if depth:
                    self._record(matches, holding ^ still, depth)
                holding = still
                if not holding:
                    return matches
        if keys:
            self._record(matches, holding, len(keys))
        return matches

    def knows(self, node_id: NodeId) -> bool:
        """Whether a snapshot of this store is complete."""
        return node_id in self._live

    def blocks_of(self, node_id: NodeId) -> int:
        """Blocks that the store holds; one in both tiers counts twice."""
        view = self._live.get(node_id)
        return view.num_blocks if view else 0

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
        for table in self._holders.values():
            for holders in table.values():
                assert holders and not holders & ~known, "an entry names an unknown view"
                for bit in _bits(holders & sum(counts)):
                    counts[1 << bit] += 1
        assert all(counts[view.mask] == view.num_blocks for view in views), "a view's blocks are miscounted"

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
        table, mask, added = self._holders[tier], view.mask, 0
        for key in keys:
            holders = table.get(key)
            if holders is None:
                table[key] = mask
            elif holders & mask:
                continue
            else:
                table[key] = holders | mask
            added += 1
        view.num_blocks += added

    def _discard(self, view: _View, keys: Sequence[BlockKey], tier: Tier) -> None:
        table = self._holders[tier]
        for key in keys:
            if table.get(key, 0) & view.mask:
                self._clear(table, key, view.mask)
                view.num_blocks -= 1

    @staticmethod
    def _clear(table: dict[BlockKey, int], key: BlockKey, mask: int) -> None:
        holders = table.get(key, 0)
        left = holders & ~mask
        if left:
            table[key] = left
        elif holders:
            del table[key]

    def _record(self, matches: dict[NodeId, int], holders: int, depth: int) -> None:
        for bit in _bits(holders):
            matches[self._node_of_bit[bit]] = depth

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


def _bits(mask: int) -> list[int]:
    bits = []
    while mask:
        lowest = mask & -mask
        bits.append(lowest.bit_length() - 1)
        mask ^= lowest
    return bits


def best_match(matches: Mapping[NodeId, int], at_most: int) -> tuple[int, list[NodeId]]:
    """The longest match, cut at `at_most` blocks, and everybody who holds that much (FindBestPrefixMatch of Algorithm 1)."""
    best = min(max(matches.values(), default=0), at_most)
    return best, sorted(node_id for node_id, blocks in matches.items() if blocks >= best) if best else []
