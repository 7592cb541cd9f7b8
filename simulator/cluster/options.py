"""What can be chosen about a simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass

from conductor.core.settings import ConductorSettings
from kvstore.core.eviction import PolicyName
from simulator.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Options:
    hardware: Hardware
    prefill: int
    decode: int
    conductor: ConductorSettings
    eviction: PolicyName = "hit-density"
    prefill_tokens: int | None = None
    """Of KV that a prefill node's arena holds; None: the hardware's."""
    decode_tokens: int | None = None
    """Of KV that a decode node holds; None: the hardware's."""
    cores: float | None = None
    """That all engines share, each of which would use one; None: every instance has its own accelerator."""
    contention: float = 0.0
    """See Processor."""
    late_tbt_slo_ms: float | None = None
    """With it, decode nodes check this objective when a prompt has been handed over to them, as in the paper, and not before its prefill
    begins: what they refuse then was computed in vain. Not what Springtide does, but what it can be compared with."""
    rpc_s: float = 0.0005
    """From the gateway to whomever it asks, and back."""
    ingest_lease_s: float = 120.0
    slot_wait_s: float = 30.0
    sample_every_s: float = 10.0
    """Of virtual time: load and queues, for pictures."""
