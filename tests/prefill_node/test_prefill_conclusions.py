"""What a pass came to, from what its stages say."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from engine.batch import SamplingRow, Scoring, SequenceChunk
from prefill_node.core.actions import PassRow, RunPass
from prefill_node.core.events import PassDone, PassFailed, PassInterrupted
from prefill_node.server.passes import Pushes, conclude, longest_pass_s
from prefill_node.stage.compute import PassPart, part_ended, stage_order
from springtide.ids import AttemptId
from springtide.protocol import storage
from springtide.protocol.outputs import AttemptFailed, Failure, FailureCode, PromptLogprobs, SampledToken, TokenLogprob
from springtide.protocol.sampling import LogitBias, SamplingParams
from springtide.protocol.stages import ForgetAttempt, SlotsGivenBack, StageOrder, StageOutcome, StagePass, StagePassEnded
from springtide.protocol.wire import STAGE_ORDER, STAGE_REPORT

DONE, VOID = StagePassEnded(4, StageOutcome.DONE, busy_ms=3.0, waited_ms=2.0), StagePassEnded(4, StageOutcome.VOID)
SAMPLING = SamplingRow(SamplingParams(temperature=0.5, seed=3, logit_bias=LogitBias.of({7: 1.0})), (1, 2, 3, 4, 5, 6, 7, 8, 9), (10,))
RUN = RunPass(
    4,
    (
        PassRow("a", SequenceChunk((5, 6, 7), 16, (3, 1, 2, 9), wants_logits=False), None),
        PassRow("b", SequenceChunk((8, 9), 0, (4,), wants_logits=True), SAMPLING),
    ),
    (),
)


def test_a_pass_is_done_when_it_is_in_all_stages() -> None:
    token = SampledToken(7, -0.5, (TokenLogprob(7, -0.5), TokenLogprob(1, -2.0)))
    last = StagePassEnded(4, StageOutcome.DONE, tokens=(token,), waited_ms=1.0)
    assert conclude(RUN, (DONE, last), 9.0) == PassDone(4, [None, token], 9.0, waited_ms=3.0)


@pytest.mark.parametrize("code", [FailureCode.INVALID, FailureCode.INTERNAL])
def test_a_prompt_that_gets_no_token_is_told_why_as_the_last_stage_has_it(code: FailureCode) -> None:
    last = part_ended(PassPart.of_run(RUN, (), last=True), StageOutcome.DONE, drawn=[Failure(code, "why")])
    told = STAGE_REPORT.decode(STAGE_REPORT.encode(last))
    assert isinstance(told, StagePassEnded)
    assert conclude(RUN, (DONE, told), 9.0) == PassDone(4, [None, Failure(code, "why")], 9.0, waited_ms=2.0)


@pytest.mark.parametrize(
    ("why", "event"),
    [
        (StagePassEnded(4, StageOutcome.PREFIX_MISSING, waited_ms=7.0), PassInterrupted(4, overdue=False, waited_ms=9.0)),
        (StagePassEnded(4, StageOutcome.PREFIX_OVERDUE, waited_ms=7.0), PassInterrupted(4, overdue=True, waited_ms=9.0)),
        (StagePassEnded(4, StageOutcome.FAILED, "out of memory"), PassFailed(4, "out of memory")),
    ],
)
def test_it_comes_to_what_the_first_stage_says_that_did_not_do_it(why: StagePassEnded, event: PassInterrupted | PassFailed) -> None:
    assert conclude(RUN, (DONE, why, VOID), 9.0) == event


def test_a_last_stage_with_too_few_tokens_fails_the_pass() -> None:
    assert conclude(RUN, (DONE, DONE), 9.0) == PassFailed(4, "0 tokens were sampled for 1 prompts that end in the pass")


SCORES = PromptLogprobs(b"abcd", b"efgh", b"ijkl", b"mnop")
SCORED = replace(RUN, rows=(replace(RUN.rows[0], scoring=Scoring((6, 7, 4), 1)), RUN.rows[1]))


def test_scores_belong_to_the_rows_that_want_them() -> None:
    last = StagePassEnded(4, StageOutcome.DONE, tokens=(SampledToken(7),), scores=(SCORES,))
    assert conclude(SCORED, (DONE, last), 9.0) == PassDone(4, [None, SampledToken(7)], 9.0, 2.0, [SCORES, None])
    assert conclude(SCORED, (DONE, replace(last, scores=())), 9.0) == PassFailed(4, "0 rows were scored of 1 that want it")


def test_what_is_to_be_scored_reaches_the_last_stage_alone() -> None:
    order = STAGE_ORDER.decode(STAGE_ORDER.encode(stage_order(SCORED, (), last=True, block_tokens=8)))
    assert isinstance(order, StagePass)
    part, own = PassPart.of_order(order, last=True), PassPart.of_run(SCORED, (), last=True)
    assert part.scoring == own.scoring == [Scoring((6, 7, 4), 1), None]
    assert [chunk.wants_all for chunk in part.chunks] == [True, False]
    before = PassPart.of_order(stage_order(SCORED, (), last=False, block_tokens=8), last=False)
    assert not before.scoring and not PassPart.of_order(stage_order(RUN, (), last=True, block_tokens=8), last=True).scoring


def test_a_pass_has_many_times_what_was_predicted_and_what_its_layers_may_wait() -> None:
    assert longest_pass_s(replace(RUN, predicted_ms=100.0), lease_s=5.0, layers=4) == 30.0
    assert longest_pass_s(replace(RUN, predicted_ms=10_000.0), lease_s=30.0, layers=4) == 230.0
    assert longest_pass_s(replace(RUN, predicted_ms=10_000.0, awaits="a"), lease_s=30.0, layers=4) == 320.0
    assert longest_pass_s(RUN, lease_s=30.0, layers=4) == inf


def test_a_pass_reaches_the_last_stage_as_it_is_but_for_its_tokens() -> None:
    order = STAGE_ORDER.decode(STAGE_ORDER.encode(stage_order(RUN, (8, 12), last=True, block_tokens=8)))
    assert isinstance(order, StagePass)
    part, own = PassPart.of_order(order, last=True), PassPart.of_run(RUN, (8, 12), last=True)
    assert (part.pass_id, part.num_tokens, part.awaits, part.report_layers) == (4, 5, None, {8, 12})
    assert part.sampling == own.sampling == [SAMPLING]
    assert [(chunk.start, len(chunk.token_ids), chunk.slots, chunk.wants_logits) for chunk in part.chunks] == [
        (16, 3, (3, 1, 2), False),
        (0, 2, (4,), True),
    ]
    assert PassPart.of_order(stage_order(RUN, (), last=False, block_tokens=8), last=False).sampling is None


def test_what_else_a_stage_is_told_reaches_it_as_it_is() -> None:
    attempt = AttemptId("a")
    orders: list[StageOrder] = [
        StagePass(4, (), frozenset({3}), attempt),
        storage.Acquired(attempt, (4, 5), 1, 1),
        storage.FetchProgress(attempt, 3),
        storage.FetchTruncated(attempt, 1),
        AttemptFailed(attempt, Failure(FailureCode.PEER_LOST, "why")),
        ForgetAttempt(attempt),
        SlotsGivenBack((7, 8)),
    ]
    for order in orders:
        assert STAGE_ORDER.decode(STAGE_ORDER.encode(order)) == order


def test_results_come_back_as_they_were() -> None:
    tokens = (SampledToken(7), SampledToken(8, -0.5, (TokenLogprob(8, -0.5),)))
    for result in (
        StagePassEnded(4, StageOutcome.DONE, tokens=tokens, busy_ms=1.5, waited_ms=0.25),
        StagePassEnded(4, StageOutcome.DONE, tokens=tokens, scores=(SCORES, PromptLogprobs())),
        StagePassEnded(4, StageOutcome.FAILED, "why"),
        VOID,
    ):
        assert STAGE_REPORT.decode(STAGE_REPORT.encode(result)) == result


def test_a_stage_reports_only_where_there_is_something_to_push() -> None:
    assert Pushes(()).layer_ends == ()
