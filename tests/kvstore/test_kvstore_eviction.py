"""What goes when room is needed: every policy keeps to the rules, and each has its own idea of what is worth keeping."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstore_support import keys_of

from kvstore._native import MAX_USES, Block
from kvstore.core.eviction import EVICTION_POLICIES, new_policy
from kvstore.core.history import UseHistory
from kvstore.core.hit_density import HitDensity, hit_density
from kvstore.core.index import BlockIndex
from kvstore.core.pool import Pool
from kvstore.core.tenants import Tenant
from springtide.blocks import block_keys, namespace_root
from springtide.choices import EvictionName
from springtide.ids import AttemptId, BlockKey, Slot

NAMES = list(EVICTION_POLICIES)
TENANT = Tenant("", None)
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


class Cache:
    """An index of `capacity` blocks, and requests for prompts as the pool makes them."""

    def __init__(self, name: EvictionName, capacity: int) -> None:
        self.index = BlockIndex(capacity, new_policy(name, capacity))
        self.capacity = capacity
        self.evicted: list[BlockKey] = []

    def request(self, keys: list[BlockKey]) -> int:
        """Returns how many blocks were there."""
        held = self.index.match(keys)
        for block in held:
            self.index.reference(block)
        short = len(self.index) + len(keys) - len(held) - self.capacity
        if short > 0:
            self.evicted += [block.key for block in self.index.evict(short)]
        blocks = list(held)
        for key in keys[len(held) :]:
            blocks.append(self.index.insert(key, blocks[-1] if blocks else None, Slot(0), TENANT))
        for block in reversed(blocks):
            self.index.dereference(block)
        return len(held)

    def holds(self, key: BlockKey) -> bool:
        return self.index.get(key) is not None


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(paths=st.lists(PATHS, max_size=60), capacity=st.integers(6, 20))
def test_what_is_held_is_prefix_closed_and_fits_whatever_comes(name: EvictionName, paths: list[list[int]], capacity: int) -> None:
    cache = Cache(name, capacity)
    for path in paths:
        keys = keys_of(*path)
        cache.request(keys)
        assert len(cache.index) <= capacity
        assert [block.key for block in cache.index.match(keys)] == keys, "what was requested last is there"
        cache.index.validate()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), steps=st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.integers(1, 40)), max_size=60))
def test_a_queue_gives_every_member_once_and_nobody_else(
    name: EvictionName, data: st.DataObject, steps: list[tuple[int, bool, int]]
) -> None:
    queue = new_policy(name, 16).new_queue(0)
    blocks = [Block(key, Slot(0), None, TENANT) for key in (keys_of(label)[0] for label in range(10))]
    members: set[int] = set()
    for tick, (number, enters, uses) in enumerate(steps, 1):
        block = blocks[number]
        queue.discard(block)
        members.discard(number)
        if enters:
            block.last_used, block.uses = tick, min(uses, MAX_USES)
            queue.add(block)
            members.add(number)
        assert len(queue) == len(members)
        assert {number for number, block in enumerate(blocks) if block in queue} == members
    popped = [queue.pop(len(steps) + 1) for _ in range(len(members))]
    assert {blocks.index(block) for block in popped} == members
    with pytest.raises(IndexError):
        queue.pop(len(steps) + 1)


@pytest.mark.parametrize("name", NAMES)
def test_in_use_is_never_evicted(name: EvictionName) -> None:
    pool = Pool(array("Q", bytes(8 * 8)), 1, policy=new_policy(name, 8))
    used = keys_of(1, 2, 3)
    pool.acquire(AttemptId("a"), used, 3, 3)
    pool.commit(AttemptId("a"), 0, used)
    for label in range(4, 40):
        pool.acquire(AttemptId(f"b{label}"), keys_of(label, 0, 0), 5, 3)
        pool.commit(AttemptId(f"b{label}"), 0, keys_of(label, 0, 0))
        pool.release(AttemptId(f"b{label}"))
        pool.validate()
    assert pool.num_held(used) == 3


def test_lru_keeps_what_was_used_last() -> None:
    cache = Cache("lru", 4)
    for label in (1, 2, 3, 4, 1, 2, 5, 6):
        cache.request(keys_of(label))
    assert cache.evicted == [keys_of(3)[0], keys_of(4)[0]]


@pytest.mark.parametrize("name", ["lfu", "length-aware", "hit-density"])
def test_what_is_used_often_outlives_what_passes_through_and_comes_back_with_its_count(name: EvictionName) -> None:
    cache = Cache(name, 10)
    often = keys_of(1)
    for _ in range(4):
        cache.request(often)
    for label in range(100, 112):
        cache.request(keys_of(label))
    assert cache.holds(often[0]), "an LRU would have dropped it"


@pytest.mark.parametrize("name", ["lfu", "length-aware"])
def test_what_was_used_often_long_ago_goes_in_the_end(name: EvictionName) -> None:
    cache = Cache(name, 10)
    for _ in range(100):
        cache.request(keys_of(1))
    for label in range(100, 200):
        cache.request(keys_of(label))
    assert not cache.holds(keys_of(1)[0])


def test_length_aware_keeps_the_end_of_a_long_prompt_longer_than_that_of_a_short_one() -> None:
    kept = {}
    for name in ("lfu", "length-aware"):
        cache = Cache(name, 40)
        deep, shallow = keys_of(*range(8)), [keys_of(label) for label in range(100, 132)]
        cache.request(deep)
        for keys in shallow:
            cache.request(keys)
        cache.request(keys_of(7))
        kept[name] = cache.holds(deep[-1])
    assert kept == {"lfu": False, "length-aware": True}


def test_hit_density_learns_that_a_scan_is_never_read_again() -> None:
    """Prompts that come again after twice as many blocks as there is room for, among others that never do: LRU has no hit at all."""
    rates = {}
    for name in ("lru", "hit-density"):
        cache, hits, lookups = Cache(name, 1000), 0, 0
        chance = random.Random(7)
        root = namespace_root("", "", 1)
        again = [block_keys(root, [number], 1) for number in range(400)]
        for number in range(30_000):
            keys = again[number // 5 % 400] if number % 5 == 0 else block_keys(root, [1000 + chance.getrandbits(31)], 1)
            if number >= 15_000:
                hits, lookups = hits + cache.request(keys), lookups + (number % 5 == 0)
            else:
                cache.request(keys)
        rates[name] = hits / lookups
    assert rates["lru"] == 0.0
    assert rates["hit-density"] > 0.8, rates


def test_hit_density_of_a_certain_use_is_one_in_the_time_until_then() -> None:
    widths = np.array([10.0, 10.0, 10.0, 1000.0])
    hazard = np.array([[0.0, 0.0, 1 - 1e-9, 0.0], [0.0, 0.0, 0.0, 0.0]])
    density = hit_density(hazard, widths)
    assert density[0, :3] == pytest.approx([1 / 25, 1 / 15, 1 / 5])
    assert not density[1].any()


def test_what_hit_density_observes_has_a_limit() -> None:
    for capacity in (100, 10_000, 1_000_000):
        policy = HitDensity(capacity)
        chance = random.Random(3)
        blocks = (Block(BlockKey(chance.randbytes(16)), Slot(0), None, TENANT) for _ in range(20_000))
        share = sum(policy.observes(block) for block in blocks) / 20_000
        assert share == 1.0 if capacity == 100 else share * 8 * capacity < 20_000


def test_history_remembers_the_latest_and_forgets_the_oldest() -> None:
    history = UseHistory(1)
    chance = random.Random(5)
    blocks = [Block(BlockKey(chance.randbytes(16)), Slot(0), None, TENANT) for _ in range(200_000)]
    for number, block in enumerate(blocks):
        block.uses = 1 + number % MAX_USES
        history.remember(block)
    remembered = [history.recall(block) == block.uses for block in blocks]
    assert all(remembered[-100:])
    assert sum(remembered[-10_000:]) > 9_000
    assert sum(remembered[:10_000]) < 2_000
    strangers = [Block(BlockKey(chance.randbytes(16)), Slot(0), None, TENANT) for _ in range(20_000)]
    assert sum(history.recall(block) > 0 for block in strangers) < 50
