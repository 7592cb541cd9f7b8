"""Words of the Conductor's view of the cluster, as people are shown it."""

from __future__ import annotations

from collections.abc import Mapping

from springtide.protocol.instances import InstanceRef
from springtide.values import value_class


@value_class(frozen=True, slots=True)
class InstanceStatus:
    """An instance, and what it last told of itself."""

    instance: InstanceRef
    ready: bool
    incarnation: int
    running: int
    waiting: int
    queue_ms: float
    step_ms: float
    slots_total: int
    slots_available: int
    cached_blocks: int
    seconds_since_report: float
    idle: int = 0
    """Attempts in idle capacity, which are not among those above."""


@value_class(frozen=True, slots=True)
class PredictionErrors:
    """How good the recent predictions of one quantity were. Errors are |predicted - actual| / actual; the bias is by how much the
    predictions together are above what came together, relative to that."""

    quantity: str
    """A value of `conductor.core.types.events.Quantity`."""
    count: int
    median_error: float
    p90_error: float
    bias: float


@value_class(frozen=True, slots=True)
class ClusterStatus:
    """What a Conductor knows of the cluster."""

    model: str
    instances: tuple[InstanceStatus, ...]
    requests_scheduled: int
    requests_rejected: int
    prompt_tokens: int
    cached_tokens: int
    attempts_live: int
    index_blocks: int
    rejections_by_reason: Mapping[str, int]
    ready: bool
    """At least one prefill group and one decode node can take requests."""
    leads: bool
    """Of several Conductors, whether this is the one that decides; of one, always."""
    epoch: int
    """The highest leadership epoch known there. 0: there is one Conductor only."""
    leader_address: str
    """Who leads, gRPC host:port, as far as is known there; else empty."""
    predictions: tuple[PredictionErrors, ...]
    prefill_load: float
    """Mean load of the pool, 1 being as much as the objectives allow."""
    decode_load: float
    prefill_work: float
    """Instances that the predicted work of the last half minute or so would keep busy, that of refused requests included."""
    decode_work: float
    wanted_prefill: int | None = None
    """Of the instances that are ready, those that should do prefill by it. None: too little is known, there is one instance only, or some
    have both roles and do what there is to do."""
    switching_instance_id: str = ""
    """On its way to the other role; empty: none is."""
