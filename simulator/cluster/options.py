"""What can be chosen about a simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass

from conductor.core.settings import ConductorSettings
from simulator.hardware import Hardware
from springtide.choices import EvictionName

RESTART_S = 82.0
"""So long vLLM takes with warm caches on an L40S (imports and engine 34 s, weights 18, compiled graphs 23, their capture 7:
tensorfuse.io/docs/blogs/reducing_gpu_cold_start), for a model of 16 GB, which is also a device's share of Llama-2-70B on eight."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    hardware: Hardware
    prefill: int
    decode: int
    conductor: ConductorSettings
    instances: int = 0
    """That prefill and decode, beside those that do one of both."""
    stage_shares: tuple[float, ...] = (1.0,)
    """Of a pass's time, in each stage of a prefill group."""
    eviction: EvictionName = "hit-density"
    prefill_tokens: int | None = None
    """Of KV that a prefill node's arena holds; None: the hardware's."""
    decode_tokens: int | None = None
    """Of KV that a decode node holds; None: the hardware's."""
    cores: float | None = None
    """That all engines share, each of which would use one; None: every instance has its own accelerator."""
    pass_contention: float = 0.0
    """See Processor."""
    step_contention: float = 0.0
    late_tbt_slo_ms: float | None = None
    """With it, decode nodes check this objective when a prompt has been handed over to them, as in the paper, and not before its prefill
    begins: what they refuse then was computed in vain. Not what Springtide does, but what it can be compared with."""
    rpc_s: float = 0.0005
    """From the gateway to whomever it asks, and back."""
    ingest_lease_s: float = 120.0
    slot_wait_s: float = 10.0
    restart_s: float = RESTART_S
    """How long an instance that switches its role is nobody's, from the end of its work on."""
    sample_every_s: float = 10.0
    """Of virtual time: load and queues, for pictures."""
