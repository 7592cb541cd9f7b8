"""What `kvstore._native` is held to: a block, the table and the heap of blocks, of the same names and behaviour, as plain objects."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore._native import MAX_USES
from kvstore.core.tenants import Tenant
from springtide.ids import BlockKey, Slot

_COMPACT_ABOVE = 1024


@dataclass(slots=True, eq=False)
class Block:
    key: BlockKey
    slot: Slot
    parent: Block | None
    tenant: Tenant
    children: int = 0
    refs: int = 0
    last_used: int = 0
    uses: int = 0
    clean: bool = False
    dirty_children: int = 0
    sampled: bool = False
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        self.depth = 0 if self.parent is None else self.parent.depth + 1

    def reference(self) -> int:
        self.uses = min(self.uses + 1, MAX_USES)
        self.refs += 1
        return self.refs - 1

    def dereference(self) -> int:
        assert self.refs > 0, f"{self} is dereferenced more often than referenced"
        self.refs -= 1
        return self.refs

    @property
    def key_bits(self) -> int:
        return int.from_bytes(self.key[:8], "little")

    @property
    def spare(self) -> bool:
        return self.clean and self.dirty_children == 0

    @property
    def evictable(self) -> bool:
        return self.refs == 0 and self.children == 0


class BlockTable:
    def __init__(self, capacity: int) -> None:
        self._blocks: dict[BlockKey, Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, key: BlockKey) -> Block | None:
        return self._blocks.get(key)

    def add(self, block: Block) -> None:
        if block.key in self._blocks:
            raise KeyError(f"{block}: its key is there")
        self._blocks[block.key] = block

    def remove(self, block: Block) -> None:
        if self._blocks.get(block.key) is not block:
            raise KeyError(f"{block} is not there")
        del self._blocks[block.key]

    def match(self, keys: Sequence[BlockKey]) -> list[Block]:
        found: list[Block] = []
        parent: Block | None = None
        for key in keys:
            block = self._blocks.get(key)
            if block is None or block.parent is not parent:
                break
            found.append(block)
            parent = block
        return found

    def by_depth(self) -> list[Block]:
        return sorted(self._blocks.values(), key=lambda block: block.depth)


class BlockHeap:
    """Entries of blocks that have left stay until they surface or outnumber the others."""

    def __init__(self, lane: int) -> None:
        self._members: dict[Block, float] = {}
        self._heap: list[tuple[float, int, Block]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, block: Block) -> bool:
        return block in self._members

    def push(self, block: Block, value: float) -> None:
        if block in self._members:
            raise ValueError(f"{block} is in the heap")
        self._members[block] = value
        heapq.heappush(self._heap, (value, block.last_used, block))
        if len(self._heap) > 2 * len(self._members) + _COMPACT_ABOVE:
            self._heap = [(value, member.last_used, member) for member, value in self._members.items()]
            heapq.heapify(self._heap)

    def discard(self, block: Block) -> None:
        self._members.pop(block, None)

    def peek(self) -> Block | None:
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Block:
        block = self.peek()
        if block is None:
            raise IndexError("pop from an empty heap")
        heapq.heappop(self._heap)
        del self._members[block]
        return block

    def _is_current(self, entry: tuple[float, int, Block]) -> bool:
        value, last_used, block = entry
        return self._members.get(block) == value and block.last_used == last_used
