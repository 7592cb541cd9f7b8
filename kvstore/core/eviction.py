"""Which of the evictable blocks goes first."""

from __future__ import annotations

import heapq
from typing import Protocol

from kvstore.core.block import Block

_COMPACT_ABOVE = 1024


class EvictionPolicy(Protocol):
    """Orders the blocks that may go now: leaves without references. The index adds a block when it becomes one and discards it when it
    ceases to be one; while it is in, nothing about the block changes."""

    def add(self, block: Block) -> None: ...

    def discard(self, block: Block) -> None: ...

    def pop(self) -> Block:
        """Removes and returns the next victim. Raises IndexError when there is none."""
        ...

    def __contains__(self, block: Block) -> bool: ...

    def __len__(self) -> int: ...


class LRU:
    """The block whose last reference was dropped longest ago. A heap, for a parent becomes evictable after its children but is to go by its
    own last use; entries of discarded blocks stay in it until they surface or outnumber the others."""

    def __init__(self) -> None:
        self._members: set[Block] = set()
        self._heap: list[tuple[int, int, Block]] = []

    def add(self, block: Block) -> None:
        self._members.add(block)
        heapq.heappush(self._heap, (block.last_used, block.slot, block))
        if len(self._heap) > 2 * len(self._members) + _COMPACT_ABOVE:
            self._heap = [(member.last_used, member.slot, member) for member in self._members]
            heapq.heapify(self._heap)

    def discard(self, block: Block) -> None:
        self._members.discard(block)

    def pop(self) -> Block:
        while True:
            last_used, _, block = heapq.heappop(self._heap)
            if block in self._members and block.last_used == last_used:
                self._members.remove(block)
                return block

    def __contains__(self, block: Block) -> bool:
        return block in self._members

    def __len__(self) -> int:
        return len(self._members)
