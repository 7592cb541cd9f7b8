"""Attempts in idle capacity at a prefill group: they take what nobody else wants, and give it back at once."""

from __future__ import annotations

from dataclasses import replace

from node_runtime import events
from node_runtime.events import SendUpdate
from node_runtime.quiet import MOST_REST_S
from prefill_node.core.actions import Action, GiveWay, RunPass
from springtide.clock import Tick
from springtide.protocol import storage
from springtide.protocol.outputs import AttemptFailed, FailureCode, HandedOver, SampledToken
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
    empty = node.load()
    begin(node, "idle", 60, idle=True)
    load = node.load()
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


def test_a_pass_of_theirs_is_broken_off_when_another_comes_and_computed_again_afterwards() -> None:
    node = Node()
    (run,) = only(begin(node, "idle", 9, idle=True), RunPass)
    assert run.idle and node.core.idle_work
    assert only(node.tell(start("online", 9)), GiveWay) == [GiveWay(run.pass_id)]
    assert only(node.tell(Tick()), GiveWay) == [], "it has been told"
    node.tell(Acquired("online", (10, 11), 0, 0))
    (online,) = only(node.tell(ev.PassGaveWay(run.pass_id)), RunPass)
    assert [row.attempt_id for row in online.rows] == ["online"] and not node.core.idle_work
    (again,) = only(end(node, online), RunPass)
    assert again.rows == run.rows, "nothing of it counts"


def test_one_that_was_through_before_it_heard_counts() -> None:
    node = Node()
    (run,) = only(begin(node, "idle", 9, idle=True), RunPass)
    node.tell(start("online", 9))
    node.tell(Acquired("online", (10, 11), 0, 0))
    (online,) = only(end(node, run), RunPass)
    (following,) = only(end(node, online), RunPass)
    assert following.rows[0].chunk.start == 2


def test_they_rest_while_another_engine_of_the_machine_wants_quiet() -> None:
    node = Node()
    (run,) = only(begin(node, "idle", 9, idle=True), RunPass)
    assert only(node.tell(events.Quiet(True)), GiveWay) == [GiveWay(run.pass_id)]
    assert only(node.tell(ev.PassGaveWay(run.pass_id)), RunPass) == []
    (online,) = only(begin(node, "online", 9, idle=False, first_slot=10), RunPass)
    assert only(end(node, online), RunPass) == [], "others do not"
    assert len(only(node.tell(events.Quiet(False)), RunPass)) == 1


def test_who_has_rested_for_long_has_a_pass_that_nobody_breaks_off() -> None:
    node = Node()
    node.tell(events.Quiet(True))
    assert only(begin(node, "idle", 9, idle=True), RunPass) == []
    node.now += MOST_REST_S
    (run,) = only(node.tell(Tick()), RunPass)
    assert only(node.tell(start("online", 9)), GiveWay) == []
    assert only(end(node, run), RunPass) == [], "and then rests again"


def passes_of(node: Node, slots: int, elapsed_ms: float, beside_idle: bool) -> None:
    for i in range(16):
        (run,) = only(begin(node, f"{elapsed_ms} {i}", 9, idle=False, first_slot=slots), RunPass)
        node.tell(ev.PassDone(run.pass_id, [SampledToken(7)], elapsed_ms, beside_idle=beside_idle))
        node.tell(HandedOver(f"{elapsed_ms} {i}", 1))


def test_quiet_is_wanted_for_as_long_as_there_is_something_to_compute_that_idle_work_slows() -> None:
    node = Node()
    passes_of(node, 0, 5.0, beside_idle=False)
    passes_of(node, 0, 6.0, beside_idle=True)
    assert node.core.slowdown > 0.19 and not node.core.wants_quiet(node.now), "nothing is to be computed"
    begin(node, "idle", 9, idle=True)
    assert not node.core.wants_quiet(node.now)
    node.tell(start("online", 9))
    assert node.core.wants_quiet(node.now)
