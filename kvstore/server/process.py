"""The store process of a node: `python -m kvstore`."""

from __future__ import annotations

import asyncio
import logging
import os

from kvstore.server.shared.context import StoreOptions
from kvstore.server.shared.ssd import SsdOptions
from kvstore.server.store import Store
from kvstore.ssd.errors import SsdUnavailable
from messenger.registry import choose_transports, transport_options_of
from springtide.capacity import arena_slots, check_memory, memory_bytes, quota_slots
from springtide.credentials import credentials_of
from springtide.errors import ConfigError, NoMemory
from springtide.ids import NodeId
from springtide.membership import Member, Membership
from springtide.modelinfo import KVSpec
from springtide.process import ProcessArguments
from springtide.supervision import first_of
from springtide.telemetry import serve_metrics

logger = logging.getLogger(__name__)


async def serve(arguments: ProcessArguments, stop: asyncio.Event) -> None:
    """Runs the store until `stop`. Announces the node's store once a transfer to itself has worked."""
    try:
        store = Store(options_of(arguments))
    except NoMemory as error:
        raise ConfigError(f"kv.arena_size: {error.message}; make it smaller, or give the processes more memory") from error
    membership: Membership | None = None
    try:
        try:
            endpoint = await store.start()
        except SsdUnavailable as error:
            raise ConfigError(f"kv.ssd_dir: {error}") from error
        config = arguments.config
        if config.redis_url is not None:
            membership = Membership(config.redis_url, config.cluster, config.conductor.lease_s, credentials_of(config))
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
        await first_of(store.run(), stop.wait())
    finally:
        if membership is not None:
            await membership.close()
        await store.close()


def options_of(arguments: ProcessArguments) -> StoreOptions:
    """The options that the configuration comes to. Raises ConfigError when the arena has no room for blocks, the machine none for the
    arena, or not the transports that are named; and without a secret."""
    config = arguments.config
    check_memory(config.kv, 1, memory_bytes())
    transport_options = transport_options_of(config)
    transports, optional = choose_transports(config.kv.transports, transport_options)
    spec = arguments.model_info.kv_spec(config.dtype, config.kv.block_tokens)
    return StoreOptions(
        node_id=NodeId(arguments.node_id),
        spec=spec,
        num_slots=arena_slots(config.kv, spec),
        bind_host=arguments.bind_host,
        store_socket=arguments.store_socket,
        arena_socket=arguments.arena_socket,
        transports=transports,
        optional_transports=optional,
        transport_options=transport_options,
        credentials=credentials_of(config),
        eviction=config.kv.eviction,
        lease_s=config.kv.lease_s,
        layer_group_bytes=config.kv.layer_group_size,
        replication_bytes_per_s=config.kv.replication_rate,
        hard_pin_share=config.kv.hard_pin_share,
        tenant_quotas=quota_slots(config.kv, spec),
        ssd=ssd_options(arguments, spec),
    )


def ssd_options(arguments: ProcessArguments, spec: KVSpec) -> SsdOptions | None:
    """The options of the SSD tier, if there is one. Its directory is the node's own, so that stores of one machine can share `kv.ssd_dir`.
    Raises ConfigError."""
    kv, info = arguments.config.kv, arguments.model_info
    if kv.ssd_dir is None:
        return None
    if kv.ssd_size < 2 * spec.bytes_per_slot:
        raise ConfigError(
            f"kv.ssd_size: {kv.ssd_size} bytes have no room for blocks; one of {spec.block_tokens} tokens takes "
            f"{spec.bytes_per_slot} bytes with this model"
        )
    if kv.demote_until < kv.demote_below:
        raise ConfigError(f"kv.demote_until: {kv.demote_until} is less than kv.demote_below, {kv.demote_below}")
    geometry = f"{spec.layers}x{spec.kv_heads}x{spec.head_dim}"
    return SsdOptions(
        directory=kv.ssd_dir / arguments.node_id,
        capacity_bytes=kv.ssd_size,
        fingerprint=f"{info.fingerprint}/{spec.dtype}/{spec.block_tokens}/{geometry}",
        demote_below=kv.demote_below,
        demote_until=kv.demote_until,
        flush_s=kv.ssd_flush_s,
    )
