"""The decode core with prompts that its own engine computes: single stories."""

from __future__ import annotations

from decode_node.core import events as ev
from decode_node.core.actions import ComputePrompt, RunStep
from node_runtime.slot_claims import HEAD_PATIENCE_S
from springtide.clock import Tick
from springtide.ids import AttemptId, NodeId
from springtide.protocol.outputs import FailureCode, Finish
from springtide.protocol.scheduling import PrefixSource
from springtide.protocol.starts import AbortAttempt, PrefillStart
from springtide.protocol.storage import Acquire, Release, Reserve
from tests.support.decode_core import MAX_BATCH, NUM_SLOTS, Node, done_of, failures, only, outputs, prefilled, rows_of, start
from tests.support.node_core import BLOCK_TOKENS, EOS, failure


def test_slots_are_acquired_with_what_the_pool_has_and_its_order_is_passed_on() -> None:
    node = Node(reused_blocks=1)
    node.now = 3.0
    begin = start("a", 20, inlined=True, sources=(PrefixSource(NodeId("n9"), "n9:1", 2),), ttft_budget_ms=70.0)
    actions = node.tell(begin)
    (order,) = only(actions, Acquire)
    assert (order.max_reused_blocks, order.sources, order.num_blocks) == (2, begin.start.sources, 3)
    (compute,) = only(actions, ComputePrompt)
    assert compute.start == PrefillStart(begin.start.request, "", NodeId(""), 70.0, begin.start.sources)
    assert (compute.acquired.local_blocks, compute.arrived_at, compute.asked_at) == (1, 3.0, 3.0)
    assert only(actions, Reserve) == only(actions, RunStep) == []


def test_its_first_token_is_sent_and_it_goes_on_from_there() -> None:
    node = Node()
    node.tell(start("a", 18, inlined=True))
    actions = node.prompt_computed("a", 100)
    (done,) = prefilled(actions)
    assert (done.output.position, [token.token_id for token in done.output.tokens]) == (0, [100])
    (run,) = only(actions, RunStep)
    assert (run.rows[0].start, run.rows[0].output_ids, len(run.rows[0].slots)) == (18, [100], 3)
    assert outputs(node.step(run))[0].position == 1


def test_a_request_that_its_first_token_ends_is_over_with_it() -> None:
    node = Node()
    node.tell(start("a", 10, inlined=True))
    actions = node.prompt_computed("a", EOS)
    assert [done.output.finish for done in prefilled(actions)] == [Finish.STOP]
    assert not node.core.has_work and only(actions, RunStep) == [] and len(node.store.free) == NUM_SLOTS


def test_a_continued_request_counts_positions_from_its_original_prompt() -> None:
    node = Node()
    node.tell(start("a", 14, sent=4, inlined=True))
    (run,) = only(node.prompt_computed("a"), RunStep)
    assert run.rows[0].position == 5 and len(run.rows[0].sampling.prompt_ids) == 10 and len(run.rows[0].output_ids) == 5


def test_who_computes_it_is_told_when_it_is_given_up() -> None:
    node = Node()
    node.tell(start("a", 20, inlined=True))
    assert node.tell(AbortAttempt(AttemptId("a"))) == [AbortAttempt(AttemptId("a"))]
    assert not node.core.has_work and len(node.store.free) == NUM_SLOTS


def test_what_cannot_be_computed_fails_its_attempt_alone() -> None:
    node = Node()
    node.tell(start("a", 20, inlined=True))
    (run,) = only(node.join(start("b", 10)), RunStep)
    node.store.order(Release(AttemptId("a")))
    assert failures(node.tell(ev.PromptFailed(AttemptId("a"), failure(FailureCode.INVALID)))) == [("a", FailureCode.INVALID)]
    assert rows_of(run) == ["b"] and [one.attempt_id for one in outputs(node.step(run))] == ["b"]


def test_it_waits_for_a_place_in_the_batch_before_it_has_slots() -> None:
    node = Node(40)
    for number in range(MAX_BATCH):
        node.join(start(f"old-{number}", 5, max_tokens=30))
    assert only(node.tell(start("new", 5, inlined=True)), Acquire) == []
    assert len(only(node.tell(AbortAttempt(AttemptId("old-0"))), ComputePrompt)) == 1


def test_it_waits_for_slots_as_any_other() -> None:
    node = Node(4)
    node.tell(start("a", 30, max_tokens=2))
    waiting = node.tell(start("b", 30, max_tokens=2, inlined=True))
    assert failures(waiting) == [] and only(waiting, ComputePrompt) == []
    assert len(only(node.tell(AbortAttempt(AttemptId("a"))), Release)) == 1
    node.now = 31.0 + HEAD_PATIENCE_S
    assert failures(node.tell(Tick())) == [("b", FailureCode.POOL_FULL)]


def test_one_of_which_far_more_is_missing_than_is_inlined_is_left_to_another() -> None:
    node = Node(30, reused_blocks=1, inline_tokens=20)
    actions = node.tell(start("long", BLOCK_TOKENS + 41, inlined=True))
    assert failures(actions) == [("long", FailureCode.INTERNAL)] and only(actions, ComputePrompt) == []
    assert only(actions, Release) == [Release(AttemptId("long"))] and len(node.store.free) == 30
    assert len(only(node.tell(start("short", BLOCK_TOKENS + 40, inlined=True)), ComputePrompt)) == 1


def test_what_is_given_up_at_the_moment_in_which_it_is_computed_gives_its_slots_back() -> None:
    node = Node()
    node.tell(start("a", 20, inlined=True))
    node.core.handle(AbortAttempt(AttemptId("a")), node.now)
    assert node.core.handle(ev.PromptComputed(done_of("a", 0, 100)), node.now) == [Release(AttemptId("a"))]


def test_of_a_sequence_that_moves_here_a_few_blocks_more_may_be_lacking() -> None:
    for sent, taken in ((0, False), (4, True)):
        node = Node(30, reused_blocks=1, inline_tokens=0)
        actions = node.tell(start("a", BLOCK_TOKENS + 3 * BLOCK_TOKENS, sent=sent, inlined=True))
        assert len(only(actions, ComputePrompt)) == taken and len(failures(actions)) == (not taken)
    node = Node(30, reused_blocks=1, inline_tokens=0)
    assert failures(node.tell(start("a", BLOCK_TOKENS + 8 * BLOCK_TOKENS, sent=4, inlined=True))) == [("a", FailureCode.INTERNAL)]
