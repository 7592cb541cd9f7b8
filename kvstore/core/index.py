"""The index of committed blocks by key. What it holds is prefix-closed, and so is what is referenced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.core.block import Block
from kvstore.core.eviction import EvictionPolicy
from springtide.ids import BlockKey, Slot


class BlockIndex:
    def __init__(self, policy: EvictionPolicy) -> None:
        self._blocks: dict[BlockKey, Block] = {}
        self._policy = policy
        self._tick = 0
        self.num_unreferenced = 0
        """Because references are prefix-closed, all of these can go, leaf by leaf."""

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, key: BlockKey) -> Block | None:
        return self._blocks.get(key)

    def keys(self) -> list[BlockKey]:
        """Every key, parents before their children."""
        return list(self._blocks)

    def blocks(self) -> Iterable[Block]:
        return self._blocks.values()

    def match(self, keys: Sequence[BlockKey]) -> list[Block]:
        """The longest prefix of `keys`, counted from a first block on, that is held."""
        found: list[Block] = []
        parent: Block | None = None
        for key in keys:
            block = self._blocks.get(key)
            if block is None or block.parent is not parent:
                break
            found.append(block)
            parent = block
        return found

    def insert(self, key: BlockKey, parent: Block | None, slot: Slot) -> Block:
        """Takes `slot` over from the caller, who references `parent`; `evict` gives it back. The new block has no reference yet."""
        assert key not in self._blocks, "a key is held once"
        assert parent is None or parent.refs > 0, "only who holds a block adds a child to it"
        block = Block(key, slot, parent)
        self._blocks[key] = block
        if parent is not None:
            parent.children += 1
        self._became_unreferenced(block)
        return block

    def reference(self, block: Block) -> None:
        if block.refs == 0:
            self.num_unreferenced -= 1
            self._policy.discard(block)
        block.refs += 1

    def dereference(self, block: Block) -> None:
        """Callers drop a prefix from its end, so that a leaf counts as less recently used than its ancestors."""
        assert block.refs > 0, "dereferenced more often than referenced"
        block.refs -= 1
        if block.refs == 0:
            self._became_unreferenced(block)

    def evict(self, count: int) -> list[Block]:
        """Removes `count` blocks, least valuable leaf first. Their slots are the caller's. At most `num_unreferenced` can be had."""
        assert count <= self.num_unreferenced, "more asked for than can go"
        return [self._evict_one() for _ in range(count)]

    def _evict_one(self) -> Block:
        block = self._policy.pop()
        del self._blocks[block.key]
        self.num_unreferenced -= 1
        parent = block.parent
        if parent is not None:
            parent.children -= 1
            if parent.evictable:
                self._policy.add(parent)
        return block

    def _became_unreferenced(self, block: Block) -> None:
        self._tick += 1
        block.last_used = self._tick
        self.num_unreferenced += 1
        if block.evictable:
            self._policy.add(block)

    def validate(self) -> None:
        """Asserts the invariants of this class; O(blocks)."""
        children: dict[BlockKey, int] = {}
        for key, block in self._blocks.items():
            assert block.key == key
            assert block.refs >= 0
            if block.parent is not None:
                assert self._blocks.get(block.parent.key) is block.parent, "a held block's parent is held"
                assert block.parent.refs > 0 or block.refs == 0, "a referenced block's parent is referenced"
                children[block.parent.key] = children.get(block.parent.key, 0) + 1
            assert (block in self._policy) == block.evictable, "the policy knows exactly the evictable blocks"
        assert all(block.children == children.get(key, 0) for key, block in self._blocks.items())
        assert self.num_unreferenced == sum(block.refs == 0 for block in self._blocks.values())
        assert len(self._policy) == sum(block.evictable for block in self._blocks.values())
