"""How loaded both pools are, as satisfaction of the objectives (arXiv 2407.00079, section 7.1): 1 is as much as they allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from conductor.core.state import ClusterState, Instance
from conductor.core.types.estimates import Floats
from springtide.ids import InstanceId
from springtide.protocol.attempts import Phase
from springtide.protocol.instances import Role


@dataclass(frozen=True, slots=True)
class PoolLoads:
    prefill: float
    """Mean over the instances; 0 without any."""
    decode: float
    by_instance: Mapping[InstanceId, float]
    """Prefill: the wait behind all of the queue, over the objective. Decode: the time between tokens, over the objective."""


def pool_loads(state: ClusterState, ttft_slo_ms: float, tbt_slo_ms: float, now: float) -> PoolLoads:
    """The loads of the instances that are up, at this moment: what is still in prefill counts there, not at its decode node."""
    instances = [instance for instance in state.of_role(Role.PREFILL) if instance.up and instance.load.prefill_cost is not None]
    loads = (_waits_ms(state, instances, now) / ttft_slo_ms).tolist()
    prefill = {instance.ref.instance_id: load for instance, load in zip(instances, loads, strict=True)}
    tbts_ms = state.forecast.tbts_ms(state.forecast.pool(now, now, joining=False))
    decode = {instance_id: tbt_ms / tbt_slo_ms for instance_id, tbt_ms in tbts_ms.items()}
    return PoolLoads(fmean(prefill.values()) if prefill else 0.0, fmean(decode.values()) if decode else 0.0, {**prefill, **decode})


def _waits_ms(state: ClusterState, instances: Sequence[Instance], now: float) -> Floats:
    """[instances] How long prompts like those that are there now wait behind all of the queue, on average; where there are none, all of
    its work."""
    queue_ms = np.array([instance.queue_ms(now) for instance in instances])
    rows = {instance.ref.instance_id: row for row, instance in enumerate(instances)}
    waiting = [
        (row, attempt.prefill_ms)
        for attempt in state.attempts.values()
        if attempt.phase is Phase.PREFILL and (row := rows.get(attempt.prefill_id)) is not None
    ]
    if not waiting:
        return queue_ms
    row_of, own_ms = np.array([row for row, _ in waiting]), np.array([own_ms for _, own_ms in waiting])
    factors = np.bincount(row_of, state.queue_bias.factors(own_ms, queue_ms[row_of]), len(instances))
    counts = np.bincount(row_of, minlength=len(instances))
    return np.asarray(queue_ms * np.where(counts > 0, factors / np.maximum(counts, 1), 1.0))
