"""A pass on its way to the stages, and what came of it on its way back (proto/springtide/v1/stage.proto)."""

from __future__ import annotations

from collections.abc import Collection

from engine.batch import SamplingRow, SequenceChunk
from prefill_node.core.actions import Row, RunPass
from prefill_node.stage.compute import Outcome, Part, Result
from springtide.blocks import blocks_for
from springtide.ids import AttemptId
from springtide.protocol.wire import SAMPLED_TOKEN, SAMPLING_PARAMS
from springtide.rpc import stage_pb2

_OUTCOMES = {
    Outcome.DONE: stage_pb2.STAGE_OUTCOME_DONE,
    Outcome.VOID: stage_pb2.STAGE_OUTCOME_VOID,
    Outcome.PREFIX_MISSING: stage_pb2.STAGE_OUTCOME_PREFIX_MISSING,
    Outcome.PREFIX_OVERDUE: stage_pb2.STAGE_OUTCOME_PREFIX_OVERDUE,
    Outcome.FAILED: stage_pb2.STAGE_OUTCOME_FAILED,
}
_OUTCOME_OF = {code: outcome for outcome, code in _OUTCOMES.items()}


def part_of(run: RunPass, report_layers: Collection[int], last: bool) -> Part:
    """The whole pass, for a stage of this process."""
    return Part(
        pass_id=run.pass_id,
        chunks=[row.chunk for row in run.rows],
        awaits=AttemptId(run.awaits) if run.awaits is not None else None,
        report_layers=frozenset(report_layers),
        sampling=[row.sampling for row in run.rows if row.sampling is not None] if last else None,
    )


def pass_order(run: RunPass, report_layers: Collection[int], last: bool, block_tokens: int) -> stage_pb2.StageOrder:
    rows = [_row(row, last, block_tokens) for row in run.rows]
    message = stage_pb2.StagePass(pass_id=run.pass_id, rows=rows, report_layers=report_layers, awaits=run.awaits or "")
    return stage_pb2.StageOrder(run=message)


def _row(row: Row, last: bool, block_tokens: int) -> stage_pb2.StageRow:
    chunk = row.chunk
    end = chunk.start + len(chunk.token_ids)
    message = stage_pb2.StageRow(num_tokens=len(chunk.token_ids), start=chunk.start, slots=chunk.slots[: blocks_for(end, block_tokens)])
    if last and row.sampling is not None:
        sampling = row.sampling
        message.sampling.CopyFrom(
            stage_pb2.StageSampling(
                params=SAMPLING_PARAMS.encode(sampling.params), prompt_ids=sampling.prompt_ids, output_ids=sampling.output_ids
            )
        )
    return message


def part_from(message: stage_pb2.StagePass, last: bool) -> Part:
    """Only the first stage embeds: the others' chunks have as many tokens, all of them 0."""
    sampling = [_sampling(row.sampling) for row in message.rows if row.HasField("sampling")]
    return Part(
        pass_id=message.pass_id,
        chunks=[
            SequenceChunk((0,) * row.num_tokens, row.start, tuple(row.slots), wants_logits=row.HasField("sampling")) for row in message.rows
        ],
        awaits=AttemptId(message.awaits) if message.awaits else None,
        report_layers=frozenset(message.report_layers),
        sampling=sampling if last else None,
    )


def _sampling(message: stage_pb2.StageSampling) -> SamplingRow:
    return SamplingRow(SAMPLING_PARAMS.decode(message.params), tuple(message.prompt_ids), tuple(message.output_ids))


def ended_report(pass_id: int, result: Result) -> stage_pb2.StageReport:
    return stage_pb2.StageReport(
        ended=stage_pb2.StagePassEnded(
            pass_id=pass_id,
            outcome=_OUTCOMES[result.outcome],
            message=result.message,
            tokens=map(SAMPLED_TOKEN.encode, result.tokens),
            busy_ms=result.busy_ms,
            waited_ms=result.waited_ms,
        )
    )


def result_from(message: stage_pb2.StagePassEnded) -> Result:
    tokens = tuple(map(SAMPLED_TOKEN.decode, message.tokens))
    return Result(_OUTCOME_OF[message.outcome], message.message, tokens, message.busy_ms, message.waited_ms)
