"""Which blocks go to the SSD and which make room there: single stories, and the pool's random orders with an SSD beside them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from kvstore_support import keys_of
from test_kvstore_pins_random import PinnedPoolMachine
from test_kvstore_pool_random import HARD_PINS, INCARNATION, LEASE_S, NUM_LAYERS, NUM_SLOTS, PROMPTS, PoolMachine

from kvstore.core.eviction import new_policy
from kvstore.core.pool import Pool
from kvstore.core.ssd import BlockCopy, SsdBlocks
from springtide.choices import EvictionName
from springtide.ids import AttemptId, BlockKey
from springtide.protocol.storage import BlocksRemoved, BlocksStored, Tier

SSD_CAPACITY = 16


def new_pool(num_slots: int = 8, ssd_capacity: int = SSD_CAPACITY) -> tuple[Pool, SsdBlocks]:
    pool = Pool([0] * num_slots, 1, ssd_capacity=ssd_capacity)
    assert pool.ssd is not None
    return pool, pool.ssd


def cache(pool: Pool, name: str, keys: Sequence[BlockKey]) -> None:
    pool.acquire(AttemptId(name), keys, len(keys), len(keys))
    pool.commit(AttemptId(name), 0, keys)
    pool.release(AttemptId(name))
    pool.validate()


def write(ssd: SsdBlocks, copies: Sequence[BlockCopy]) -> list[BlockKey]:
    return ssd.added([(copy.key, copy.parent) for copy in copies])


def test_the_next_victims_are_copied_first_and_their_ancestors_before_them() -> None:
    pool, ssd = new_pool()
    cold, warm = keys_of(1, 2, 3), keys_of(7, 8, 9)
    cache(pool, "cold", cold)
    cache(pool, "warm", warm)
    assert [copy.key for copy in ssd.next_copies(100)] == [*cold, *warm]
    assert [(copy.key, copy.parent) for copy in ssd.next_copies(2)] == [(cold[0], None), (cold[1], cold[0])]
    assert pool.num_free_or_spare == 2
    write(ssd, ssd.next_copies(2))
    assert pool.num_free_or_spare == 2, "as long as the last of the chain is not there, dropping one loses one"
    write(ssd, ssd.next_copies(1))
    assert pool.num_free_or_spare == 5
    assert [copy.key for copy in ssd.next_copies(100)] == warm
    pool.validate()


def test_choosing_changes_nothing_about_what_goes_next() -> None:
    pool, ssd = new_pool(6)
    cold, warm = keys_of(1, 2, 3), keys_of(7, 8, 9)
    cache(pool, "cold", cold)
    cache(pool, "warm", warm)
    write(ssd, ssd.next_copies(100))
    pool.acquire(AttemptId("room"), [], 3, 0)
    assert pool.held_keys() == warm
    assert ssd.missed == 0 and ssd.num_held(cold) == 3


def test_what_is_used_again_is_not_written_again() -> None:
    pool, ssd = new_pool(4)
    keys = keys_of(1, 2, 3)
    cache(pool, "first", keys)
    write(ssd, ssd.next_copies(100))
    pool.acquire(AttemptId("room"), [], 4, 0)
    assert pool.num_held(keys) == 0 and ssd.num_held(keys) == 3
    pool.release(AttemptId("room"))
    cache(pool, "back", keys)
    assert ssd.next_copies(100) == [] and pool.num_free_or_spare == 4


def test_blocks_that_go_before_they_are_copied_are_counted() -> None:
    pool, ssd = new_pool(4)
    cache(pool, "first", keys_of(1, 2, 3))
    pool.acquire(AttemptId("room"), [], 3, 0)
    assert ssd.missed == 2


def test_a_copy_that_makes_room_leaves_its_block_to_be_copied_again() -> None:
    pool, ssd = new_pool()
    keys = keys_of(1, 2, 3)
    cache(pool, "first", keys)
    write(ssd, ssd.next_copies(100))
    pool.take_events()
    assert ssd.make_room(2) == [keys[2], keys[1]]
    assert pool.take_events() == [BlocksRemoved(pool.node_id, pool.incarnation, 3, (keys[2], keys[1]), Tier.SSD)]
    assert [copy.key for copy in ssd.next_copies(100)] == [keys[1], keys[2]]
    assert pool.num_free_or_spare == 5
    pool.validate()


def test_a_block_whose_parent_went_while_it_was_written_is_refused() -> None:
    pool, ssd = new_pool()
    keys = keys_of(1, 2)
    cache(pool, "first", keys)
    write(ssd, ssd.next_copies(1))
    later = ssd.next_copies(100)
    ssd.lost([keys[0]])
    assert write(ssd, later) == [keys[1]]
    assert len(ssd) == 0
    pool.validate()


def test_what_is_evicted_by_order_while_it_is_written_does_not_come_back() -> None:
    pool, ssd = new_pool()
    keys = keys_of(1, 2)
    cache(pool, "first", keys)
    copies, losses = ssd.next_copies(100), ssd.losses
    assert pool.evict(None).blocks == 2
    assert ssd.added([(copy.key, copy.parent) for copy in copies], losses) == keys
    assert len(ssd) == 0 and pool.num_held(keys) == 0
    pool.validate()


def test_a_tenants_own_blocks_are_copied_before_its_quota_pushes_them_out() -> None:
    pool = Pool([0] * 20, 1, quotas={"small": 4}, ssd_capacity=SSD_CAPACITY)
    ssd = pool.ssd
    assert ssd is not None
    cache(pool, "theirs", keys_of(7, 8))
    own = [keys_of(label, label) for label in (1, 2)]
    for number, keys in enumerate(own):
        pool.acquire(AttemptId(f"own-{number}"), keys, 2, 0, "small")
        pool.commit(AttemptId(f"own-{number}"), 0, keys)
        pool.release(AttemptId(f"own-{number}"))
    (small,) = [tenant for tenant in pool.tenants if tenant.quota is not None]
    assert small.num_unused_or_spare == 0
    assert [copy.key for copy in ssd.next_copies(2, small)] == own[0]
    write(ssd, ssd.next_copies(2, small))
    assert small.num_unused_or_spare == small.spare == 2
    assert [copy.key for copy in ssd.next_copies(100, small)] == own[1]
    pool.acquire(AttemptId("room"), [], 2, 0, "small")
    assert ssd.missed == 0 and pool.num_held(own[0]) == 0 and ssd.num_held(own[0]) == 2
    pool.validate()


def test_what_is_lost_takes_what_continues_it_along() -> None:
    pool, ssd = new_pool()
    left, right = keys_of(1, 2, 3), keys_of(1, 2, 4)
    cache(pool, "left", left)
    cache(pool, "right", right)
    write(ssd, ssd.next_copies(100))
    assert ssd.lost([left[2]]) == [left[2]]
    assert set(ssd.lost([left[1]])) == {left[1], right[2]}
    assert ssd.keys() == [left[0]]
    pool.validate()


class TieredMachine(PoolMachine):
    """Whatever else happens, blocks are written to an SSD that is larger than the arena, and go from there."""

    POLICY: EvictionName = "hit-density"

    @initialize()
    def make(self) -> None:
        super().make()
        self.pool = Pool(
            self.generations,
            NUM_LAYERS,
            lease_s=LEASE_S,
            incarnation=INCARNATION,
            quotas=self.QUOTAS,
            hard_pins=HARD_PINS,
            policy=new_policy(self.POLICY, NUM_SLOTS),
            ssd_capacity=SSD_CAPACITY,
            ssd_policy=new_policy(self.POLICY, SSD_CAPACITY),
        )
        assert self.pool.ssd is not None
        self.ssd = self.pool.ssd
        self.on_ssd: set[BlockKey] = set()
        self.writing: list[BlockCopy] = []
        self.losses = 0

    @rule(at_most=st.integers(1, 6), whose=st.integers(0, 9))
    def begin_write(self, at_most: int, whose: int) -> None:
        """One batch at a time, as the store does."""
        limited = [tenant for tenant in self.pool.tenants if tenant.quota is not None]
        if not self.writing:
            self.writing = self.ssd.next_copies(at_most, limited[whose] if whose < len(limited) else None)
            self.losses = self.ssd.losses
            assert len(self.writing) <= at_most
            before = {copy.key for copy in self.writing}
            assert len(before) == len(self.writing) and before.isdisjoint(self.ssd.keys())

    @rule(held=st.lists(st.booleans(), min_size=6, max_size=6))
    def end_write(self, held: list[bool]) -> None:
        """The tier has taken some."""
        kept: set[BlockKey | None] = {None, *self.ssd.keys()}
        there = []
        for copy, taken in zip(self.writing, held, strict=False):
            if taken and copy.parent in kept:
                kept.add(copy.key)
                there.append((copy.key, copy.parent))
        self.writing = []
        room = SSD_CAPACITY - len(self.ssd)
        stale = self.losses != self.ssd.losses
        refused = self.ssd.added(there[:room], self.losses)
        assert not stale or refused == [own for own, _ in there[:room]]

    @rule(count=st.integers(1, 4))
    def make_room(self, count: int) -> None:
        before = len(self.ssd)
        assert len(self.ssd.make_room(count)) == min(count, before)

    @rule(prompt=PROMPTS)
    def lose(self, prompt: list[int]) -> None:
        self.ssd.lost(keys_of(*prompt)[-1:])

    @rule(prompt=PROMPTS)
    def use(self, prompt: list[int]) -> None:
        self.ssd.used(keys_of(*prompt))

    @rule(prompt=PROMPTS, everything=st.booleans())
    def evict_by_order(self, prompt: list[int], everything: bool) -> None:
        kept = self.pool.evict(None if everything else keys_of(*prompt)[-1:]).kept
        if everything:
            assert len(self.pool.held_keys()) == kept and set(self.ssd.keys()) <= set(self.pool.held_keys())

    @invariant()
    def spare_is_what_can_go_without_a_loss(self) -> None:
        spare = self.pool.num_free_or_spare
        assert 0 <= spare <= self.pool.counts().available

    @invariant()
    def events_tell_exactly_what_is_held(self) -> None:
        for event in self.pool.take_events():
            assert event.sequence == self.sequence + 1
            self.sequence = event.sequence
            held = self.held if event.tier is Tier.DRAM else self.on_ssd
            if isinstance(event, BlocksStored):
                assert held.isdisjoint(event.keys)
                held.update(event.keys)
            else:
                assert held.issuperset(event.keys)
                held.difference_update(event.keys)
        assert self.held == set(self.pool.held_keys())
        assert self.on_ssd == set(self.ssd.keys())


TestTiersUnderRandomOrders = TieredMachine.TestCase
TestTiersUnderRandomOrders.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)


class TieredMachineWithAQuota(TieredMachine, PinnedPoolMachine):
    """And some of them are pinned, or those of a tenant with a quota."""


TestTiersWithAQuotaUnderRandomOrders = TieredMachineWithAQuota.TestCase
TestTiersWithAQuotaUnderRandomOrders.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
