"""One simulation from a configuration, as the command and the experiments run it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conductor.core.settings import ConductorSettings
from prefill_node.core.split import split
from simulator.cluster import Cluster, ClusterOptions
from simulator.coupled import CoupledOptions, run_coupled
from simulator.hardware import KNOWN, Hardware, from_profile, load
from simulator.result import result_of
from simulator.workload import Workload
from springtide.choices import RoutingName
from springtide.config import ClusterConfig, PrefillConfig, load_config
from springtide.errors import ConfigError
from springtide.modelinfo import KVSpec, ModelInfo
from springtide.stage_layers import configured_split

PAPER_TTFT_SLO_MS, PAPER_TBT_SLO_MS = 30_000.0, 100.0
"""arXiv 2407.00079, section 8: 30 s to the first token, 0.1 s a token."""
SIMULATED_CHUNK_TOKENS = 8192
"""Most tokens of a step if nothing else is said. Springtide bounds steps with outputs in them by the outputs' objective besides; coupled
instances, which know of none, take it as it is."""
_BYTES_OF_A_VALUE = 2
"""The caches of all hardware models are of bfloat16."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A cluster of `prefill` + `decode` instances and `instances` that do both; with `coupled`, of so many of the other architecture
    instead."""

    workload: Workload
    hardware: Hardware
    prefill: int = 8
    decode: int = 8
    instances: int = 0
    coupled: int = 0
    routing: RoutingName = "cache-aware"
    """To the coupled ones."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of docs/configuration.md by their dotted names, such as `conductor.policy`; what is not there is as in `config_of`."""
    prefill_tokens: int | None = None
    """Of KV that each prefill node holds; None: the hardware's. `decode_tokens` likewise."""
    decode_tokens: int | None = None
    late_tbt_slo_ms: float | None = None
    """See Options; the goodput is then by this objective too."""
    samples: int = 360
    """Of the load over the run."""


def find_hardware(name: str) -> Hardware:
    """A model by name, or a file of `springtide profile`. Raises ConfigError."""
    if name in KNOWN:
        return load(name)
    path = Path(name)
    if not path.exists():
        raise ConfigError(f"--hardware: {name!r} is neither a file of `springtide profile` nor one of {', '.join(KNOWN)}")
    return _profiled(path)


def _profiled(path: Path) -> Hardware:
    """The machine of a profile, its nodes configured as they are by default."""
    config = ClusterConfig()
    try:
        document = json.loads(path.read_text())
        spec = KVSpec(**document["kv"], dtype=document["dtype"], block_tokens=config.kv.block_tokens)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--hardware: {path} is not what `springtide profile` writes: {error!r}") from None
    return from_profile(
        path,
        spec=spec,
        link_bytes_per_s=config.conductor.transfer_bytes_per_s,
        arena_tokens=config.kv.arena_size // spec.bytes_per_token,
        max_batch=config.decode_node.max_batch,
    )


def config_of(plan: Plan) -> ClusterConfig:
    """Raises ConfigError."""
    settings = {
        "kv.block_tokens": plan.workload.block_tokens,
        "prefill_node.chunk_tokens": SIMULATED_CHUNK_TOKENS,
        "slo.ttft_ms": PAPER_TTFT_SLO_MS,
        "slo.tbt_ms": PAPER_TBT_SLO_MS,
        "conductor.transfer_bytes_per_s": plan.hardware.link_bytes_per_s,
        **({"kv.eviction": "lru"} if plan.coupled else {}),
        **plan.config,
    }
    return load_config(None, settings, environ={})


def simulate(plan: Plan) -> dict[str, Any]:
    """Runs a plan; what it returns is as of simulator.result.result_of. Raises ConfigError for a setting that is not right."""
    config = config_of(plan)
    started = time.perf_counter()
    settings = {
        "trace": plan.workload.name,
        "hardware": plan.hardware.name,
        "block_tokens": plan.workload.block_tokens,
    }
    if plan.coupled:
        settings |= {"coupled": plan.coupled, "policy": plan.routing, "admission": "baseline", "eviction": config.kv.eviction}
        options = CoupledOptions(
            hardware=plan.hardware,
            instances=plan.coupled,
            block_tokens=plan.workload.block_tokens,
            batch_tokens=config.prefill_node.chunk_tokens,
            cache_tokens=plan.decode_tokens,
            eviction=config.kv.eviction,
            routing=plan.routing,
        )
        records, series, done = run_coupled(plan.workload, options), {}, {}
    else:
        settings |= {"prefill": plan.prefill, "decode": plan.decode, "instances": plan.instances}
        settings |= {"policy": config.conductor.policy, "admission": config.conductor.admission}
        cluster = Cluster(plan.workload, options_of(plan))
        cluster.run()
        records, series = cluster.records, cluster.series.to_json()
        done = {"replicated_bytes": cluster.orders.replicated_bytes, "role_switches": cluster.orders.role_switches}
    tbt_slo_ms = plan.late_tbt_slo_ms or config.slo.tbt_ms
    result = result_of(records, series, settings, config.slo.ttft_ms, tbt_slo_ms)
    result["summary"] |= done
    result["summary"]["wall_s"] = time.perf_counter() - started
    return result


def _stage_shares(config: PrefillConfig, num_layers: int) -> tuple[float, ...]:
    """All layers take as long. Raises ConfigError."""
    ranges = configured_split(config, num_layers) or split([1.0] * num_layers, config.stages)
    return tuple(len(layers) / num_layers for layers in ranges)


def options_of(plan: Plan) -> ClusterOptions:
    config = config_of(plan)
    return ClusterOptions(
        hardware=plan.hardware,
        prefill=plan.prefill,
        decode=plan.decode,
        instances=plan.instances,
        conductor=ConductorSettings.of(config, _model_info(plan.hardware)),
        stage_shares=_stage_shares(config.prefill_node, plan.hardware.num_layers),
        eviction=config.kv.eviction,
        prefill_tokens=plan.prefill_tokens,
        decode_tokens=plan.decode_tokens,
        late_tbt_slo_ms=plan.late_tbt_slo_ms,
        sample_every_s=max(plan.workload.duration_s / plan.samples, 0.1),
    )


def _model_info(hardware: Hardware) -> ModelInfo:
    """Of a model with so much KV; nothing else of it matters here."""
    head_dim = hardware.kv_bytes_per_token // (2 * _BYTES_OF_A_VALUE * hardware.num_layers)
    return ModelInfo("", hardware.name, "", hardware.name, 1 << 30, hardware.num_layers, 1, head_dim, 2, ())
