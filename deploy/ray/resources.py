"""What a node takes of a Ray cluster, and where it would best be. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from springtide.config import ClusterConfig, RayPoolConfig


class Pool(StrEnum):
    """Nodes of one kind, of which there are to be so many; how each joins the cluster."""

    INSTANCE = "instance"
    """They prefill and decode."""
    PREFILL = "prefill"
    DECODE = "decode"


def pool_config(config: ClusterConfig, pool: Pool) -> RayPoolConfig:
    return {Pool.INSTANCE: config.ray.instance, Pool.PREFILL: config.ray.prefill, Pool.DECODE: config.ray.decode}[pool]


def least_nodes(config: ClusterConfig, pool: Pool) -> int:
    return {Pool.INSTANCE: config.instances, Pool.PREFILL: config.prefill, Pool.DECODE: config.decode}[pool]


def num_engines(config: ClusterConfig, pool: Pool) -> int:
    """The processes of a node that run the model."""
    return (config.prefill_node if pool is Pool.PREFILL else config.decode_node).engines_of_node


def num_stages(config: ClusterConfig, pool: Pool) -> int:
    """How many nodes stand together for one: those of a prefill group's stages, where these are to be apart."""
    return config.prefill_node.stages if pool is Pool.PREFILL and config.prefill_node.spread_stages else 1


def bundle(config: ClusterConfig, pool: Pool, has_cards: bool) -> dict[str, float]:
    """The bundle of a node, or of a stage of a group whose stages are apart, which is on one Ray node: the processors and cards of its
    engine, and the memory of its store. `has_cards`: the Ray cluster has any."""
    room = pool_config(config, pool)
    on_cards = config.device == "cuda" or (config.device == "auto" and has_cards)
    gpus = room.gpus if room.gpus is not None else float(num_engines(config, pool) if on_cards else 0)
    wanted = {"CPU": float(room.cpus or 1), "GPU": gpus, "memory": float(config.kv.arena_size), **room.resources}
    return {name: amount for name, amount in wanted.items() if amount}


def own_settings(config: ClusterConfig, pool: Pool) -> dict[str, object]:
    """Those of a node's settings that the cluster does not tell whoever joins it, by dotted names."""
    settings: dict[str, object] = {"device": config.device, "log.level": config.log.level, "log.format": config.log.format}
    if config.tls.plaintext_allowed:
        settings["tls.plaintext_allowed"] = True
    if config.drain_s:
        settings["drain_s"] = config.drain_s
    cpus = pool_config(config, pool).cpus
    if cpus is not None:
        # Of both roles: a node may switch.
        for package, each in (("prefill_node", Pool.PREFILL), ("decode_node", Pool.DECODE)):
            settings[f"{package}.threads"] = max(1, cpus // num_engines(config, each))
    return settings


def fits(bundle: Mapping[str, float], total: Mapping[str, float]) -> bool:
    """Whether a Ray node that has nothing else could hold it."""
    return all(total.get(name, 0.0) >= amount for name, amount in bundle.items())


def cards_of(given: Sequence[str], booked: Iterable[str], used: Iterable[str]) -> tuple[str, ...]:
    """The cards of a new node whose agent was `given` some: a process that was found again has those that it had, whatever its agent was
    given. `booked`: of all agents on the Ray node, this one included; `used`: of the other agents' processes."""
    free = Counter(booked) - Counter(used)
    chosen = [*(card for card in given if free[card]), *(free - Counter(given)).elements()][: len(given)]
    return tuple(chosen if len(chosen) == len(given) else given)


def preferences(arrange: str, ray_nodes: Iterable[str], occupied: Iterable[str]) -> list[tuple[str, ...]]:
    """Where a further node of a pool would best be: groups of Ray nodes, the best first. The first is of one, so that several nodes that
    are placed at once have one each; the last is empty, which is anywhere. `occupied`: the Ray node of each that the pool has."""
    counts = Counter(dict.fromkeys(ray_nodes, 0))
    for each in occupied:
        if each in counts:
            counts[each] += 1
    groups = [
        tuple(sorted(each for each in counts if counts[each] == count)) for count in sorted(set(counts.values()), reverse=arrange == "pack")
    ]
    return [*([groups[0][:1]] if groups else []), *groups, ()]
