"""Between the messages of springtide.v1 and the core's events and actions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import cast

from conductor.core.conductor import ConductorCore
from conductor.core.state import Instance
from conductor.core.types.decision import Alternatives, Reason, Rejection
from conductor.core.types.events import (
    Advance,
    Assignment,
    Event,
    InstanceRef,
    LiveAttempt,
    Load,
    Phase,
    Placed,
    Renew,
    Reply,
    Role,
    Schedule,
    StoreRemoved,
    StoreSnapshot,
    StoreStored,
    Tier,
)
from conductor.core.types.predictions import ErrorSummary, Prediction
from conductor.server.leadership import Standing
from springtide.blocks import PackedKeys
from springtide.cost import DecodeCost, PrefillCost
from springtide.errors import InvalidRequest
from springtide.ids import AttemptId, BlockKey, GatewayId, InstanceId, NodeId, RequestId
from springtide.rpc import common_pb2, conductor_pb2, node_pb2, store_pb2

_TIERS = {store_pb2.TIER_DRAM: Tier.DRAM, store_pb2.TIER_SSD: Tier.SSD}
REASONS = {
    Reason.TTFT: conductor_pb2.REJECTION_REASON_TTFT,
    Reason.TBT: conductor_pb2.REJECTION_REASON_TBT,
    Reason.NO_PREFILL: conductor_pb2.REJECTION_REASON_NO_PREFILL,
    Reason.NO_DECODE: conductor_pb2.REJECTION_REASON_NO_DECODE,
    Reason.TOO_LARGE: conductor_pb2.REJECTION_REASON_TOO_LARGE,
    Reason.DEADLINE: conductor_pb2.REJECTION_REASON_DEADLINE,
    Reason.PRIORITY: conductor_pb2.REJECTION_REASON_PRIORITY,
    Reason.TENANT_SHARE: conductor_pb2.REJECTION_REASON_TENANT_SHARE,
    Reason.SIZE: conductor_pb2.REJECTION_REASON_SIZE,
}


# ---- what gateways ask ----


def schedule_event(request: conductor_pb2.ScheduleRequest, block_tokens: int) -> Schedule:
    """Raises InvalidRequest, naming the field, when the request does not make sense."""
    if not request.context.attempt_id:
        raise InvalidRequest("context.attempt_id is empty: the gateway names each attempt", param="context.attempt_id")
    if request.num_tokens < 1:
        raise InvalidRequest("num_tokens is 0: there is nothing to prefill", param="num_tokens")
    full_blocks = request.num_tokens // block_tokens
    keys = PackedKeys(request.block_keys)
    if len(keys) != full_blocks:
        raise InvalidRequest(
            f"block_keys has {len(keys)} keys; {request.num_tokens} tokens have {full_blocks} full blocks of {block_tokens}",
            param="block_keys",
        )
    for name in ("ttft_slo_ms", "tbt_slo_ms", "deadline_ms"):
        if not 0 <= getattr(request, name) < math.inf:
            raise InvalidRequest(f"{name} must be finite and not negative, but is {getattr(request, name)}", param=name)
    return Schedule(
        attempt_id=AttemptId(request.context.attempt_id),
        request_id=RequestId(request.context.request_id),
        gateway_id=GatewayId(request.gateway_id),
        block_keys=keys,
        num_tokens=request.num_tokens,
        max_new_tokens=request.max_new_tokens,
        accepted=request.accepted,
        avoid=frozenset(InstanceId(instance_id) for instance_id in request.avoid),
        ttft_slo_ms=request.ttft_slo_ms,
        tbt_slo_ms=request.tbt_slo_ms,
        tenant=request.context.tenant,
        priority=request.context.priority,
        deadline_ms=request.deadline_ms,
        min_new_tokens=min(request.min_new_tokens or 1, max(request.max_new_tokens, 1)),
    )


def report_events(request: conductor_pb2.AdvanceRequest) -> list[Event]:
    gateway_id = GatewayId(request.gateway_id)
    return [
        Placed(gateway_id, _live_attempt(report.placed)) if report.HasField("placed") else _progress(report.progress)
        for report in request.reports
    ]


def _progress(progress: conductor_pb2.Progress) -> Advance:
    return Advance(
        attempt_id=AttemptId(progress.attempt_id),
        phase=Phase(progress.phase or Phase.PREFILL),
        cached_tokens=progress.cached_tokens,
        output_tokens=progress.output_tokens,
        ttft_ms=_measured(progress.ttft_ms),
        remote_tokens=progress.remote_tokens,
        fetch_ms=_measured(progress.fetch_ms),
        queue_ms=_measured(progress.queue_ms),
        compute_ms=_measured(progress.compute_ms),
    )


def _measured(amount: float) -> float:
    """0, which is "not told", for what is no amount (of time, of tokens): it would spoil what is learnt from it for good."""
    return amount if 0 <= amount < math.inf else 0.0


def renew_event(request: conductor_pb2.RenewRequest) -> Renew:
    return Renew(GatewayId(request.gateway_id), [_live_attempt(attempt) for attempt in request.attempts])


def _live_attempt(attempt: conductor_pb2.LiveAttempt) -> LiveAttempt:
    num_tokens = max(attempt.num_tokens, 1)
    return LiveAttempt(
        attempt_id=AttemptId(attempt.attempt_id),
        prefill_id=InstanceId(attempt.prefill_id),
        decode_id=InstanceId(attempt.decode_id),
        phase=Phase(attempt.phase or Phase.PREFILL),
        num_tokens=num_tokens,
        cached_tokens=min(attempt.cached_tokens, num_tokens - 1),
        tenant=attempt.tenant,
        max_new_tokens=attempt.max_new_tokens,
        prediction=_prediction(attempt.prediction) if attempt.HasField("prediction") else None,
    )


def _prediction(message: conductor_pb2.Prediction) -> Prediction:
    return Prediction(
        ttft_ms=_measured(message.ttft_ms),
        queue_ms=_measured(message.queue_ms),
        transfer_ms=_measured(message.transfer_ms),
        prefill_ms=_measured(message.prefill_ms),
        tbt_ms=_measured(message.tbt_ms),
        output_tokens=_measured(message.output_tokens),
        ahead_ms=_measured(message.ahead_ms),
    )


# ---- what they are told ----


def not_leader(standing: Standing) -> conductor_pb2.ScheduleReply:
    return conductor_pb2.ScheduleReply(not_leader=conductor_pb2.NotLeader(leader_address=standing.leader_address, epoch=standing.epoch))


def schedule_reply(reply: Reply, debug: bool, epoch: int) -> conductor_pb2.ScheduleReply:
    message = conductor_pb2.ScheduleReply(epoch=epoch, estimates=_estimates(reply.alternatives) if debug else [])
    if reply.assignment is not None:
        message.assignment.CopyFrom(_assignment(reply.assignment))
    elif isinstance(reply.outcome, Rejection):
        message.rejection.CopyFrom(
            conductor_pb2.Rejection(
                reason=REASONS[reply.outcome.reason], message=reply.outcome.message, retry_after_s=reply.outcome.retry_after_s
            )
        )
    return message


def _assignment(assignment: Assignment) -> conductor_pb2.Assignment:
    return conductor_pb2.Assignment(
        attempt_id=assignment.attempt_id,
        prefill=_ref(assignment.prefill),
        decode=_ref(assignment.decode),
        local_blocks=assignment.local_blocks,
        sources=[
            common_pb2.PrefixSource(node_id=source.node_id, store_address=source.store_address, num_blocks=source.num_blocks)
            for source in assignment.sources
        ],
        predicted_ttft_ms=assignment.predicted_ttft_ms,
        predicted_tbt_ms=assignment.predicted_tbt_ms,
        ttft_slo_ms=assignment.ttft_slo_ms,
        tbt_slo_ms=assignment.tbt_slo_ms,
        prediction=conductor_pb2.Prediction(**asdict(assignment.prediction)),
        waits=assignment.waits,
        refusable=assignment.refusable,
    )


def _ref(ref: InstanceRef) -> conductor_pb2.InstanceRef:
    return conductor_pb2.InstanceRef(instance_id=ref.instance_id, address=ref.address, node_id=ref.node_id, store_address=ref.store_address)


def _estimates(alternatives: Alternatives) -> list[conductor_pb2.Estimate]:
    prefills = [
        conductor_pb2.Estimate(
            instance_id=e.instance_id,
            prefix_blocks=e.local_blocks,
            queue_ms=e.queue_ms,
            transfer_ms=e.transfer_ms,
            prefill_ms=e.prefill_ms,
            ttft_ms=e.ttft_ms,
            note=f"fetch {e.source_blocks - e.local_blocks} blocks from {e.source_id}" if e.source_id is not None else e.branch,
        )
        for e in alternatives.prefills
    ]
    decodes = [
        conductor_pb2.Estimate(
            instance_id=e.instance_id,
            prefix_blocks=e.prefix_blocks,
            tbt_ms=e.tbt_ms,
            note=f"batch {e.batch}, {e.slots_free} of {e.slots_total} slots free",
        )
        for e in alternatives.decodes
    ]
    inlines = [
        conductor_pb2.Estimate(
            instance_id=e.instance_id,
            prefix_blocks=e.prefix_blocks,
            queue_ms=e.wait_ms,
            prefill_ms=e.step_ms,
            ttft_ms=e.ttft_ms,
            tbt_ms=e.step_ms,
            note=f"inlined: {e.new_tokens} tokens in a step",
        )
        for e in alternatives.inlines
    ]
    return prefills + decodes + inlines


def cluster_status(core: ConductorCore, model: str, standing: Standing, now: float) -> conductor_pb2.ClusterStatus:
    loads, work = core.pool_loads(now), core.demand.work(now)
    num_ready = sum(core.scheduler.ready(instance) for instance in core.state.instances.values())
    instances = sorted(core.state.instances.values(), key=lambda instance: (instance.ref.role.value, instance.ref.instance_id))
    return conductor_pb2.ClusterStatus(
        model=model,
        instances=[_instance_status(core, instance, now) for instance in instances],
        requests_scheduled=core.totals.scheduled,
        requests_rejected=core.totals.rejected.total(),
        prompt_tokens=core.totals.prompt_tokens,
        cached_tokens=core.totals.cached_tokens,
        attempts_live=len(core.state.attempts),
        index_blocks=len(core.index),
        rejections_by_reason={reason.value: count for reason, count in core.totals.rejected.items()},
        ready=core.ready,
        leads=standing.leads,
        epoch=standing.epoch,
        leader_address=standing.leader_address,
        predictions=[_prediction_errors(summary) for summary in core.scores.errors.summaries()],
        prefill_load=loads.prefill,
        decode_load=loads.decode,
        prefill_work=work.prefill,
        decode_work=work.decode,
        wanted_prefill=work.wanted(Role.PREFILL, num_ready),
        switching_instance_id=core.balance.moving if core.balance is not None else None,
    )


def _prediction_errors(summary: ErrorSummary) -> conductor_pb2.PredictionErrors:
    return conductor_pb2.PredictionErrors(
        quantity=summary.quantity.value,
        count=summary.count,
        median_error=summary.median_error,
        p90_error=summary.p90_error,
        bias=summary.bias,
    )


def _instance_status(core: ConductorCore, instance: Instance, now: float) -> conductor_pb2.InstanceStatus:
    load = instance.load
    return conductor_pb2.InstanceStatus(
        instance=_ref(instance.ref),
        role=instance.ref.role.value,
        ready=core.scheduler.ready(instance),
        incarnation=instance.incarnation,
        running=load.running,
        waiting=load.waiting,
        queue_ms=instance.queue_ms(now),
        step_ms=load.step_ms,
        slots_total=load.slots_total,
        slots_available=load.slots_available,
        cached_blocks=core.index.blocks_of(instance.ref.node_id),
        seconds_since_report=now - instance.changed_at,
    )


def hung_instances(instances: Sequence[InstanceRef]) -> conductor_pb2.HungInstances:
    return conductor_pb2.HungInstances(instances=map(_ref, instances))


# ---- what nodes tell ----


def store_event(message: store_pb2.StoreEvent) -> Event:
    """Raises ValueError when the message is no event that is known."""
    node_id = NodeId(message.node_id)
    match message.WhichOneof("event"):
        case "snapshot":
            keys = _keys(message.snapshot.keys)
            # An empty store's snapshot needs no tier.
            tier = _tier(message.snapshot.tier) if keys else Tier.DRAM
            return StoreSnapshot(node_id, message.incarnation, message.sequence, keys, tier, message.snapshot.complete)
        case "stored":
            return StoreStored(node_id, message.incarnation, message.sequence, _keys(message.stored.keys), _tier(message.stored.tier))
        case "removed":
            keys = _keys(message.removed.keys)
            return StoreRemoved(node_id, message.incarnation, message.sequence, keys, _tier(message.removed.tier))
        case other:
            raise ValueError(f"store {message.node_id} sent an event of the unknown kind {other}")


def _tier(tier: store_pb2.Tier) -> Tier:
    if tier not in _TIERS:
        raise ValueError(f"a store's event names the unknown tier {tier}")
    return _TIERS[tier]


def _keys(keys: Iterable[bytes]) -> list[BlockKey]:
    # Not BlockKey(key) for each: a long prompt has thousands.
    return cast("list[BlockKey]", list(keys))


def load(report: node_pb2.LoadReport) -> Load:
    """Raises ValueError when a cost model is none, or the queue no length of time: a NaN among them would pass every comparison."""
    if not 0 <= report.queue_ms < math.inf:
        raise ValueError(f"LoadReport.queue_ms of {report.instance_id} must be finite and not negative, but is {report.queue_ms}")
    return Load(
        running=report.running,
        waiting=report.waiting,
        tokens=report.tokens,
        queue_ms=report.queue_ms,
        step_ms=report.step_ms,
        slots_total=report.slots_total,
        slots_available=report.slots_available,
        max_batch=report.max_batch,
        attempt_ids=frozenset(AttemptId(attempt_id) for attempt_id in report.attempt_ids),
        prefill_cost=_prefill_cost(report) if report.cost.prefill else None,
        decode_cost=DecodeCost(*_three(report, "decode")) if report.cost.decode else None,
        ssd_read_us_per_block=report.ssd_read_us_per_block,
        slots_promised=report.slots_promised,
    )


def _prefill_cost(report: node_pb2.LoadReport) -> PrefillCost:
    share = report.cost.slowest_share or 1.0
    if not 0 < share <= 1:
        raise ValueError(f"LoadReport.cost.slowest_share of {report.instance_id} must be above 0 and at most 1, but is {share}")
    return PrefillCost(*_three(report, "prefill"), share)


def _three(report: node_pb2.LoadReport, name: str) -> tuple[float, float, float]:
    coefficients = tuple(getattr(report.cost, name))
    if len(coefficients) != 3:
        raise ValueError(f"LoadReport.cost.{name} of {report.instance_id} must have 3 coefficients, not {len(coefficients)}")
    if not all(0 <= coefficient < math.inf for coefficient in coefficients):
        raise ValueError(f"LoadReport.cost.{name} of {report.instance_id} must be finite and not negative, but is {coefficients}")
    return coefficients
