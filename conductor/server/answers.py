"""What the Conductor's core has decided and what it knows, in the words of the protocol."""

from __future__ import annotations

from conductor.core.conductor import ConductorCore
from conductor.core.state import Instance
from conductor.core.types.decision import Alternatives
from conductor.core.types.events import Decided
from conductor.server.leadership import Standing
from springtide.protocol.instances import Role
from springtide.protocol.scheduling import Estimate, NotLeader, Rejection, ScheduleReply
from springtide.protocol.status import ClusterStatus, InstanceStatus


def not_leader(standing: Standing) -> ScheduleReply:
    """The answer of a Conductor that does not lead: somebody else decides."""
    return ScheduleReply(not_leader=NotLeader(standing.leader_address, standing.epoch))


def schedule_reply(decided: Decided, debug: bool, epoch: int) -> ScheduleReply:
    """The answer to a gateway; with every alternative's estimate for `debug`."""
    rejection = decided.decision if isinstance(decided.decision, Rejection) else None
    return ScheduleReply(decided.assignment, rejection, estimates=_estimates(decided.alternatives) if debug else (), epoch=epoch)


def _estimates(alternatives: Alternatives) -> tuple[Estimate, ...]:
    prefills = [
        Estimate(
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
        Estimate(
            instance_id=e.instance_id,
            prefix_blocks=e.prefix_blocks,
            tbt_ms=e.tbt_ms,
            note=f"batch {e.batch}, {e.slots_free} of {e.slots_total} slots free",
        )
        for e in alternatives.decodes
    ]
    inlines = [
        Estimate(
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
    return (*prefills, *decodes, *inlines)


def cluster_status(core: ConductorCore, model: str, standing: Standing, now: float) -> ClusterStatus:
    loads, work = core.pool_loads(now), core.demand.work(now)
    num_ready = sum(core.scheduler.ready(instance) for instance in core.state.instances.values())
    instances = sorted(core.state.instances.values(), key=lambda instance: (instance.ref.role.value, instance.ref.instance_id))
    return ClusterStatus(
        model=model,
        instances=tuple(_instance_status(core, instance, now) for instance in instances),
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
        predictions=tuple(core.scores.errors.summaries()),
        prefill_load=loads.prefill,
        decode_load=loads.decode,
        prefill_work=work.prefill,
        decode_work=work.decode,
        wanted_prefill=work.wanted(Role.PREFILL, num_ready),
        switching_instance_id=core.balance.moving or "" if core.balance is not None else "",
    )


def _instance_status(core: ConductorCore, instance: Instance, now: float) -> InstanceStatus:
    load = instance.load
    return InstanceStatus(
        instance=instance.ref,
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
