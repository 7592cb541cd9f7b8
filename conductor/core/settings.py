"""The constants of a cluster that its decisions depend on."""

from __future__ import annotations

from dataclasses import dataclass

from springtide.config import ClusterConfig
from springtide.modelinfo import ModelInfo


@dataclass(frozen=True, slots=True)
class ConductorSettings:
    policy: str
    admission: str
    kvcache_balancing_threshold: float
    block_tokens: int
    bytes_per_block: int
    chunk_tokens: int
    transfer_bytes_per_s: float
    ttft_slo_ms: float
    tbt_slo_ms: float
    lease_s: float
    """How long an attempt is remembered whose gateway is silent."""
    rejoin_s: float
    """How soon a lost node may be back: told to those who come while there is none."""

    @property
    def bytes_per_token(self) -> int:
        return self.bytes_per_block // self.block_tokens

    @classmethod
    def of(cls, config: ClusterConfig, model_info: ModelInfo) -> ConductorSettings:
        return cls(
            policy=config.conductor.policy,
            admission=config.conductor.admission,
            kvcache_balancing_threshold=config.conductor.kvcache_balancing_threshold,
            block_tokens=config.kv.block_tokens,
            bytes_per_block=model_info.kv_spec(config.dtype, config.kv.block_tokens).bytes_per_slot,
            chunk_tokens=config.prefill_node.chunk_tokens,
            transfer_bytes_per_s=config.conductor.transfer_bytes_per_s,
            ttft_slo_ms=config.slo.ttft_ms,
            tbt_slo_ms=config.slo.tbt_ms,
            lease_s=config.kv.lease_s,
            rejoin_s=config.conductor.lease_s,
        )
