"""Which settings are the cluster's, which each machine's own, and how a machine that joins puts them together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from springtide.config import ClusterConfig, load_config
from springtide.errors import ConfigError

TOKEN_VARIABLE = "SPRINGTIDE_JOIN_TOKEN"
"""Takes the place of `--token`, which others see in the list of processes."""
DRAIN_S = 30.0
"""How long what runs on a machine has to end, unless that is told otherwise."""
_MACHINES_OWN = (
    "address",
    "conductor.record_dir",
    "decode",
    "decode_node.devices",
    "decode_node.threads",
    "device",
    "drain_s",
    "instances",
    "kv.rdma_devices",
    "log",
    "metrics_port",
    "observe",
    "prefill",
    "prefill_node.devices",
    "prefill_node.spread_stages",
    "prefill_node.threads",
    "profile",
    "ray",
    "redis_url",
    "run_dir",
    "server.grpc_port",
    "server.host",
    "server.port",
    "server.tls_certificate",
    "server.tls_client_ca",
    "server.tls_key",
    "tls",
    "valkey_port",
)
"""What a machine that joins is not told."""
_ONE_FOR_ALL = ("cluster", "dtype", "join_port", "kv.block_tokens", "max_context")
"""What must not differ between machines: block keys and what is in a slot come of it."""


def shared_settings(config: ClusterConfig) -> dict[str, Any]:
    """Those of the cluster that a machine which joins takes over, nested as in a file."""
    settings: dict[str, Any] = config.model_dump(mode="json", exclude_none=True)
    for dotted in _MACHINES_OWN:
        *parents, leaf = dotted.split(".")
        section = settings
        for parent in parents:
            section = section[parent]
        section.pop(leaf, None)
    return settings


def joined_config(shared: Mapping[str, Any], path: Path | None, overrides: Mapping[str, Any]) -> ClusterConfig:
    """The cluster's settings, and over them those of this machine: of a file, of the environment, of the command line. Raises ConfigError,
    also where one differs that must be the same for all."""
    cluster = load_config(environ={}, base=shared)
    environ = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    config = load_config(path, dict(overrides), environ, base={"drain_s": DRAIN_S, **shared})
    for dotted in _ONE_FOR_ALL:
        here, there = _value(config, dotted), _value(cluster, dotted)
        if here != there:
            raise ConfigError(f"{dotted}: it is {there!r} in the cluster, and cannot be {here!r} on one machine of it")
    return config


def _value(config: ClusterConfig, dotted: str) -> Any:
    value: Any = config
    for name in dotted.split("."):
        value = getattr(value, name)
    return value
