"""The pool's blocks, which are C's, do what their oracle does."""

from __future__ import annotations

import gc
from typing import Any

import kvstore_oracle as oracle
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvstore_support import keys_of

from kvstore import _native
from kvstore._native import Block, BlockHeap, BlockTable
from kvstore.core.tenants import Tenant
from springtide.ids import BlockKey, Slot

BOTH: tuple[Any, Any] = (_native, oracle)
TENANT = Tenant("", None)
FIELDS = ("key", "slot", "children", "refs", "last_used", "uses", "clean", "sampled", "spare", "depth", "key_bits", "evictable")


class Twins(RuleBasedStateMachine):
    """Each step is made with both; whatever can be seen is compared."""

    @initialize(capacity=st.integers(0, 40))
    def make(self, capacity: int) -> None:
        self.tables = [module.BlockTable(capacity) for module in BOTH]
        self.heaps = [[module.BlockHeap(lane) for lane in range(3)] for module in BOTH]
        self.pairs: dict[tuple[int, ...], tuple[Any, Any]] = {}
        self.tick = 0

    @rule(path=st.lists(st.integers(0, 2), min_size=1, max_size=4), slot=st.integers(-1, 1 << 30))
    def add(self, path: list[int], slot: int) -> None:
        above = self.pairs.get(tuple(path[:-1]), (None, None))
        if (len(path) > 1 and above[0] is None) or tuple(path) in self.pairs:
            return
        key = keys_of(*path)[-1]
        pair = tuple(module.Block(key, slot, parent, TENANT) for module, parent in zip(BOTH, above, strict=True))
        self.pairs[tuple(path)] = (pair[0], pair[1])
        self.tick += 1
        for table, block in zip(self.tables, pair, strict=True):
            block.last_used = self.tick
            table.add(block)
            with pytest.raises(KeyError):
                table.add(block)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(self.pairs)))
        for table, block in zip(self.tables, self.pairs.pop(path), strict=True):
            table.remove(block)
            with pytest.raises(KeyError):
                table.remove(block)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), times=st.integers(1, 20))
    def use(self, data: st.DataObject, times: int) -> None:
        pair = self.pairs[data.draw(st.sampled_from(sorted(self.pairs)))]
        self._everywhere("discard", pair)
        self.tick += 1
        for _ in range(times):
            assert pair[0].reference() == pair[1].reference()
        for block in pair:
            block.last_used = self.tick
            block.clean = not block.clean
            block.children += 1
        for _ in range(times):
            assert pair[0].dereference() == pair[1].dereference()
        for block in pair:
            with pytest.raises(AssertionError):
                block.dereference()

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), lane=st.integers(0, 2), value=st.integers(0, 5))
    def push(self, data: st.DataObject, lane: int, value: float) -> None:
        pair = self.pairs[data.draw(st.sampled_from(sorted(self.pairs)))]
        for heaps, block in zip(self.heaps, pair, strict=True):
            if block in heaps[lane]:
                with pytest.raises(ValueError):
                    heaps[lane].push(block, value)
            else:
                heaps[lane].push(block, value)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        self._everywhere("discard", self.pairs[data.draw(st.sampled_from(sorted(self.pairs)))])

    @rule(lane=st.integers(0, 2))
    def pop(self, lane: int) -> None:
        native_heap, oracle_heap = (heaps[lane] for heaps in self.heaps)
        if len(oracle_heap):
            assert native_heap.pop().key == oracle_heap.pop().key
            return
        for heap in (native_heap, oracle_heap):
            with pytest.raises(IndexError):
                heap.pop()

    @rule(path=st.lists(st.integers(0, 2), max_size=5))
    def match(self, path: list[int]) -> None:
        keys = keys_of(*path)
        found = [[block.key for block in table.match(keys)] for table in self.tables]
        assert found[0] == found[1]

    def _everywhere(self, method: str, pair: tuple[Any, Any]) -> None:
        for heaps, block in zip(self.heaps, pair, strict=True):
            for heap in heaps:
                getattr(heap, method)(block)

    @invariant()
    def alike(self) -> None:
        for pair in self.pairs.values():
            assert [getattr(pair[0], field) for field in FIELDS] == [getattr(pair[1], field) for field in FIELDS]
            for table, block in zip(self.tables, pair, strict=True):
                assert table.get(block.key) is block
        for table in self.tables:
            depths = [block.depth for block in table.by_depth()]
            assert len(depths) == len(table) == len(self.pairs) and depths == sorted(depths)
        for native_heap, oracle_heap in zip(*self.heaps, strict=True):
            assert len(native_heap) == len(oracle_heap)
            heads = [heap.peek() for heap in (native_heap, oracle_heap)]
            native_head, oracle_head = (head and head.key for head in heads)
            assert native_head == oracle_head
            assert all((pair[0] in native_heap) == (pair[1] in oracle_heap) for pair in self.pairs.values())


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_a_table_finds_every_block_however_many_come_and_go() -> None:
    table = BlockTable(0)
    keys = keys_of(*range(3000))
    blocks = []
    for number, key in enumerate(keys):
        blocks.append(Block(key, Slot(number), blocks[-1] if blocks else None, TENANT))
        table.add(blocks[-1])
    assert table.match(keys) == blocks
    for block in reversed(blocks[1000:]):
        table.remove(block)
    assert table.match(keys) == blocks[:1000]
    assert all(table.get(key) is None for key in keys[1000:]) and len(table) == 1000


def test_a_match_ends_at_a_block_that_has_another_parent() -> None:
    table = BlockTable(4)
    first, second, stranger = keys_of(1)[0], keys_of(1, 2)[1], keys_of(3)[0]
    parent = Block(first, 0, None, TENANT)
    for block in (parent, Block(second, 1, parent, TENANT), Block(stranger, 2, None, TENANT)):
        table.add(block)
    assert [block.slot for block in table.match([first, second])] == [0, 1]
    assert [block.slot for block in table.match([first, stranger])] == [0]
    assert table.match([second]) == []


def test_a_block_has_the_size_that_the_documentation_tells() -> None:
    assert Block.__basicsize__ == 96
    assert not gc.is_tracked(Block(BlockKey(bytes(16)), 0, None, TENANT))


def test_a_chain_longer_than_the_stack_is_freed() -> None:
    block = None
    for number in range(300_000):
        block = Block(number.to_bytes(16), 0, block, TENANT)
    del block
    gc.collect()


@pytest.mark.parametrize("key", [b"short", "text", None])
def test_what_is_no_key_is_refused(key: Any) -> None:
    table = BlockTable(1)
    for call in (lambda: Block(key, 0, None, TENANT), lambda: table.get(key), lambda: table.match([key])):
        with pytest.raises(TypeError, match="a block key is 16 bytes"):
            call()
    with pytest.raises(TypeError, match="parent"):
        Block(BlockKey(bytes(16)), 0, "no block", TENANT)
    with pytest.raises(ValueError, match="lane"):
        BlockHeap(4)
