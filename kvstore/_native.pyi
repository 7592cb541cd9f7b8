"""The C part of the pool (kvstore/native/): a committed block, the table of them by key, and a heap of them. A block takes 96 bytes with
its key, and the garbage collector does not see it."""

from collections.abc import Sequence

from kvstore.core.tenants import Tenant
from springtide.ids import BlockKey, Slot

MAX_USES: int
"""Block.uses counts no further."""

class Block:
    """A committed block, visible to everybody who knows its key. `slot` belongs to the block until it is evicted; nobody writes it
    meanwhile."""

    slot: Slot
    """-1: it is one that the SSD holds."""
    children: int
    """The number of held blocks whose parent this is."""
    last_used: int
    """The tick of the index when the last reference was dropped: larger is later."""
    uses: int
    """The times that it was stored or found, to MAX_USES, and before an eviction too as far as that is remembered."""
    clean: bool
    """The SSD holds it too."""
    dirty_children: int
    """The number of children that are not spare."""
    sampled: bool
    """The eviction policy observes when this block is used again."""

    def __new__(cls, key: BlockKey, slot: Slot, parent: Block | None, tenant: Tenant) -> Block: ...
    @property
    def key(self) -> BlockKey: ...
    @property
    def parent(self) -> Block | None: ...
    @property
    def tenant(self) -> Tenant:
        """Who stored it."""

    @property
    def refs(self) -> int:
        """The references: places of attempts, leases and hard pins. Whoever references a block references its ancestors too."""

    @property
    def depth(self) -> int:
        """The number of blocks before it in its prompt."""

    @property
    def key_bits(self) -> int:
        """64 bits of the key, which are as good as random."""

    @property
    def spare(self) -> bool:
        """Whether it and all that continues it are on the SSD too, so that dropping them costs nothing."""

    @property
    def evictable(self) -> bool:
        """Whether nobody uses it, and nothing continues it."""

    def reference(self) -> int:
        """Adds one, and one more use. Returns how many there were before."""

    def dereference(self) -> int:
        """Drops one. Returns how many are left. Raises AssertionError when there was none."""

class BlockTable:
    """A table of blocks by key. `capacity`: how many there are room for before it has to grow, which takes a while."""

    def __new__(cls, capacity: int) -> BlockTable: ...
    def __len__(self) -> int: ...
    def get(self, key: BlockKey, /) -> Block | None: ...
    def add(self, block: Block, /) -> None:
        """Adds one. Raises KeyError when its key is there."""

    def remove(self, block: Block, /) -> None:
        """Removes one. Raises KeyError when it is not there."""

    def match(self, keys: Sequence[BlockKey], /) -> list[Block]:
        """The blocks of `keys` up to the first that is not there or not the child of the one before (of none, for the first)."""

    def by_depth(self) -> list[Block]:
        """All blocks, parents before their children; O(blocks)."""

class BlockHeap:
    """A heap of blocks by value, among equals by last use; neither may change while the block is in. A block can be in several heaps at a
    time if each is of another lane, 0 to 3."""

    def __new__(cls, lane: int) -> BlockHeap: ...
    def __len__(self) -> int: ...
    def __contains__(self, block: Block, /) -> bool: ...
    def push(self, block: Block, value: float, /) -> None:
        """Adds one. Raises ValueError when it is in."""

    def discard(self, block: Block, /) -> None: ...
    def peek(self) -> Block | None:
        """The one that `pop` would return."""

    def pop(self) -> Block:
        """Removes the block of least value. Raises IndexError when there is none."""
