"""The pool's rules, one by one."""

from __future__ import annotations

import pytest
from kvstore_support import keys_of

from kvstore.core.pool import Pool
from kvstore.core.results import IngestFailed, UnknownAttempt
from springtide.errors import InvalidRequest, PoolFull
from springtide.ids import AttemptId, BlockKey, Incarnation, NodeId
from springtide.protocol.storage import BlocksRemoved, BlocksStored, Ingested, Tier, Unit, Writer

A, B, C = AttemptId("a"), AttemptId("b"), AttemptId("c")
LAYERS = 3
NODE, INCARNATION = NodeId("here"), Incarnation(1)
WRITER = Writer(NodeId("peer"), Incarnation(5), "")
EVERYTHING = Unit(0, LAYERS, 0, 3)


def new_pool(num_slots: int = 8) -> tuple[Pool, list[int]]:
    generations = [0] * num_slots
    return Pool(generations, LAYERS, node_id=NODE, incarnation=INCARNATION, lease_s=30.0), generations


def cache(pool: Pool, name: str, keys: list[BlockKey]) -> None:
    """Computes these blocks and lets go of them."""
    pool.acquire(AttemptId(name), keys, len(keys), len(keys))
    pool.commit(AttemptId(name), 0, keys)
    pool.release(AttemptId(name))
    pool.validate()


def test_committed_blocks_are_found_by_the_next_attempt_up_to_its_limit() -> None:
    pool, _ = new_pool()
    keys = keys_of(1, 2, 3)
    first = pool.acquire(A, keys, 4, 3)
    assert first.local_blocks == 0
    pool.commit(A, 0, keys)
    second = pool.acquire(B, keys, 3, 2)
    assert second.local_blocks == 2
    assert second.slots[:2] == first.slots[:2]
    assert second.slots[2] not in first.slots


def test_it_is_known_what_an_engine_is_about_to_commit() -> None:
    pool, _ = new_pool(16)
    keys = keys_of(1, 2, 3)
    assert not pool.committing(keys) and not pool.committing([])
    pool.acquire(A, keys, 4, 3)
    pool.acquire(B, keys, 4, 3)
    pool.commit(A, 0, keys[:2])
    assert pool.committing(keys) and not pool.committing(keys[:2]) and not pool.committing(keys_of(7))
    pool.commit(A, 2, keys[2:])
    assert not pool.committing(keys), "it is held, whoever else computes it still"
    other = keys_of(7)
    pool.acquire(C, other, 1, 0)
    assert pool.committing(other)
    pool.engine_ended()
    assert not pool.committing(other)


def test_eviction_takes_leaves_first_and_the_least_recently_used_chain() -> None:
    pool, _ = new_pool(6)
    old, new = keys_of(1, 2, 3), keys_of(7, 8, 9)
    cache(pool, "x", old)
    cache(pool, "y", new)
    pool.take_events()
    pool.acquire(A, [], 2, 0)
    assert set(pool.held_keys()) == {old[0], *new}
    assert pool.take_events() == [BlocksRemoved(NODE, INCARNATION, 3, (old[2], old[1]), Tier.DRAM)]


def test_use_makes_a_chain_recent() -> None:
    pool, _ = new_pool(6)
    old, new = keys_of(1, 2, 3), keys_of(7, 8, 9)
    cache(pool, "x", old)
    cache(pool, "y", new)
    pool.acquire(A, old, 3, 3)
    pool.release(A)
    pool.acquire(B, [], 3, 0)
    assert pool.held_keys() == old


def test_a_full_pool_refuses_without_a_trace() -> None:
    pool, _ = new_pool(4)
    keys = keys_of(1, 2)
    cache(pool, "x", keys)
    pool.acquire(A, keys, 3, 2)
    before = pool.counts()
    with pytest.raises(PoolFull, match="2 slots asked for; 1 of 4 are free and 0 evictable"):
        pool.acquire(B, keys, 4, 2)
    assert pool.counts() == before
    pool.release(A)
    assert pool.acquire(C, keys, 4, 2).local_blocks == 2


def test_an_equal_block_that_was_there_first_stays_and_the_copy_is_private() -> None:
    pool, _ = new_pool()
    keys = keys_of(1, 2)
    first, second = pool.acquire(A, keys, 2, 2), pool.acquire(B, keys, 2, 2)
    pool.commit(A, 0, keys)
    pool.commit(B, 0, keys)
    pool.validate()
    assert pool.acquire(C, keys, 2, 2).slots == first.slots
    assert set(second.slots).isdisjoint(first.slots)
    stored = [event for event in pool.take_events() if isinstance(event, BlocksStored)]
    assert stored == [BlocksStored(NODE, INCARNATION, 1, tuple(keys), Tier.DRAM)]
    pool.release(B)
    assert pool.counts().free == 6


def test_the_ancestors_of_a_block_that_is_in_use_stay_even_as_copies() -> None:
    """B's first block is a copy of one that A committed: when A has gone, B's next block still needs it as its parent."""
    pool, _ = new_pool(4)
    keys = keys_of(1, 2)
    pool.acquire(A, keys[:1], 1, 0)
    pool.acquire(B, keys, 2, 0)
    pool.commit(A, 0, keys[:1])
    pool.commit(B, 0, keys[:1])
    pool.release(A)
    with pytest.raises(PoolFull):
        pool.acquire(C, [], 2, 0)
    pool.commit(B, 1, keys[1:])
    assert pool.held_keys() == keys


def test_a_slot_changes_generation_when_it_is_given_back() -> None:
    pool, generations = new_pool(2)
    (slot,) = pool.acquire(A, [], 1, 0).slots
    before = generations[slot]
    assert before > 0
    pool.release(A)
    assert generations[slot] == before + 1


def test_commits_repeat_harmlessly_but_leave_no_gap_and_keep_their_keys() -> None:
    pool, _ = new_pool()
    keys = keys_of(1, 2, 3)
    pool.acquire(A, keys[:2], 4, 0)
    pool.commit(A, 0, keys[:1])
    pool.commit(A, 0, keys)
    pool.commit(A, 1, keys[1:])
    assert pool.held_keys() == keys
    with pytest.raises(InvalidRequest, match=r"blocks \[4, 5\) of a, which has 4 blocks, the first 3 final"):
        pool.commit(A, 4, keys_of(9))
    with pytest.raises(InvalidRequest, match="not those given before"):
        pool.commit(A, 1, keys_of(9))


def test_an_attempt_id_is_used_once() -> None:
    pool, _ = new_pool()
    pool.acquire(A, [], 1, 0)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="every try takes a new id"):
            pool.acquire(A, [], 1, 0)
        pool.release(A)


def test_fetched_blocks_become_visible_together_and_not_before() -> None:
    pool, _ = new_pool()
    keys = keys_of(1, 2, 3)
    cache(pool, "x", keys[:1])
    acquired = pool.acquire(A, keys, 4, 3)
    assert pool.begin_fetch(A, range(1, 3)) == acquired.slots[1:3]
    with pytest.raises(InvalidRequest, match="has not arrived"):
        pool.commit(A, 1, keys[1:2])
    assert pool.held_keys() == keys[:1]
    pool.end_fetch(A, 2)
    assert pool.held_keys() == keys[:2]
    pool.commit(A, 2, keys[2:])
    assert pool.held_keys() == keys


def test_slots_stay_quarantined_while_a_fetch_may_still_write_them() -> None:
    pool, _ = new_pool(4)
    pool.acquire(A, keys_of(1, 2), 3, 2)
    pool.begin_fetch(A, range(2))
    pool.release(A)
    counts = pool.counts()
    assert (counts.free, counts.quarantined) == (2, 2)
    pool.end_fetch(A, 2)
    assert pool.counts().free == 4
    assert pool.held_keys() == []


def test_a_hand_over_keeps_the_prompt_after_the_engine_has_let_go() -> None:
    pool, _ = new_pool(4)
    slots = pool.acquire(A, [], 2, 0).slots
    assert pool.begin_hand_over(A) == slots
    pool.release(A)
    assert pool.counts().in_use == 2
    pool.end_hand_over(A)
    assert pool.counts().free == 4


def ingesting(pool: Pool, present: int = 0) -> list[BlockKey]:
    keys = keys_of(1, 2)
    if present:
        cache(pool, "earlier", keys[:present])
    assert pool.reserve(A, keys, 3).present_blocks == present
    targets = pool.open_ingest(A, WRITER)
    assert targets is not None and (len(targets.slots), targets.present_blocks) == (3, present)
    return keys


@pytest.mark.parametrize("present", [0, 1, 2])
def test_a_prompt_is_there_when_all_of_it_arrived_and_it_was_sealed_in_whatever_order(present: int) -> None:
    pool, _ = new_pool()
    keys = ingesting(pool, present)
    units = [Unit(0, 2, 0, 2), Unit(2, 3, 0, 2), Unit(0, 2, 0, 2), Unit(0, 3, 2, 3)]
    assert pool.cover(A, WRITER.node_id, units[0]) is None
    assert pool.seal(A, WRITER.node_id, 77) is None
    assert pool.cover(A, WRITER.node_id, units[1]) is None
    assert pool.cover(A, WRITER.node_id, units[2]) is None, "repeats do not count"
    assert pool.held_keys() == keys[:present]
    assert pool.cover(A, WRITER.node_id, units[3]) == Ingested(A, 77)
    assert pool.held_keys() == keys
    assert pool.cover(A, WRITER.node_id, units[3]) is None
    assert pool.seal(A, WRITER.node_id, 77) is None
    assert pool.writers() == set()


def test_writing_slots_are_quarantined_until_the_writer_closes() -> None:
    pool, generations = new_pool(4)
    ingesting(pool)
    pool.release(A)
    before = list(generations)
    assert pool.counts().quarantined == 3
    with pytest.raises(PoolFull):
        pool.acquire(B, [], 2, 0)
    assert pool.quarantined_ingests() == [(A, WRITER)]
    assert pool.close_ingest(A, WRITER.node_id, Incarnation(4)) is None, "another incarnation's word counts nothing"
    assert generations == before
    assert pool.close_ingest(A, WRITER.node_id, WRITER.incarnation) is None
    assert pool.counts().free == 4


def test_a_writer_that_gives_up_before_it_began_fails_the_waiting_engine_once_and_does_not_begin_any_more() -> None:
    """Its question where to write may be overtaken by its word that it will not."""
    pool, _ = new_pool()
    pool.reserve(A, [], 3)
    outcome = pool.close_ingest(A, WRITER.node_id, WRITER.incarnation)
    assert isinstance(outcome, IngestFailed) and "before it began" in str(outcome.error)
    assert pool.close_ingest(A, WRITER.node_id, WRITER.incarnation) is None
    with pytest.raises(UnknownAttempt):
        pool.open_ingest(A, WRITER)
    pool.release(A)
    assert pool.counts().free == 8


def test_a_writer_that_gives_up_or_is_lost_fails_the_waiting_engine_once() -> None:
    pool, _ = new_pool()
    ingesting(pool)
    outcome = pool.close_ingest(A, WRITER.node_id, WRITER.incarnation)
    assert isinstance(outcome, IngestFailed) and "3 blocks missing" in str(outcome.error)
    assert pool.close_ingest(A, WRITER.node_id, WRITER.incarnation) is None
    pool.fence(WRITER)
    pool.release(A)
    assert pool.counts().available == 8


def test_a_unit_outside_of_the_prompt_fails_the_ingest_but_keeps_its_slots_from_others() -> None:
    pool, _ = new_pool()
    ingesting(pool)
    assert isinstance(pool.cover(A, WRITER.node_id, Unit(0, LAYERS + 1, 0, 1)), IngestFailed)
    pool.release(A)
    assert pool.counts().quarantined == 3


def test_a_reservation_that_is_over_is_told_apart_from_one_to_come() -> None:
    pool, _ = new_pool()
    assert pool.open_ingest(A, WRITER) is None
    pool.reserve(A, [], 1)
    pool.release(A)
    with pytest.raises(UnknownAttempt):
        pool.open_ingest(A, WRITER)


def test_a_lease_keeps_blocks_until_it_is_released_or_expires() -> None:
    pool, _ = new_pool(3)
    keys = keys_of(1, 2, 3)
    cache(pool, "x", keys)
    first, second = pool.lease("r", keys, 0.0), pool.lease("r", [*keys[:1], *keys_of(9)], 10.0)
    assert [len(lease.slots) for lease in (first, second)] == [3, 1]
    with pytest.raises(PoolFull):
        pool.acquire(A, [], 1, 0)
    assert pool.renew_leases([first.lease_id, 99], 20.0) == [99]
    assert pool.expire_leases(40.0) == 1, "the second; the first was renewed"
    assert pool.renew_leases([second.lease_id], 40.0) == [second.lease_id]
    pool.release_lease(first.lease_id)
    assert len(pool.acquire(B, [], 3, 0).slots) == 3


def test_a_lease_on_nothing_is_none() -> None:
    pool, _ = new_pool()
    assert pool.lease("r", keys_of(1), 0.0).lease_id == 0
    assert pool.counts().leases == 0
