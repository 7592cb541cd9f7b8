"""The clusters that faults are let loose on. A seed chooses one, or names one with others mixed in."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.history import Topology
from tests.chaos.plan import Targets
from tests.chaos.workload import CONTEXT_TOKENS

Settings = Mapping[str, Any]

BLOCK_TOKENS = 16
MODEL = {"num_hidden_layers": 4, "vocab_size": 272, "max_position_embeddings": CONTEXT_TOKENS}
"""Fields of `make_tiny_llama`."""
BYTES_PER_TOKEN = 4 * 2 * 2 * 16 * 4
"""Layers, K and V, KV heads, their size, float32."""
_ROOMY_BYTES = 24 * CONTEXT_TOKENS * BYTES_PER_TOKEN
_TINY_BYTES = 3 * CONTEXT_TOKENS * BYTES_PER_TOKEN // 2
SSD_BYTES = 8 << 20
NODES = 2
"""Of each role, unless a shape has instances or says another number."""
_COUNTED = {"prefill": "prefill", "decode": "decode", "instance": "instances"}
"""Roles, and the settings that say how many nodes they have."""


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    settings: Settings = field(default_factory=dict, hash=False)
    """Of the configuration file, laid over `base_settings`."""
    gateways: int = 1
    clients: int = 6
    ssd: bool = False
    sheds_load: bool = False
    """Its admission refuses what would miss its objectives."""
    scarce: bool = False
    """Requests wait for room in the pool: gaps are not held against it."""

    def configuration(self, model: Path, run_dir: Path, ssd_dir: Path | None) -> dict[str, Any]:
        numbers = {setting: _count(self.settings, role) for role, setting in _COUNTED.items()}
        settings = merge(base_settings(model, run_dir), {**self.settings, **numbers})
        if self.ssd:
            tier = {"ssd_dir": str(ssd_dir), "ssd_size": SSD_BYTES // 2, "demote_below": 1.0, "demote_until": 1.0}
            settings = merge(settings, {"kv": tier})
        return settings

    @property
    def calm(self) -> Shape:
        """Whose answers are the reference. It has as many ranks: where two tokens are equally likely, the order of their sums decides."""
        ranks = {section: {"tensor_parallel": self._get(section, "tensor_parallel", 1)} for section in ("prefill_node", "decode_node")}
        return Shape("calm", {"prefill": 1, "decode": 1, **ranks})

    @property
    def topology(self) -> Topology:
        separate = bool(self._get("server", "separate_gateway", False)) or len(self._conductors) > 1
        return Topology(
            prefill=(*self._nodes("prefill"), *self._nodes("instance")),
            decode=(*self._nodes("decode"), *self._nodes("instance")),
            conductors=self._conductors,
            gateways=tuple(f"gateway-{number}" for number in range(self.gateways)),
            gateway_in_conductor=not separate,
        )

    @property
    def targets(self) -> Targets:
        topology = self.topology
        engines = topology.engines
        return Targets(
            engines=engines,
            movable=topology.decode if len(topology.decode) > 1 else (),
            stores=tuple(f"{engine}-store" for engine in engines),
            children=tuple(f"{name}/{number}" for name in engines for number in range(self._num_children(name))),
            conductors=topology.conductors,
            gateways=topology.gateways[1:] if topology.gateway_in_conductor else topology.gateways,
            disks=engines if self.ssd else (),
        )

    @property
    def _conductors(self) -> tuple[str, ...]:
        return tuple(f"conductor-{number}" for number in range(self._get("conductor", "replicas", 1)))

    def _nodes(self, role: str) -> tuple[str, ...]:
        return tuple(f"{role}-{number}" for number in range(_count(self.settings, role)))

    def _num_children(self, engine: str) -> int:
        section = "prefill_node" if engine.startswith("prefill-") else "decode_node"
        return int(self._get(section, "stages", 1)) * int(self._get(section, "tensor_parallel", 1)) - 1

    def _get(self, section: str, name: str, default: Any) -> Any:
        return self.settings.get(section, {}).get(name, default)


def base_settings(model: Path, run_dir: Path) -> dict[str, Any]:
    """Objectives that a busy machine can keep, and the least threads."""
    return {
        "model": str(model),
        "served_model_name": "tiny",
        "dtype": "float32",
        "device": "cpu",
        "run_dir": str(run_dir),
        "kv": {"block_tokens": BLOCK_TOKENS, "arena_size": _ROOMY_BYTES},
        "prefill_node": {"threads": 1, "chunk_tokens": 256},
        "decode_node": {"threads": 1},
        "slo": {"ttft_ms": 120_000, "tbt_ms": 60_000},
        "conductor": {"admission": "baseline"},
    }


SHAPES = (
    Shape("plain", {"server": {"separate_gateway": True}}),
    Shape("default", {"instances": 2}),
    Shape("stages", {"prefill": 1, "prefill_node": {"stages": 2}, "server": {"separate_gateway": True}}),
    Shape("ranks", {"prefill": 1, "decode": 1, "prefill_node": {"tensor_parallel": 2}, "decode_node": {"tensor_parallel": 2}}),
    Shape("conductors", {"conductor": {"replicas": 2, "leader_lease_s": 2.0}}),
    Shape("gateways", {"prefill": 1, "server": {"separate_gateway": True}}, gateways=2),
    Shape("ssd", {"prefill": 1, "kv": {"arena_size": 2 * _TINY_BYTES}, "server": {"separate_gateway": True}}, ssd=True, scarce=True),
    Shape("tcp", {"kv": {"transports": ["tcp"], "checksums": True}, "server": {"separate_gateway": True}}),
    Shape(
        "tiny",
        {"prefill": 1, "decode": 1, "kv": {"arena_size": _TINY_BYTES}, "server": {"separate_gateway": True}},
        clients=16,
        scarce=True,
    ),
    Shape(
        "shedding",
        {
            "conductor": {"admission": "early-rejection-predicted"},
            "slo": {"ttft_ms": 5_000, "tbt_ms": 1_000},
            "server": {"separate_gateway": True},
        },
        sheds_load=True,
    ),
)

SERIES = (
    "default",
    "gateways",
    "default+ssd",
    "default+shedding",
    "tcp+stages",
    "ranks+gateways",
    "tiny+ssd",
    "default+conductors",
    "stages+ranks+tcp",
    "plain",
)
"""What a series of runs goes through."""


def choose(seed: int) -> Shape:
    """One of the shapes, or two of them mixed."""
    generator = random.Random(f"shape {seed}")
    if generator.random() < 0.6:
        return generator.choice(SHAPES)
    return mixed(*generator.sample(SHAPES, 2))


def named(name: str) -> Shape:
    """`tcp`, or `tcp+stages`. Raises ValueError, which says what there is."""
    known = {shape.name: shape for shape in SHAPES}
    parts = name.split("+")
    if unknown := [part for part in parts if part not in known]:
        raise ValueError(f"--shape {name}: there is no shape {unknown[0]!r}; there are {', '.join(known)}, and any two joined by +")
    shape = known[parts[0]]
    for part in parts[1:]:
        shape = mixed(shape, known[part])
    return shape


def mixed(one: Shape, other: Shape) -> Shape:
    """Both at once; where they contradict each other, as `other` says, and the larger of two numbers of nodes and processes."""
    settings = merge(one.settings, other.settings)
    for setting in _COUNTED.values():
        if setting in settings:
            unsaid = 0 if "instances" in settings else NODES
            settings[setting] = max(one.settings.get(setting, unsaid), other.settings.get(setting, unsaid))
    return Shape(
        f"{one.name}+{other.name}",
        settings,
        gateways=max(one.gateways, other.gateways),
        clients=max(one.clients, other.clients),
        ssd=one.ssd or other.ssd,
        sheds_load=one.sheds_load or other.sheds_load,
        scarce=one.scarce or other.scarce,
    )


def _count(settings: Settings, role: str) -> int:
    """Where there are instances, of nodes of one role only those that are asked for."""
    return int(settings.get(_COUNTED[role], 0 if role == "instance" or "instances" in settings else NODES))


def merge(under: Settings, over: Settings) -> dict[str, Any]:
    """Nested mappings, key by key."""
    result = dict(under)
    for key, value in over.items():
        result[key] = merge(result[key], value) if isinstance(value, Mapping) and isinstance(result.get(key), Mapping) else value
    return result
