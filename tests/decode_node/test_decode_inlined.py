"""The decode core with prompts that it computes itself: single stories."""

from __future__ import annotations

import pytest

from decode_node.core import events as ev
from decode_node.core.actions import RunStep
from decode_node.core.scheduling import LEAST_PROMPT_TOKENS
from node_runtime.events import SendUpdate
from node_runtime.slot_claims import HEAD_PATIENCE_S
from springtide.clock import Tick
from springtide.protocol.outputs import FailureCode, Finish
from springtide.protocol.starts import AbortAttempt
from springtide.protocol.storage import Acquire, Commit, Release, Reserve
from tests.support.decode_core import INLINE_TOKENS, NUM_SLOTS, Node, failures, only, outputs, prefilled, rows_of, start
from tests.support.node_core import BLOCK_TOKENS, EOS


def test_the_rest_of_a_prompt_is_one_row_of_a_step_and_its_first_token_is_sent() -> None:
    node = Node(reused_blocks=2)
    begin = start("a", 2 * BLOCK_TOKENS + 5, inlined=True)
    actions = node.tell(begin)
    (order,) = only(actions, Acquire)
    assert order.max_reused_blocks == 2 and order.sources == () and only(actions, Reserve) == []
    (run,) = only(actions, RunStep)
    (row,) = run.rows
    assert (row.start, list(row.prompt), row.position) == (16, list(begin.start.request.token_ids[16:]), 0)
    actions = node.step(run)
    (done,) = prefilled(actions)
    assert (done.cached_tokens, done.remote_tokens, done.output.position, [token.token_id for token in done.output.tokens]) == (
        16,
        0,
        0,
        [5],
    )
    assert outputs(actions) == []
    (run,) = only(actions, RunStep)
    assert (run.rows[0].start, run.rows[0].output_ids, run.rows[0].prompt) == (21, [5], ())
    assert outputs(node.step(run))[0].position == 1


def test_a_longer_rest_takes_several_steps_beside_those_who_run() -> None:
    node = Node(30)
    (run,) = only(node.join(start("old", 5)), RunStep)
    node.tell(start("new", INLINE_TOKENS + 7, inlined=True))
    actions = node.step(run)
    (run,) = only(actions, RunStep)
    assert rows_of(run) == ["old", "new"] and len(run.rows[1].prompt) == INLINE_TOKENS and not run.rows[1].samples
    actions = node.step(run)
    assert [output.attempt_id for output in outputs(actions)] == ["old"] and prefilled(actions) == []
    (run,) = only(actions, RunStep)
    assert len(run.rows[1].prompt) == 7 and run.rows[1].samples
    assert len(prefilled(node.step(run))) == 1


def test_a_step_takes_as_much_of_a_prompt_as_the_objectives_of_all_allow() -> None:
    """By the cost model of this core, a sequence of 41 tokens takes 1.41 ms, and so at most does a token of such a prompt."""
    node = Node(100)
    (run,) = only(node.join(start("old", 50, tbt_slo_ms=20.0)), RunStep)
    node.tell(start("new", 40, inlined=True))
    (run,) = only(node.step(run), RunStep)
    assert len(run.rows[1].prompt) == pytest.approx(12, abs=1)


def test_a_step_takes_less_of_a_prompt_the_longer_what_lies_before_it_is() -> None:
    """Each of its tokens attends to all of that: 3 ms each."""
    node = Node(100, reused_blocks=24)
    (run,) = only(node.join(start("old", 50, tbt_slo_ms=35.0)), RunStep)
    node.tell(start("new", 24 * BLOCK_TOKENS + INLINE_TOKENS, inlined=True))
    (run,) = only(node.step(run), RunStep)
    assert run.rows[1].start == 24 * BLOCK_TOKENS and len(run.rows[1].prompt) == pytest.approx(10, abs=1)


def test_a_prompt_comes_to_its_end_whatever_the_objective() -> None:
    node = Node(100)
    (run,) = only(node.join(start("old", 50)), RunStep)
    node.tell(start("new", 2 * LEAST_PROMPT_TOKENS, tbt_slo_ms=15.0, inlined=True))
    node.join(start("tight", 5, sent=1, tbt_slo_ms=0.1))
    for _ in range(2):
        (run,) = only(node.step(run), RunStep)
        assert [len(row.prompt) for row in run.rows if row.prompt] == [LEAST_PROMPT_TOKENS]
    assert len(prefilled(node.step(run))) == 1


def test_the_first_token_goes_in_one_message_with_what_else_the_step_has_for_the_gateway() -> None:
    node = Node(30)
    (run,) = only(node.join(start("old", 5)), RunStep)
    node.join(start("other", 5, session=2))
    node.tell(start("new", 10, inlined=True))
    (run,) = only(node.step(run), RunStep)
    replies = [(reply.session, len(reply.update.outputs), len(reply.update.prefilled)) for reply in only(node.step(run), SendUpdate)]
    assert replies == [(1, 1, 1), (2, 1, 0)]


def test_blocks_of_the_prompt_are_committed_as_they_are_computed() -> None:
    node = Node(reused_blocks=1)
    begin = start("a", 30, inlined=True)
    (run,) = only(node.tell(begin), RunStep)
    actions = node.step(run)
    assert only(actions, Commit) == [Commit("a", 1, begin.start.request.keys[1:3])]
    (run,) = only(actions, RunStep)
    assert only(node.step(run), Commit) == []


def test_a_request_that_its_first_token_ends_is_over_with_it() -> None:
    node = Node()
    (run,) = only(node.tell(start("a", 10, inlined=True)), RunStep)
    actions = node.step(run, EOS)
    assert [done.output.finish for done in prefilled(actions)] == [Finish.STOP]
    assert only(actions, Release) == [Release("a")] and len(node.store.free) == NUM_SLOTS


def test_a_continued_request_counts_positions_from_its_original_prompt() -> None:
    node = Node()
    (run,) = only(node.tell(start("a", 14, sent=4, inlined=True)), RunStep)
    assert run.rows[0].position == 4 and len(run.rows[0].sampling.prompt_ids) == 10 and len(run.rows[0].output_ids) == 4
    assert prefilled(node.step(run))[0].output.position == 4


def test_with_overlap_a_prompt_is_in_one_step_at_a_time() -> None:
    node = Node(30, overlap=True)
    (first,) = only(node.tell(start("a", 2 * INLINE_TOKENS, inlined=True)), RunStep)
    (second,) = only(node.step(first), RunStep)
    assert second.rows[0].start == INLINE_TOKENS
    third, fourth = only(node.step(second), RunStep)
    assert (third.rows[0].start, fourth.rows[0].start) == (40, 41) and third.rows[0].output_ids == [5]


def test_an_abort_or_a_failed_step_gives_the_slots_of_a_prompt_back() -> None:
    node = Node(reused_blocks=1)
    (run,) = only(node.tell(start("a", 20, inlined=True)), RunStep)
    assert node.tell(AbortAttempt("a")) == []
    assert node.step(run) == [Release("a")]
    (run,) = only(node.tell(start("b", 20, inlined=True)), RunStep)
    assert failures(node.tell(ev.StepFailed(run.step_id, "out of memory"))) == [("b", FailureCode.INTERNAL)]
    assert len(node.store.free) == NUM_SLOTS


def test_a_prompt_of_which_far_more_is_missing_than_is_inlined_is_left_to_another() -> None:
    node = Node(30, reused_blocks=1)
    most = BLOCK_TOKENS + 2 * INLINE_TOKENS
    actions = node.tell(start("long", most + 1, inlined=True))
    assert failures(actions) == [("long", FailureCode.INTERNAL)] and only(actions, RunStep) == []
    assert only(actions, Release) == [Release("long")] and len(node.store.free) == 30
    assert len(only(node.tell(start("short", most, inlined=True)), RunStep)) == 1


def test_an_inlined_prompt_waits_for_slots_as_any_other() -> None:
    node = Node(4)
    node.tell(start("a", 30, max_tokens=2))
    waiting = node.tell(start("b", 30, max_tokens=2, inlined=True))
    assert failures(waiting) == [] and only(waiting, RunStep) == []
    begun = node.tell(AbortAttempt("a"))
    assert len(only(begun, Release)) == 1
    node.now = 31.0 + HEAD_PATIENCE_S
    assert failures(node.tell(Tick())) == [("b", FailureCode.POOL_FULL)]
