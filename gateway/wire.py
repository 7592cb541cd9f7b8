"""Between the gateway core's events and actions and the messages of `springtide.v1`."""

from __future__ import annotations

from collections.abc import Sequence

from gateway import events as ev
from gateway.state import LiveAttempt
from springtide.ids import AttemptId, BlockKey, GatewayId, InstanceId, NodeId
from springtide.rpc import common_pb2 as pb
from springtide.rpc import conductor_pb2, node_pb2
from springtide.sampling import SampledToken

PHASES: dict[ev.Phase, conductor_pb2.AttemptPhase] = {
    "prefill": conductor_pb2.ATTEMPT_PHASE_PREFILL,
    "decode": conductor_pb2.ATTEMPT_PHASE_DECODE,
    "finished": conductor_pb2.ATTEMPT_PHASE_FINISHED,
    "failed": conductor_pb2.ATTEMPT_PHASE_FAILED,
}
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


# ---- to the Conductor ----


def schedule_request(action: ev.Schedule, keys: Sequence[BlockKey], gateway_id: GatewayId) -> conductor_pb2.ScheduleRequest:
    return conductor_pb2.ScheduleRequest(
        context=context(action.generation, action.attempt_id),
        block_keys=b"".join(keys),
        num_tokens=len(action.token_ids),
        max_new_tokens=action.max_new_tokens,
        min_new_tokens=action.min_new_tokens,
        gateway_id=gateway_id,
        accepted=action.accepted,
        avoid=action.avoid,
        deadline_ms=action.deadline_ms,
    )


def schedule_answer(attempt_id: AttemptId, reply: conductor_pb2.ScheduleReply) -> ev.Assigned | ev.Rejected:
    if reply.HasField("assignment"):
        return ev.Assigned(_assignment(reply.assignment))
    rejection = reply.rejection
    return ev.Rejected(attempt_id, rejection.reason, rejection.message, rejection.retry_after_s)


def _assignment(message: conductor_pb2.Assignment) -> ev.Assignment:
    return ev.Assignment(
        attempt_id=AttemptId(message.attempt_id),
        prefill=_instance(message.prefill),
        decode=_instance(message.decode),
        sources=tuple(message.sources),
        predicted_ttft_ms=message.predicted_ttft_ms,
        ttft_slo_ms=message.ttft_slo_ms,
        tbt_slo_ms=message.tbt_slo_ms,
        prediction=message.prediction if message.HasField("prediction") else None,
        waits=message.waits,
        refusable=message.refusable,
    )


def _instance(message: conductor_pb2.InstanceRef) -> ev.Instance:
    return ev.Instance(InstanceId(message.instance_id), message.address, NodeId(message.node_id), message.store_address)


def progress(action: ev.Advance) -> conductor_pb2.AttemptReport:
    reached = conductor_pb2.Progress(
        attempt_id=action.attempt_id,
        phase=PHASES[action.phase],
        instance_id=action.instance_id,
        cached_tokens=action.cached_tokens,
        output_tokens=action.output_tokens,
        ttft_ms=action.ttft_ms,
        remote_tokens=action.remote_tokens,
        fetch_ms=action.fetch_ms,
        queue_ms=action.queue_ms,
        compute_ms=action.compute_ms,
    )
    return conductor_pb2.AttemptReport(progress=reached)


def live_attempt(attempt: LiveAttempt) -> conductor_pb2.LiveAttempt:
    return conductor_pb2.LiveAttempt(
        attempt_id=attempt.attempt_id,
        prefill_id=attempt.prefill_id,
        decode_id=attempt.decode_id,
        phase=PHASES[attempt.phase],
        num_tokens=attempt.num_tokens,
        cached_tokens=attempt.cached_tokens,
        tenant=attempt.tenant,
        max_new_tokens=attempt.max_new_tokens,
        prediction=attempt.prediction,
    )


def placed(request: conductor_pb2.ScheduleRequest, assignment: conductor_pb2.Assignment) -> conductor_pb2.AttemptReport:
    """What a Conductor that did not place it is told of a new attempt."""
    attempt = conductor_pb2.LiveAttempt(
        attempt_id=assignment.attempt_id,
        prefill_id=assignment.prefill.instance_id,
        decode_id=assignment.decode.instance_id,
        phase=conductor_pb2.ATTEMPT_PHASE_PREFILL,
        num_tokens=request.num_tokens,
        tenant=request.context.tenant,
        max_new_tokens=request.max_new_tokens,
        prediction=assignment.prediction if assignment.HasField("prediction") else None,
    )
    return conductor_pb2.AttemptReport(placed=attempt)


# ---- to and from the nodes ----


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
            expected_tokens=action.assignment.expected_tokens,
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
        sources=assignment.sources,
    )
    return node_pb2.PrefillCommand(start=start)


def abort_command(side: ev.Side, attempt_id: AttemptId) -> node_pb2.PrefillCommand | node_pb2.DecodeCommand:
    abort = node_pb2.AbortAttempt(attempt_id=attempt_id)
    return node_pb2.PrefillCommand(abort=abort) if side == "prefill" else node_pb2.DecodeCommand(abort=abort)


def update_events(update: node_pb2.PrefillUpdate | node_pb2.DecodeUpdate) -> list[ev.Event]:
    if isinstance(update, node_pb2.DecodeUpdate):
        outputs = [
            _failed(output, "decode") if output.HasField("failure") else ev.DecodeOutput(_output(output)) for output in update.outputs
        ]
        signs = [_signs(update.signs, "decode")] if update.HasField("signs") else []
        reserved = [ev.DecodeReserved(AttemptId(attempt_id)) for attempt_id in update.reserved]
        return [*reserved, *map(_prefill_done, update.prefilled), *outputs, *signs]
    match update.WhichOneof("update"):
        case "failed":
            return [_failed(update.failed, "prefill")]
        case "signs":
            return [_signs(update.signs, "prefill")]
    return [_prefill_done(update.done)]


def _signs(signs: node_pb2.AttemptSigns, side: ev.Side) -> ev.Signs:
    return ev.Signs(side, tuple(ev.Sign(AttemptId(sign.attempt_id), sign.computed_tokens, sign.waiting) for sign in signs.signs))


def instances_hung(hung: conductor_pb2.HungInstances) -> ev.InstancesHung:
    return ev.InstancesHung(frozenset((InstanceId(instance.instance_id), instance.address) for instance in hung.instances))


def _prefill_done(done: node_pb2.PrefillDone) -> ev.PrefillDone:
    return ev.PrefillDone(_output(done.output), done.cached_tokens, done.remote_tokens, done.fetch_ms, done.queue_ms, done.compute_ms)


def _failed(output: pb.TokenOutput, side: ev.Side) -> ev.AttemptFailed:
    return ev.AttemptFailed(AttemptId(output.attempt_id), side, output.failure.code, output.failure.message)


def _output(output: pb.TokenOutput) -> ev.Output:
    if output.logprobs:
        tokens = tuple(_with_logprobs(token_id, entry) for token_id, entry in zip(output.token_ids, output.logprobs, strict=True))
    else:
        tokens = tuple(SampledToken(token_id) for token_id in output.token_ids)
    return ev.Output(AttemptId(output.attempt_id), output.position, tokens, _FINISHES[output.finish_reason])


def _with_logprobs(token_id: int, entry: pb.TokenLogprobs) -> SampledToken:
    return SampledToken(token_id, entry.chosen.logprob, tuple((other.token_id, other.logprob) for other in entry.top))
