"""The decode core with a step launched while another runs: single stories."""

from __future__ import annotations

from decode_node.core import events as ev
from decode_node.core.actions import RunStep
from node_runtime import events
from node_runtime.events import SendUpdate
from springtide.blocks import block_keys
from springtide.protocol.outputs import FailureCode, Finish, SampledToken
from springtide.protocol.starts import AbortAttempt
from springtide.protocol.storage import Commit, Grow, Release
from tests.support.decode_core import NUM_SLOTS, Node, failures, only, outputs, rows_of, start
from tests.support.node_core import BLOCK_TOKENS, EOS, NAMESPACE


def two_under_way(node: Node, begin: events.Start) -> tuple[RunStep, RunStep]:
    first, second = only(node.join(begin), RunStep)
    return first, second


def test_a_step_is_launched_while_one_runs_and_not_a_third() -> None:
    node = Node(overlap=True)
    first, second = two_under_way(node, start("a", 10))
    assert (first.rows[0].start, second.rows[0].start) == (10, 11)
    actions = node.step(first)
    (third,) = only(actions, RunStep)
    assert third.rows[0].start == 12 and isinstance(actions[0], RunStep) and isinstance(actions[-1], SendUpdate)


def test_what_a_step_samples_is_what_the_next_one_feeds() -> None:
    node = Node(overlap=True)
    first, second = two_under_way(node, start("a", 10))
    assert second.rows[0].output_ids[-1] == 100
    first.rows[0].output_ids.append(7)
    assert second.rows[0].output_ids[-1] == 7 and second.rows[0].sampling.output_ids == [100, 7]
    assert (first.rows[0].position, second.rows[0].position) == (1, 2)


def test_a_sequence_that_certainly_ends_is_in_no_further_step() -> None:
    node = Node(overlap=True)
    (only_step,) = only(node.join(start("a", 10, max_tokens=2)), RunStep)
    actions = node.step(only_step)
    assert [output.finish for output in outputs(actions)] == [Finish.LENGTH]
    assert only(actions, RunStep) == [] and len(node.store.free) == NUM_SLOTS


def test_a_sequence_that_turns_out_to_have_ended_is_dropped_from_the_next_steps_results() -> None:
    node = Node(overlap=True)
    first, second = two_under_way(node, start("a", 10))
    ended = node.step(first, EOS)
    assert [output.finish for output in outputs(ended)] == [Finish.STOP]
    assert only(ended, Release) == [] and only(ended, RunStep) == []
    assert node.step(second) == [Release("a")] and len(node.store.free) == NUM_SLOTS


def test_slots_are_released_when_the_last_step_that_uses_them_has_ended() -> None:
    node = Node(overlap=True)
    first, second = two_under_way(node, start("a", 10))
    assert node.tell(AbortAttempt("a")) == []
    assert node.step(first) == []
    assert node.tell(start("a", 10)) == [], "the same attempt does not begin again meanwhile"
    assert node.step(second) == [Release("a")]


def test_who_joins_is_in_the_next_step_that_is_launched() -> None:
    node = Node(30, overlap=True)
    first, second = two_under_way(node, start("a", 5))
    assert only(node.join(start("b", 5)), RunStep) == []
    (third,) = only(node.step(first), RunStep)
    assert rows_of(second) == ["a"] and rows_of(third) == ["a", "b"]


def test_what_a_step_under_way_computes_is_committed_only_when_it_has_ended() -> None:
    node = Node(overlap=True)
    begin = start("a", 13)
    first, second = two_under_way(node, begin)
    (third,) = only(node.step(first), RunStep)
    assert third.rows[0].start == 15, "the last of the block"
    (fourth,) = only(actions := node.step(second), RunStep)
    assert only(actions, Commit) == []
    (key,) = block_keys(NAMESPACE, [*begin.start.request.token_ids, 100, 5, 5], BLOCK_TOKENS)[1:]
    actions = node.step(third)
    assert only(actions, Commit) == [Commit("a", 1, (key,))]
    assert fourth.rows[0].start == 16


def test_a_step_never_lacks_the_slot_that_it_writes_into() -> None:
    """Asked for one block before the step that is launched ahead needs it."""
    node = Node(overlap=True)
    launched = only(joined := node.join(start("a", 6, max_tokens=30)), RunStep)
    assert len(only(joined, Grow)) == 1
    done = 0
    while done < len(launched):
        row = launched[done].rows[0]
        assert row.start // BLOCK_TOKENS < len(row.slots)
        launched += only(node.step(launched[done]), RunStep)
        done += 1
    assert [run.rows[0].start for run in launched] == list(range(6, 35))


def test_a_failed_step_fails_its_sequences_and_spares_who_joined_after_it() -> None:
    node = Node(30, overlap=True)
    first, second = two_under_way(node, start("a", 5))
    node.join(start("b", 5))
    (third,) = only(node.step(first), RunStep)
    failed = node.tell(ev.StepFailed(second.step_id, "out of memory"))
    assert failures(failed) == [("a", FailureCode.INTERNAL)] and only(failed, Release) == []
    (fourth,) = only(failed, RunStep)
    assert rows_of(third) == ["a", "b"] and rows_of(fourth) == ["b"]
    actions = node.step(third)
    assert [output.attempt_id for output in outputs(actions)] == ["b"] and only(actions, Release) == [Release("a")]


def test_a_late_answer_of_a_step_changes_nothing() -> None:
    node = Node(overlap=True)
    first, second = two_under_way(node, start("a", 10))
    node.step(first)
    again = ev.StepDone(first.step_id, [(SampledToken(9),)], 1.0)
    assert node.tell(again) == []
    assert outputs(node.step(second))[0].position == 2


def test_a_full_pool_preempts_only_for_a_sequence_that_sits_out() -> None:
    """While a step of its own is under way it may yet end."""
    node = Node(5, overlap=True)
    launched = only(node.join(start("old", 14, max_tokens=26)), RunStep)
    launched += only(node.join(start("young", 1, max_tokens=16)), RunStep)
    seen = []
    for _ in range(14):
        actions = node.step(launched.pop(0))
        launched += only(actions, RunStep)
        seen += actions
    assert failures(seen) == [("young", FailureCode.PREEMPTED)]
    assert [output.position for output in outputs(seen) if output.attempt_id == "old"] == list(range(1, 14))
