"""The store process of a node: `python -m kvstore`."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import psutil

from kvstore.server.node import StoreOptions
from kvstore.server.store import Store
from springtide.config import KVConfig
from springtide.errors import ConfigError
from springtide.ids import NodeId
from springtide.kvspec import KVSpec
from springtide.membership import Member, Membership
from springtide.process import ProcessArguments
from springtide.telemetry import serve_metrics

logger = logging.getLogger(__name__)

MIN_SLOTS = 2
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


async def serve(arguments: ProcessArguments, stop: asyncio.Event) -> None:
    """Until `stop`. Announces the node's store once a transfer to itself has worked."""
    store = Store(options_of(arguments))
    membership: Membership | None = None
    try:
        endpoint = await store.start()
        config = arguments.config
        if config.redis_url is not None:
            membership = Membership(config.redis_url, config.cluster, config.conductor.lease_s)
            member = Member(
                role="store",
                member_id=arguments.node_id,
                incarnation=store.incarnation,
                address=store.address,
                node_id=arguments.node_id,
                metrics_address=serve_metrics(arguments.bind_host),
                pid=os.getpid(),
                details={"endpoint": endpoint.to_json()},
            )
            await membership.announce(member)
        await stop.wait()
    finally:
        if membership is not None:
            await membership.close()
        await store.close()


def options_of(arguments: ProcessArguments) -> StoreOptions:
    """Raises ConfigError when the arena has no room for blocks, or the machine none for the arena."""
    config = arguments.config
    spec = arguments.model_info.kv_spec(config.dtype, config.kv.block_tokens)
    return StoreOptions(
        node_id=NodeId(arguments.node_id),
        spec=spec,
        num_slots=arena_slots(config.kv, spec, memory_bytes()),
        bind_host=arguments.bind_host,
        store_socket=arguments.store_socket,
        arena_socket=arguments.arena_socket,
        transports=config.kv.transports,
        lease_s=config.kv.lease_s,
        layer_group_bytes=config.kv.layer_group_size,
    )


def arena_slots(kv: KVConfig, spec: KVSpec, machine_bytes: int) -> int:
    """Raises ConfigError."""
    if kv.arena_size > machine_bytes:
        raise ConfigError(
            f"kv.arena_size: {kv.arena_size} bytes is more than this machine's memory, {machine_bytes} bytes, which all its nodes share"
        )
    slots = kv.arena_size // spec.bytes_per_slot
    if slots < MIN_SLOTS:
        raise ConfigError(
            f"kv.arena_size: {kv.arena_size} bytes has room for {slots} blocks; a block of {spec.block_tokens} tokens takes "
            f"{spec.bytes_per_slot} bytes with this model, and it must be room for at least {MIN_SLOTS}"
        )
    return slots


def memory_bytes() -> int:
    """Of the machine, or of the container where that has less."""
    limits = [int(text) for path in _CGROUP_LIMITS if path.exists() and (text := path.read_text().strip()).isdigit()]
    return min([psutil.virtual_memory().total, *limits])
