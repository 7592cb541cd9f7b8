"""Attempts in idle capacity at a decode node: they take what nobody else wants, and give it back at once."""

from __future__ import annotations

from dataclasses import replace

from decode_node.core import events as ev
from decode_node.core.actions import Action, RunStep
from node_runtime import events
from node_runtime.events import SendUpdate
from node_runtime.quiet import MOST_REST_S
from springtide.clock import Tick
from springtide.protocol import storage
from springtide.protocol.outputs import FailureCode, SampledToken
from springtide.protocol.storage import Ingested, Release, Reserve, Reserved
from tests.support.decode_core import MAX_BATCH, Node, failures, only, reserved, rows_of, start


def join(node: Node, name: str, num_tokens: int = 10, *, idle: bool = True, tbt_slo_ms: float = 0.0) -> list[Action]:
    return node.join(start(name, num_tokens, idle=idle, tbt_slo_ms=tbt_slo_ms, max_tokens=20))


def run_of(actions: list[Action]) -> RunStep:
    (run,) = only(actions, RunStep)
    return run


def test_alone_they_have_every_place() -> None:
    node = Node(40)
    run = run_of(join(node, "a"))
    for name in ("b", "c"):
        join(node, name)
    assert rows_of(run_of(node.step(run))) == ["a", "b", "c"]
    assert failures(node.tell(start("d", 10, idle=True))) == [("d", FailureCode.POOL_FULL)]


def test_who_comes_while_no_place_is_free_gets_the_youngest_ones_at_once() -> None:
    node = Node(40)
    for name in ("a", "b", "c"):
        join(node, name)
    actions = node.tell(start("online", 10))
    assert failures(actions) == [("c", FailureCode.PREEMPTED)]
    assert [order.attempt_id for order in only(actions, Reserve)] == ["online"]


def test_a_whole_batch_of_others_leaves_none_of_them() -> None:
    node = Node(60)
    for name in ("a", "b", "c"):
        join(node, name)
    gone = [failures(node.tell(start(f"online-{i}", 10))) for i in range(MAX_BATCH)]
    assert gone == [[(name, FailureCode.PREEMPTED)] for name in ("c", "b", "a")]
    load = node.load()
    assert load.idle.running == 0 and load.waiting == MAX_BATCH


def test_no_step_of_theirs_begins_while_another_is_on_its_way_here() -> None:
    node = Node(40)
    run = run_of(join(node, "a"))
    node.tell(start("online", 10))
    assert only(node.step(run), RunStep) == []
    # It is one more of three: a third longer than without it, where a twentieth is allowed.
    run = run_of(node.tell(Ingested("online", 100)))
    assert rows_of(run) == ["online"]
    (output_of,) = [reply for reply in only(node.step(run, token=0), SendUpdate) if reply.update.outputs]
    assert output_of.update.outputs[0].finish is not None
    assert node.load().idle.running == 1, "it has sat out, and keeps what it has"


def test_when_the_others_are_over_they_go_on() -> None:
    node = Node(40)
    run = run_of(join(node, "a"))
    node.tell(start("online", 10))
    node.step(run)
    run = run_of(node.tell(Ingested("online", 100)))
    assert rows_of(run_of(node.step(run, token=0))) == ["a"]


def test_they_join_a_step_of_others_that_they_hardly_lengthen() -> None:
    node = Node(500)
    # 32 ms with its 3,000 tokens of context: another sequence makes that a thirtieth longer, and two more than a twentieth.
    run = run_of(join(node, "online", 3000, idle=False))
    join(node, "a")
    join(node, "b")
    assert rows_of(run_of(node.step(run))) == ["online", "a"]


def test_a_step_of_theirs_alone_keeps_to_a_part_of_the_objective() -> None:
    node = Node(60)
    # Of 1.1 + 1 for each: an eighth of 20 ms is enough for one of them, of 26 for two.
    run = run_of(join(node, "a", tbt_slo_ms=20.0))
    join(node, "b", tbt_slo_ms=20.0)
    join(node, "c", tbt_slo_ms=20.0)
    run = run_of(node.step(run))
    assert rows_of(run) == ["a"]


def test_one_that_is_slower_than_the_objective_alone_still_comes_to_its_end() -> None:
    node = Node(60)
    assert rows_of(run_of(join(node, "a", tbt_slo_ms=0.5))) == ["a"]


def test_slots_are_taken_from_them_at_once_and_who_asked_waits_for_these() -> None:
    node = Node(7)
    run = run_of(join(node, "a", 30))
    actions = node.tell(start("online", 30, max_tokens=8))
    assert failures(actions) == [("a", FailureCode.PREEMPTED)]
    assert only(actions, Release) == [], "a step uses the slots"
    after = node.step(run)
    assert Release("a") in after
    assert node.load().waiting == 1
    again = node.tell(storage.StoreLoad(7, 7))
    assert [order.attempt_id for order in only(again, Reserve)] == ["online"] and reserved(again) == []
    assert rows_of(run_of(node.tell(Ingested("online", 100)))) == ["online"]


def test_who_lacks_a_slot_to_go_on_takes_it_from_them() -> None:
    node = Node(5)
    run = run_of(join(node, "online", 15, idle=False))
    node.tell(start("idle", 10, idle=True, max_tokens=4))
    seen: list[Action] = []
    while not failures(seen):
        seen = node.step(run)
        run = run_of(seen)
    assert failures(seen) == [("idle", FailureCode.PREEMPTED)] and rows_of(run) == ["online"]


def test_they_never_take_anything_from_others() -> None:
    node = Node(5)
    join(node, "online", 14, idle=False)
    actions = node.tell(start("idle", 25, idle=True, max_tokens=8))
    assert failures(actions) == [("idle", FailureCode.POOL_FULL)]
    assert node.load().waiting == 0, "they do not wait here"


def test_others_see_the_node_as_if_they_were_not_there() -> None:
    node = Node(20)
    empty = node.load()
    join(node, "a")
    join(node, "b")
    load = node.load()
    assert replace(load, idle=empty.idle, attempt_ids=empty.attempt_ids) == empty
    assert load.idle.running == 2 and load.idle.slots_held == 6 and load.attempt_ids == {"a", "b"}


def test_the_admission_check_does_not_count_them() -> None:
    node = Node(60)
    for name in ("a", "b"):
        join(node, name)
    # 2.1 ms alone; 4.3 with both.
    assert failures(node.tell(start("online", 10, tbt_slo_ms=2.5))) == []


def test_one_that_sits_out_says_that_it_waits() -> None:
    node = Node(40)
    run = run_of(join(node, "a"))
    node.tell(start("online", 10))
    node.step(run)
    waiting = {sign.attempt_id: sign.waiting for _, sign in node.core.signs()}
    assert waiting["a"]


def test_a_late_word_of_one_that_was_preempted_changes_nothing() -> None:
    node = Node(40)
    for name in ("a", "b", "c"):
        join(node, name)
    node.tell(start("online", 10))
    assert node.core.handle(Reserved("c", (1, 2), 0), node.now) == []


def test_they_rest_while_another_engine_of_the_machine_wants_quiet_but_not_for_ever() -> None:
    node = Node(40)
    run = run_of(join(node, "a"))
    node.tell(events.Quiet(True))
    assert only(node.step(run), RunStep) == []
    node.now += MOST_REST_S
    assert only(node.step(run_of(node.tell(Tick()))), RunStep) == []
    assert rows_of(run_of(node.tell(events.Quiet(False)))) == ["a"]


def test_quiet_is_wanted_for_as_long_as_sequences_run_that_idle_work_slows() -> None:
    node = Node(40)
    actions = node.join(start("online", 10, max_tokens=40))
    for i in range(32):
        run, slowed = run_of(actions), i >= 16
        elapsed_ms = node.core.cost.predict_ms(1, 10) * (1.2 if slowed else 1.0)
        actions = node.tell(ev.StepDone(run.step_id, [(SampledToken(7),)], elapsed_ms, beside_idle=slowed))
    assert node.core.wants_quiet(node.now) and node.core.slowdown > 0.1
    while runs := only(actions, RunStep):
        actions = node.step(runs[0])
    assert not node.core.wants_quiet(node.now)
