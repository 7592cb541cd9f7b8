"""The constants of a cluster that its decisions depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from springtide.choices import AdmissionName, PolicyName
from springtide.config import ClusterConfig, ConductorConfig
from springtide.modelinfo import ModelInfo


@dataclass(frozen=True, slots=True)
class PoolBalanceSettings:
    """When an instance is moved from one pool to the other. Loads are relative to the objectives."""

    least_load: float
    """Of the busier pool."""
    ratio: float
    """Of its load to the other's, at least."""
    after_s: float
    """How long both must have held without a break."""
    pause_s: float
    """From the end of one move to the next."""
    drain_s: float
    """What the instance has not finished by then is scheduled anew."""


@dataclass(frozen=True, slots=True)
class ConductorSettings:
    policy: PolicyName
    admission: AdmissionName
    kvcache_balancing_threshold: float | Literal["auto"]
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
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """Shares in what is admitted under overload; `*` is every other tenant, 1 unless given."""
    overload_headroom: float = 0.2
    """Most of the load that is kept free for those with a better claim."""
    overload_short_first: bool = True
    """Under load, what takes much more than most is refused earlier than the rest."""
    replication_bytes_per_s: float = 0.0
    """Most that is copied ahead over the whole cluster; 0: nothing is."""
    replication_node_bytes_per_s: float = float(256 << 20)
    """At each node, whether it gives or takes."""
    replication_gain_ms: float = 300.0
    """A copy is made where it spares a request so much."""
    idle_slowdown: float = 0.05
    """By how much requests in idle capacity may lengthen a decode step of others."""
    inline_tokens: int = 0
    """Most tokens of a prompt that a decode node computes itself; 0: none does."""
    chunk_ms: float | None = None
    """As of Chunking, whose `chunk_tokens` are those above."""
    pool_balance: PoolBalanceSettings | None = None
    """None: instances keep their roles."""

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
            chunk_ms=config.prefill_node.chunk_ms,
            transfer_bytes_per_s=config.conductor.transfer_bytes_per_s,
            ttft_slo_ms=config.slo.ttft_ms,
            tbt_slo_ms=config.slo.tbt_ms,
            lease_s=config.kv.lease_s,
            rejoin_s=config.conductor.lease_s,
            tenant_weights=config.conductor.tenant_weights,
            overload_headroom=config.conductor.overload_headroom,
            overload_short_first=config.conductor.overload_short_first,
            replication_bytes_per_s=float(config.conductor.replication_rate),
            replication_node_bytes_per_s=float(config.kv.replication_rate),
            replication_gain_ms=config.conductor.replication_gain_ms,
            idle_slowdown=config.slo.idle_slowdown,
            inline_tokens=config.decode_node.inline_tokens,
            pool_balance=_pool_balance(config.conductor),
        )


def _pool_balance(config: ConductorConfig) -> PoolBalanceSettings | None:
    if not config.pool_balance:
        return None
    return PoolBalanceSettings(
        least_load=config.pool_balance_load,
        ratio=config.pool_balance_ratio,
        after_s=config.pool_balance_after_s,
        pause_s=config.pool_balance_pause_s,
        drain_s=config.pool_balance_drain_s,
    )
