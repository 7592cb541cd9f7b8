"""How loaded both pools are, as satisfaction of the objectives (arXiv 2407.00079, section 7.1): 1 is as much as they allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from conductor.core.events import Role
from conductor.core.state import ClusterState
from springtide.ids import InstanceId


@dataclass(frozen=True, slots=True)
class PoolLoads:
    prefill: float
    """Mean over the instances; 0 without any."""
    decode: float
    by_instance: Mapping[InstanceId, float]
    """Prefill: the TTFT of whoever is last in the queue, over the objective. Decode: the time between tokens, over the objective."""


def pool_loads(state: ClusterState, ttft_slo_ms: float, tbt_slo_ms: float, now: float) -> PoolLoads:
    """Of the instances that are up, at this moment: what is still in prefill counts there, not at its decode node."""
    prefill = {
        instance.ref.instance_id: instance.queue_ms(now) / ttft_slo_ms
        for instance in state.of_role(Role.PREFILL)
        if instance.up and instance.load.prefill_cost is not None
    }
    tbts_ms = state.forecast.tbts_ms(state.forecast.pool(now, now, joining=False))
    decode = {instance_id: tbt_ms / tbt_slo_ms for instance_id, tbt_ms in tbts_ms.items()}
    return PoolLoads(fmean(prefill.values()) if prefill else 0.0, fmean(decode.values()) if decode else 0.0, {**prefill, **decode})
