"""Between the gateway core's events and actions and the messages of the nodes."""

from __future__ import annotations

from gateway import events as ev
from springtide.ids import AttemptId, BlockKey
from springtide.protocol.instances import Role
from springtide.protocol.wire import PREFIX_SOURCE
from springtide.rpc import common_pb2 as pb
from springtide.rpc import node_pb2
from springtide.sampling import SampledToken

_FINISHES: dict[pb.FinishReason, ev.Finish | None] = {
    pb.FINISH_REASON_UNSPECIFIED: None,
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}


def context(generation: ev.Generation, attempt_id: AttemptId, age_ms: float = 0.0) -> pb.AttemptContext:
    return pb.AttemptContext(
        request_id=generation.request_id,
        attempt_id=attempt_id,
        tenant=generation.tenant,
        priority=generation.priority,
        traceparent=generation.traceparent,
        age_ms=age_ms,
    )


def decode_start(action: ev.StartDecode, namespace: BlockKey) -> node_pb2.DecodeCommand:
    return node_pb2.DecodeCommand(
        start=node_pb2.DecodeStart(
            context=context(action.generation, action.assignment.attempt_id, action.age_ms),
            token_ids=action.token_ids,
            num_prompt_tokens=len(action.generation.prompt_ids),
            sampling=action.generation.sampling.to_proto(),
            namespace=namespace,
            tbt_slo_ms=action.assignment.tbt_slo_ms,
            inlined=action.assignment.inlined,
            waits=action.waits,
            refusable=action.assignment.refusable,
            expected_tokens=action.assignment.prediction.output_tokens,
        )
    )


def prefill_start(action: ev.StartPrefill, namespace: BlockKey) -> node_pb2.PrefillCommand:
    assignment = action.assignment
    start = node_pb2.PrefillStart(
        context=context(action.generation, assignment.attempt_id, action.age_ms),
        token_ids=action.token_ids,
        num_prompt_tokens=len(action.generation.prompt_ids),
        sampling=action.generation.sampling.to_proto(),
        namespace=namespace,
        decode_store_address=assignment.decode.store_address,
        decode_store_node_id=assignment.decode.node_id,
        ttft_budget_ms=action.ttft_budget_ms,
        sources=map(PREFIX_SOURCE.encode, assignment.sources),
    )
    return node_pb2.PrefillCommand(start=start)


def abort_command(side: Role, attempt_id: AttemptId) -> node_pb2.PrefillCommand | node_pb2.DecodeCommand:
    abort = node_pb2.AbortAttempt(attempt_id=attempt_id)
    return node_pb2.PrefillCommand(abort=abort) if side is Role.PREFILL else node_pb2.DecodeCommand(abort=abort)


def update_events(update: node_pb2.PrefillUpdate | node_pb2.DecodeUpdate) -> list[ev.Event]:
    if isinstance(update, node_pb2.DecodeUpdate):
        outputs = [
            _failed(output, Role.DECODE) if output.HasField("failure") else ev.DecodeOutput(_output(output)) for output in update.outputs
        ]
        signs = [_signs(update.signs, Role.DECODE)] if update.HasField("signs") else []
        reserved = [ev.DecodeReserved(AttemptId(attempt_id)) for attempt_id in update.reserved]
        return [*reserved, *map(_prefill_done, update.prefilled), *outputs, *signs]
    match update.WhichOneof("update"):
        case "failed":
            return [_failed(update.failed, Role.PREFILL)]
        case "signs":
            return [_signs(update.signs, Role.PREFILL)]
    return [_prefill_done(update.done)]


def _signs(signs: node_pb2.AttemptSigns, side: Role) -> ev.Signs:
    return ev.Signs(side, tuple(ev.Sign(AttemptId(sign.attempt_id), sign.computed_tokens, sign.waiting) for sign in signs.signs))


def _prefill_done(done: node_pb2.PrefillDone) -> ev.PrefillDone:
    return ev.PrefillDone(_output(done.output), done.cached_tokens, done.remote_tokens, done.fetch_ms, done.queue_ms, done.compute_ms)


def _failed(output: pb.TokenOutput, side: Role) -> ev.AttemptFailed:
    return ev.AttemptFailed(AttemptId(output.attempt_id), side, output.failure.code, output.failure.message)


def _output(output: pb.TokenOutput) -> ev.Output:
    if output.logprobs:
        tokens = tuple(_with_logprobs(token_id, entry) for token_id, entry in zip(output.token_ids, output.logprobs, strict=True))
    else:
        tokens = tuple(SampledToken(token_id) for token_id in output.token_ids)
    return ev.Output(AttemptId(output.attempt_id), output.position, tokens, _FINISHES[output.finish_reason])


def _with_logprobs(token_id: int, entry: pb.TokenLogprobs) -> SampledToken:
    return SampledToken(token_id, entry.chosen.logprob, tuple((other.token_id, other.logprob) for other in entry.top))
