"""What follows for a cluster's head from its nodes being on Ray."""

from __future__ import annotations

import importlib.util

from deploy.ray.resources import Pool, least_nodes, pool_config
from springtide.config import ClusterConfig, is_loopback
from springtide.errors import ConfigError

LOCAL = "local"
"""The address that stands for a Ray of this machine alone."""


def on_ray(config: ClusterConfig) -> ClusterConfig:
    """The configuration with an address at which nodes elsewhere reach this machine, and a port where they join. Raises ConfigError."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("ray.address: Ray is not installed here; `pip install 'springtide[ray]'`")
    if str(config.ray.address).startswith("ray://"):
        raise ConfigError(f"ray.address: {config.ray.address} is for Ray's clients; run this on a machine of the Ray cluster, with `auto`")
    if not config.serves_alone:
        raise ConfigError("prefill and decode: with ray.address there are instances, or one node of each role at least")
    for pool, setting in ((Pool.INSTANCE, "instances"), (Pool.PREFILL, "prefill"), (Pool.DECODE, "decode")):
        most, least = pool_config(config, pool).most, least_nodes(config, pool)
        if most is not None and most < least:
            raise ConfigError(f"ray.{pool}.most: it is {most}, fewer than the {least} that `{setting}` says there are at least")
        if most is not None and not least:
            raise ConfigError(f"ray.{pool}.most: a pool of which `{setting}` is 0 has no nodes, and gets none")
        if most is not None and config.instances and pool is not Pool.INSTANCE:
            raise ConfigError(f"ray.{pool}.most: where there are instances their number follows the work, not that of `{setting}` nodes")
    if config.ray.address == LOCAL and config.prefill_node.spread_stages:
        raise ConfigError("prefill_node.spread_stages: a Ray of this machine alone has one node, and each stage is to be on another")
    if config.ray.address == LOCAL:
        return config if config.join_port is not None else config.model_copy(update={"join_port": 0})
    if is_loopback(config.address):
        import ray

        return config.model_copy(update={"address": ray.util.get_node_ip_address()})
    return config
