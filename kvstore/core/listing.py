"""What a store holds, as people want to see it: chains of blocks, each a prompt's prefix."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore._native import Block
from kvstore.core.index import BlockIndex
from kvstore.core.pins import PinKind, Pins
from springtide.ids import BlockKey


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of held blocks, from a first block to the block of `key`."""

    key: BlockKey
    blocks: int
    own_blocks: int
    """The last ones of those, from which no other chain branches off."""
    children: int
    """The number of held blocks that continue it."""
    references: int
    """The references of attempts, leases and hard pins to the last block."""
    pin: PinKind | None
    tenant: str


class Listing:
    """The chains of an index, for operators."""

    def __init__(self, index: BlockIndex, pins: Pins) -> None:
        self._index = index
        self._pins = pins

    def chains(self, key_prefix: str, limit: int) -> tuple[list[Chain], int]:
        """The first `limit` chains, those in use and the last used first, and how many there are: those that nothing continues, or with a
        `key_prefix` (hexadecimal) those whose last block's key begins so; O(blocks)."""
        if key_prefix:
            found = [block for block in self._index.blocks() if block.key.hex().startswith(key_prefix)]
        else:
            found = [block for block in self._index.blocks() if block.children == 0]
        latest = heapq.nlargest(limit, found, key=lambda block: (block.refs > 0, block.last_used))
        return [_chain(block, self._pins) for block in latest], len(found)

    def held_part(self, keys: Sequence[BlockKey]) -> Chain | None:
        """The chain of as much of a prompt as is held."""
        found = self._index.match(keys)
        return _chain(found[-1], self._pins) if found else None


def _chain(end: Block, pins: Pins) -> Chain:
    blocks, own, branched = 1, 1, False
    parent = end.parent
    while parent is not None:
        branched = branched or parent.children > 1
        own += not branched
        blocks += 1
        parent = parent.parent
    return Chain(end.key, blocks, own, end.children, end.refs, pins.kind_of(end.key), end.tenant.name)
