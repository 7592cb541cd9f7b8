"""What follows for a cluster's head from its nodes being on Ray."""

from __future__ import annotations

import importlib.util

from deploy.ray.resources import pool_config
from springtide.config import ClusterConfig, is_loopback
from springtide.errors import ConfigError
from springtide.protocol.instances import Role

LOCAL = "local"
"""The address that stands for a Ray of this machine alone."""


def on_ray(config: ClusterConfig) -> ClusterConfig:
    """The configuration with an address at which nodes elsewhere reach this machine, and a port where they join. Raises ConfigError."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("ray.address: Ray is not installed here; `pip install 'springtide[ray]'`")
    if str(config.ray.address).startswith("ray://"):
        raise ConfigError(f"ray.address: {config.ray.address} is for Ray's clients; run this on a machine of the Ray cluster, with `auto`")
    if config.instances:
        raise ConfigError("instances: Ray places prefill and decode nodes alone; leave it out, or ray.address")
    for role, least in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
        most = pool_config(config, role).most
        if not least:
            raise ConfigError(f"{role}: with ray.address there is one node of each role at least, not 0")
        if most is not None and most < least:
            raise ConfigError(f"ray.{role}.most: it is {most}, fewer than the {least} that `{role}` says there are at least")
    if config.ray.address == LOCAL and config.prefill_node.spread_stages:
        raise ConfigError("prefill_node.spread_stages: a Ray of this machine alone has one node, and each stage is to be on another")
    if config.ray.address == LOCAL:
        return config if config.join_port is not None else config.model_copy(update={"join_port": 0})
    if is_loopback(config.address):
        import ray

        return config.model_copy(update={"address": ray.util.get_node_ip_address()})
    return config
