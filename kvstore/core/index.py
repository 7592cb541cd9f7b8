"""The index of committed blocks by key. What it holds is prefix-closed, and so is what is referenced."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Container, Generator, Iterator, Sequence

from kvstore._native import Block, BlockTable
from kvstore.core.eviction_order import EvictionOrder
from kvstore.core.eviction_policy import EvictionPolicy
from kvstore.core.history import UseHistory
from kvstore.core.tenants import Tenant
from springtide.ids import BlockKey, Slot


class BlockIndex:
    """The index of the blocks of one tier, which has room for `capacity`. `pinned`, `tells_dirty` as in EvictionOrder."""

    def __init__(self, capacity: int, policy: EvictionPolicy, pinned: Container[BlockKey] = (), tells_dirty: bool = False) -> None:
        self._blocks = BlockTable(capacity)
        self._order = EvictionOrder(policy, pinned, tells_dirty)
        self._observer = policy.observer
        self._history = UseHistory(capacity)
        self._tick = 0
        self.num_unreferenced = 0
        """Because references are prefix-closed, all of these can go, leaf by leaf."""
        self.num_spare = 0
        """The spare ones among them."""

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, key: BlockKey) -> Block | None:
        return self._blocks.get(key)

    def keys(self) -> list[BlockKey]:
        """The keys of all blocks, parents before their children; O(blocks), as `blocks`."""
        return [block.key for block in self._blocks.by_depth()]

    def blocks(self) -> list[Block]:
        """All blocks, parents before their children."""
        return self._blocks.by_depth()

    def with_descendants(self, keys: Collection[BlockKey] | None) -> list[Block]:
        """The blocks of `keys` and all that continue them, or all blocks when None; parents before their children; O(blocks), but for
        leaves."""
        if keys is not None:
            named = [block for key in keys if (block := self._blocks.get(key)) is not None]
            if not any(block.children for block in named):
                return named
        found: dict[BlockKey, Block] = {}
        for block in self.blocks():
            if keys is None or block.key in keys or (block.parent is not None and block.parent.key in found):
                found[block.key] = block
        return list(found.values())

    def match(self, keys: Sequence[BlockKey]) -> list[Block]:
        """The longest prefix of `keys`, counted from a first block on, that is held."""
        return self._blocks.match(keys)

    def insert(self, key: BlockKey, parent: Block | None, slot: Slot, tenant: Tenant) -> Block:
        """A new block, which takes `slot` over from the caller, who references `parent` and now the block too; `evict` gives it back."""
        assert parent is None or parent.refs > 0, "only who holds a block adds a child to it"
        block = Block(key, slot, parent, tenant)
        self._blocks.add(block)
        if parent is not None:
            parent.children += 1
            was_spare = parent.spare
            parent.dirty_children += 1
            if was_spare:
                self._spare_changed(parent)
        block.uses = self._history.recall(block)
        block.reference()
        if self._observer is not None and self._observer.observes(block):
            block.sampled = True
            self._observer.used(block, self._tick)
        return block

    def reference(self, block: Block) -> None:
        """Adds a reference: the block does not go, and is used once more."""
        if block.evictable:
            self._order.discard(block)  # before its uses change, which may decide where it is
        if block.reference() == 0:
            self.num_unreferenced -= 1
            if block.spare:
                self._count_spare(block, -1)
            block.tenant.unreferenced -= 1
            if block.sampled and self._observer is not None:
                self._observer.used(block, self._tick)

    def dereference(self, block: Block) -> None:
        """Drops a reference. Callers drop a prefix from its end, so that a leaf counts as less recently used than its ancestors."""
        if block.dereference() == 0:
            self._tick += 1
            block.last_used = self._tick
            self.num_unreferenced += 1
            if block.spare:
                self._count_spare(block, 1)
            block.tenant.unreferenced += 1
            if block.sampled and self._observer is not None:
                self._observer.rested(block, self._tick)
            if not block.children:
                self._order.add(block)

    def evict(self, count: int, tenant: Tenant | None = None) -> list[Block]:
        """Removes `count` blocks (of `tenant`, where one with a quota is given), least valuable leaf first. Their slots are the caller's.
        At most as many as are unreferenced can be had."""
        assert count <= (self.num_unreferenced if tenant is None else tenant.unreferenced), "more asked for than can go"
        victims = []
        for _ in range(count):
            victim = self._order.pop(self._tick, tenant)
            self._remove(victim)
            victims.append(victim)
        return victims

    def discard(self, block: Block) -> None:
        """Removes one that is evictable. Its slot is the caller's."""
        self._order.discard(block)
        self._remove(block)

    def set_clean(self, block: Block, clean: bool) -> None:
        """Notes whether the SSD holds the block too."""
        before = block.spare
        with self.reordering(block):
            block.clean = clean
        if block.spare is not before:
            self._spare_changed(block)

    def _spare_changed(self, block: Block) -> None:
        """Counts it, and its ancestors that are spare or not by this."""
        spare = block.spare
        while True:
            if block.refs == 0:
                self._count_spare(block, 1 if spare else -1)
            parent = block.parent
            if parent is None:
                return
            before = parent.spare
            parent.dirty_children -= 1 if spare else -1
            if parent.spare is before:
                return
            block = parent

    def _count_spare(self, block: Block, change: int) -> None:
        self.num_spare += change
        block.tenant.spare += change

    def dirty_leaves(self, tenant: Tenant | None = None) -> Generator[Block, None, None]:
        """The blocks (of `tenant`, where one with a quota is given) that are evictable and not clean, the next victim first. Nothing may
        change before the iterator is closed."""
        return self._order.dirty(self._tick, tenant)

    @contextlib.contextmanager
    def reordering(self, block: Block) -> Iterator[None]:
        """Takes the block out of the order while its pins change, or whether it is clean."""
        ordered = block in self._order
        if ordered:
            self._order.discard(block)
        yield
        if ordered:
            self._order.add(block)

    def _remove(self, block: Block) -> None:
        assert block.evictable, "only leaves that nobody references go"
        self._blocks.remove(block)
        self._history.remember(block)
        self.num_unreferenced -= 1
        block.tenant.unreferenced -= 1
        parent = block.parent
        if block.spare:
            self._count_spare(block, -1)
        elif parent is not None:
            parent.dirty_children -= 1
            if parent.spare:
                self._spare_changed(parent)
        if parent is not None:
            parent.children -= 1
            if parent.evictable:
                self._order.add(parent)

    def validate(self) -> None:
        """Asserts the invariants of this class; O(blocks)."""
        blocks = self.blocks()
        children = Counter(block.parent.key for block in blocks if block.parent is not None)
        for block in blocks:
            assert self._blocks.get(block.key) is block
            assert block.refs >= 0
            if block.parent is not None:
                assert self._blocks.get(block.parent.key) is block.parent, "a held block's parent is held"
                assert block.parent.refs > 0 or block.refs == 0, "a referenced block's parent is referenced"
                assert block.parent.tenant is block.tenant, "a chain is one tenant's"
            assert block.children == children[block.key]
            assert (block in self._order) == block.evictable, "the order knows exactly the evictable blocks"
        assert self.num_unreferenced == sum(block.refs == 0 for block in blocks)
        spare = Counter(block.tenant for block in blocks if block.refs == 0 and block.spare)
        assert self.num_spare == spare.total() and all(block.tenant.spare == spare[block.tenant] for block in blocks)
        dirty = Counter(block.parent.key for block in blocks if block.parent is not None and not block.spare)
        assert all(block.dirty_children == dirty[block.key] for block in blocks)
        assert len(self._order) == sum(block.evictable for block in blocks)
