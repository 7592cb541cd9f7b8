"""Attempts in idle capacity at a prefill group: they take what nobody else wants, and give it back at once."""

from __future__ import annotations

from dataclasses import replace

from node_runtime.events import SendUpdate
from prefill_node.core.actions import Action, RunPass
from springtide.clock import Tick
from springtide.protocol import storage
from springtide.protocol.outputs import AttemptFailed, FailureCode, SampledToken
from springtide.protocol.storage import Acquire, Acquired, Release
from tests.prefill_node.test_prefill_core import NUM_SLOTS, Node, ev, only, start
from tests.support.node_core import failure

POOL_FULL = failure(FailureCode.POOL_FULL)


def failures(actions: list[Action]) -> list[tuple[str, FailureCode]]:
    updates = [reply.update for reply in only(actions, SendUpdate)]
    return [(update.attempt_id, update.failure.code) for update in updates if isinstance(update, AttemptFailed)]


def begin(node: Node, name: str, num_tokens: int, *, idle: bool, first_slot: int = 0) -> list[Action]:
    actions = node.tell(start(name, num_tokens, idle=idle))
    (acquire,) = only(actions, Acquire)
    return node.tell(Acquired(name, tuple(range(first_slot, first_slot + acquire.num_blocks)), 0, 0))


def end(node: Node, run: RunPass) -> list[Action]:
    return node.tell(ev.PassDone(run.pass_id, [SampledToken(7) if row.sampling else None for row in run.rows], 5.0))


def test_who_comes_is_computed_next_and_they_go_on_afterwards() -> None:
    node = Node()
    (run,) = only(begin(node, "idle", 9, idle=True), RunPass)
    assert len(run.rows[0].chunk.token_ids) == 2, "an eighth of a chunk"
    begin(node, "online", 20, idle=False, first_slot=10)
    order = []
    for _ in range(4):
        (run,) = only(end(node, run), RunPass)
        order.append((run.rows[0].attempt_id, len(run.rows[0].chunk.token_ids)))
    assert order == [("online", 16), ("online", 4), ("idle", 2), ("idle", 2)]


def test_others_see_the_group_as_if_they_were_not_there() -> None:
    node = Node()
    empty = node.core.load()
    begin(node, "idle", 60, idle=True)
    load = node.core.load()
    assert replace(load, idle=empty.idle, attempt_ids=frozenset()) == empty
    assert load.idle.running == 1 and load.idle.queue_ms > 0 and load.idle.slots_held == 8 and load.attempt_ids == {"idle"}


def test_slots_that_others_wait_for_are_taken_from_them_at_once() -> None:
    node = Node()
    (run,) = only(begin(node, "idle", 60, idle=True), RunPass)
    node.tell(start("online", 190))
    actions = node.tell(AttemptFailed("online", POOL_FULL))
    assert failures(actions) == [("idle", FailureCode.PREEMPTED)] and only(actions, Release) == []
    assert Release("idle") in end(node, run)
    again = node.tell(storage.StoreLoad(NUM_SLOTS, NUM_SLOTS))
    assert [acquire.attempt_id for acquire in only(again, Acquire)] == ["online"]


def test_no_more_of_them_go_than_have_the_slots() -> None:
    node = Node()
    (run,) = only(begin(node, "old", 60, idle=True), RunPass)
    begin(node, "young", 60, idle=True, first_slot=8)
    node.tell(start("online", 100))
    assert failures(node.tell(AttemptFailed("online", POOL_FULL))) == [("young", FailureCode.PREEMPTED)]
    assert failures(node.tell(Tick())) == [], "the slots are on their way"
    end(node, run)


def test_they_do_not_wait_for_slots_here() -> None:
    node = Node()
    node.tell(start("idle", 30, idle=True))
    assert failures(node.tell(AttemptFailed("idle", POOL_FULL))) == [("idle", FailureCode.POOL_FULL)]
    node.tell(start("online", 30))
    node.tell(AttemptFailed("online", POOL_FULL))
    assert failures(node.tell(start("late", 30, idle=True))) == [("late", FailureCode.POOL_FULL)]
