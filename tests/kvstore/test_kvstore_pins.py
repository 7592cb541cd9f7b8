"""Pins and tenants' quotas, rule by rule."""

from __future__ import annotations

import pytest
from kvstore_support import keys_of

from kvstore.core.pins import NothingHeld, PinKind, PinLimit, UnknownPin
from kvstore.core.pool import Pool
from kvstore.core.tenants import QuotaExceeded
from springtide.errors import InvalidRequest, PoolFull
from springtide.ids import AttemptId, BlockKey

OLD, NEW = keys_of(1, 2, 3), keys_of(7, 8, 9)


def cache(pool: Pool, name: str, keys: list[BlockKey], tenant: str = "") -> None:
    pool.acquire(AttemptId(name), keys, len(keys), len(keys), tenant)
    pool.commit(AttemptId(name), 0, keys)
    pool.release(AttemptId(name))
    pool.validate()


def new_pool(num_slots: int = 6, **options: int) -> Pool:
    pool = Pool([0] * num_slots, 1, **options)  # type: ignore[arg-type]
    cache(pool, "old", OLD)
    cache(pool, "new", NEW)
    return pool


def test_a_soft_pin_goes_last_and_leaf_by_leaf() -> None:
    pool = new_pool()
    pool.pins.pin("p", OLD, PinKind.SOFT, 60.0, 0.0)
    pool.acquire(AttemptId("a"), [], 3, 0)
    assert pool.held_keys() == OLD, "though it was used longer ago"
    pool.acquire(AttemptId("b"), [], 2, 0)
    pool.validate()
    assert pool.held_keys() == OLD[:1] and pool.pins.num_soft == 1
    pool.acquire(AttemptId("c"), [], 1, 0)
    with pytest.raises(UnknownPin):
        pool.pins.renew("p", 60.0, 0.0)


def test_a_hard_pin_is_never_evicted() -> None:
    pool = new_pool()
    pool.pins.pin("p", OLD[1:2], PinKind.HARD, 60.0, 0.0)
    with pytest.raises(PoolFull, match="5 slots asked for; 0 of 6 are free and 4 evictable"):
        pool.acquire(AttemptId("a"), [], 5, 0)
    pool.acquire(AttemptId("a"), [], 4, 0)
    assert pool.held_keys() == OLD[:2]
    pool.pins.unpin("p")
    assert len(pool.acquire(AttemptId("b"), [], 2, 0).slots) == 2


def test_a_tenant_leaves_as_many_hard_pins_as_it_has() -> None:
    pool = Pool([0] * 12, 1, hard_pins=8)
    acme, more, zeta = keys_of(1, 2, 3), keys_of(4, 5), keys_of(7, 8, 9)
    cache(pool, "acme", acme, "acme")
    cache(pool, "more", more, "acme")
    cache(pool, "zeta", zeta, "zeta")
    pool.pins.pin("a", acme, PinKind.HARD, 60.0, 0.0)
    with pytest.raises(
        PinLimit, match=r"5 blocks of 'acme' would be under hard pins, and 3 left of the 8 .*: a tenant leaves as many as it has"
    ):
        pool.pins.pin("b", more, PinKind.HARD, 60.0, 0.0)
    pool.pins.pin("b", more[:1], PinKind.HARD, 60.0, 0.0)
    pool.pins.pin("z", zeta[:2], PinKind.HARD, 60.0, 0.0)
    with pytest.raises(PinLimit, match="3 blocks of 'zeta' would be under hard pins, and 1 left"):
        pool.pins.pin("z", zeta, PinKind.HARD, 60.0, 0.0)
    pool.pins.unpin("a")
    pool.pins.pin("z", zeta, PinKind.HARD, 60.0, 0.0)
    pool.pins.pin("b", more, PinKind.HARD, 60.0, 0.0)
    pool.validate()
    assert pool.pins.num_hard == 5


def test_hard_pins_leave_room_to_serve_and_blocks_that_they_share_count_once() -> None:
    pool = new_pool(hard_pins=3)
    pool.pins.pin("p", OLD[:2], PinKind.HARD, 60.0, 0.0)
    pool.pins.pin("q", OLD, PinKind.HARD, 60.0, 0.0)
    with pytest.raises(PinLimit, match=r"hard pin 'r' of 1 blocks: 4 blocks would be under hard pins, of which this store takes 3"):
        pool.pins.pin("r", NEW[:1], PinKind.HARD, 60.0, 0.0)
    pool.pins.pin("r", NEW, PinKind.SOFT, 60.0, 0.0)
    pool.pins.pin("q", NEW[:1], PinKind.HARD, 60.0, 0.0)  # in place of what it kept before
    pool.validate()
    assert (pool.pins.num_hard, pool.pins.num_soft) == (3, 3)


def test_a_pin_ends_when_its_time_is_over_unless_it_is_renewed() -> None:
    pool = new_pool()
    pool.pins.pin("p", OLD, PinKind.HARD, 60.0, 0.0)
    pool.pins.pin("q", NEW, PinKind.SOFT, 50.0, 0.0)
    pool.pins.renew("p", 60.0, 30.0)
    assert pool.pins.expire(60.0) == 1
    assert [pin.pin_id for pin in pool.pins] == ["p"]
    assert pool.pins.expire(90.0) == 1
    with pytest.raises(UnknownPin):
        pool.pins.unpin("p")
    assert pool.counts().cached == 6


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_pin_has_an_end_and_something_to_keep(ttl_s: float) -> None:
    pool = new_pool()
    with pytest.raises(InvalidRequest, match="ttl_s must be finite and more than 0"):
        pool.pins.pin("p", OLD, PinKind.SOFT, ttl_s, 0.0)
    with pytest.raises(NothingHeld):
        pool.pins.pin("p", keys_of(99), PinKind.SOFT, 1.0, 0.0)
    assert len(pool.pins) == 0


def test_a_tenant_at_its_quota_replaces_its_own_blocks() -> None:
    pool = Pool([0] * 10, 1, quotas={"them": 3})
    cache(pool, "ours", OLD)
    for number in range(5):
        cache(pool, f"theirs {number}", keys_of(100 + number, 200), tenant="them")
    assert set(pool.held_keys()) >= set(OLD)
    assert pool.tenants.slots_of("them") <= 3
    assert pool.counts().free >= 4, "there was room, but not in the quota"


def test_what_a_tenant_uses_itself_is_not_taken_from_others() -> None:
    pool = Pool([0] * 10, 1, quotas={"them": 3})
    cache(pool, "ours", OLD)
    pool.acquire(AttemptId("a"), [], 2, 0, "them")
    with pytest.raises(QuotaExceeded, match=r"tenant 'them' holds 2 of its quota of 3 blocks .*, 2 of them in use: no room for 2 more"):
        pool.acquire(AttemptId("b"), [], 2, 0, "them")
    with pytest.raises(InvalidRequest, match="4 blocks are more than the quota of tenant 'them': 3"):
        pool.acquire(AttemptId("c"), [], 4, 0, "them")
    pool.validate()
    assert len(pool.acquire(AttemptId("d"), [], 8, 0).slots) == 8, "others are not held to it"


def test_what_others_of_the_tenant_grow_by_is_kept_of_its_quota() -> None:
    pool = Pool([0] * 10, 1, quotas={"them": 4})
    cache(pool, "theirs", keys_of(1), tenant="them")
    pool.reserve(AttemptId("a"), [], 2, "them", leave_available=8, leave_in_quota=2)
    with pytest.raises(QuotaExceeded, match="2 of them in use, 2 are kept for others of it: no room for 1 more"):
        pool.reserve(AttemptId("b"), [], 1, "them", leave_in_quota=2)
    pool.validate()
    assert len(pool.acquire(AttemptId("c"), [], 1, 0, "them", leave_in_quota=1).slots) == 1
    assert len(pool.reserve(AttemptId("d"), [], 7, leave_in_quota=100).slots) == 7, "who has no quota keeps nothing of it"


def test_a_tenant_within_its_quota_may_push_out_others() -> None:
    pool = Pool([0] * 4, 1, quotas={"them": 3})
    cache(pool, "ours", [*OLD, *keys_of(1, 2, 3, 4)[3:]])
    assert len(pool.acquire(AttemptId("a"), [], 3, 0, "them").slots) == 3


def test_of_a_tenant_that_holds_nothing_nothing_is_kept() -> None:
    pool = Pool([0] * 4, 1)
    for number in range(100):
        cache(pool, f"a{number}", keys_of(number), tenant=f"tenant {number}")
    assert len(list(pool.tenants)) <= 4
    with pytest.raises(PoolFull):
        pool.acquire(AttemptId("b"), [], 5, 0, "nobody")
    pool.validate()
