"""A committed block, the table of them by key, and a heap of them. Where the C part is built (kvstore/native/), its types of the same names
stand in for these: a block then takes 96 bytes instead of some 400, and the garbage collector does not see it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.core.tenants import Tenant
from springtide.ids import BlockKey, Slot

MAX_USES = 15
"""Block.uses counts no further."""
_COMPACT_ABOVE = 1024


@dataclass(slots=True, eq=False)
class Block:
    """Visible to everybody who knows its key. `slot` belongs to the block until it is evicted; nobody writes it meanwhile."""

    key: BlockKey
    slot: Slot
    """-1: it is one that the SSD holds."""
    parent: Block | None
    tenant: Tenant
    """Who stored it."""
    children: int = 0
    """Held blocks whose parent this is."""
    refs: int = 0
    """Places of attempts, leases and hard pins. Whoever references a block references its ancestors too."""
    last_used: int = 0
    """Tick of the index when the last reference was dropped: larger is later."""
    uses: int = 0
    """How often it was stored or found, to MAX_USES, and before an eviction too as far as that is remembered."""
    clean: bool = False
    """The SSD holds it too."""
    dirty_children: int = 0
    """Children that are not spare."""
    sampled: bool = False
    """The eviction policy observes when this block is used again."""
    depth: int = field(init=False)
    """Blocks before it in its prompt."""

    def __post_init__(self) -> None:
        self.depth = 0 if self.parent is None else self.parent.depth + 1

    def reference(self) -> int:
        """One more, and one more use. Returns how many there were before."""
        self.uses = min(self.uses + 1, MAX_USES)
        self.refs += 1
        return self.refs - 1

    def dereference(self) -> int:
        """One less. Returns how many are left."""
        assert self.refs > 0, f"{self} is dereferenced more often than referenced"
        self.refs -= 1
        return self.refs

    @property
    def key_bits(self) -> int:
        """64 bits of the key, which are as good as random."""
        return int.from_bytes(self.key[:8], "little")

    @property
    def spare(self) -> bool:
        """It and all that continues it are on the SSD too, so that dropping them costs nothing."""
        return self.clean and self.dirty_children == 0

    @property
    def evictable(self) -> bool:
        """Nobody uses it, and nothing continues it."""
        return self.refs == 0 and self.children == 0


class BlockTable:
    """Blocks by key. `capacity`: how many there are room for before it has to grow, which takes a while."""

    def __init__(self, capacity: int) -> None:
        self._blocks: dict[BlockKey, Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, key: BlockKey) -> Block | None:
        return self._blocks.get(key)

    def add(self, block: Block) -> None:
        """Raises KeyError when its key is there."""
        if block.key in self._blocks:
            raise KeyError(f"{block}: its key is there")
        self._blocks[block.key] = block

    def remove(self, block: Block) -> None:
        """Raises KeyError when it is not there."""
        if self._blocks.get(block.key) is not block:
            raise KeyError(f"{block} is not there")
        del self._blocks[block.key]

    def match(self, keys: Sequence[BlockKey]) -> list[Block]:
        """The blocks of `keys` up to the first that is not there or not the child of the one before (of none, for the first)."""
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
        """All, parents before their children; O(blocks)."""
        return sorted(self._blocks.values(), key=lambda block: block.depth)


class BlockHeap:
    """Blocks by value, among equals by last use; neither may change while the block is in. A block can be in several heaps at a time
    if each is of another lane, 0 to 3. Entries of blocks that have left stay until they surface or outnumber the others (not in C)."""

    def __init__(self, lane: int) -> None:
        self._members: dict[Block, float] = {}
        self._heap: list[tuple[float, int, Block]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, block: Block) -> bool:
        return block in self._members

    def push(self, block: Block, value: float) -> None:
        """Raises ValueError when it is in."""
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
        """The one that `pop` would return."""
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Block:
        """Removes the block of least value. Raises IndexError when there is none."""
        block = self.peek()
        if block is None:
            raise IndexError("pop from an empty heap")
        heapq.heappop(self._heap)
        del self._members[block]
        return block

    def _is_current(self, entry: tuple[float, int, Block]) -> bool:
        value, last_used, block = entry
        return self._members.get(block) == value and block.last_used == last_used
