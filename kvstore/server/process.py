"""The store process of a node: `python -m kvstore`."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from typing import Literal

from kvstore.server.layer_store import LayerStore
from kvstore.server.shared.bundle import Bundle
from kvstore.server.shared.context import StoreOptions
from kvstore.server.shared.ssd import SsdOptions
from kvstore.server.store import Store
from kvstore.ssd.errors import SsdUnavailable
from messenger.base import Endpoint
from messenger.registry import choose_transports, transport_options_of
from springtide.capacity import arena_slots, check_memory, memory_bytes, quota_slots
from springtide.credentials import credentials_of
from springtide.errors import ConfigError, NoMemory, PeerLost
from springtide.ids import Incarnation, NodeId, new_incarnation
from springtide.membership import Member, Membership
from springtide.modelinfo import KVSpec
from springtide.process import ProcessArguments, end_process, stage_id
from springtide.protocol.layer_stores import JoinBundle
from springtide.stage_layers import layers_in_store
from springtide.supervision import first_of, persevere
from springtide.telemetry import serve_metrics

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5


async def serve(arguments: ProcessArguments, stop: asyncio.Event) -> None:
    """Runs the store until `stop`. Announces the node's store once a transfer to itself has worked. That of a node with a further stage of
    a prefill group ends, too, when the bundle that it was in has ended."""
    options, config = options_of(arguments), arguments.config
    membership = None
    if config.redis_url is not None:
        membership = Membership.of(config, options.credentials)
    try:
        if options.layers is None:
            await _serve_store(arguments, options, membership, None, new_incarnation(), stop)
        elif membership is None:
            raise ConfigError("redis_url: the stores of a prefill group over several nodes find each other there, and there is none")
        elif arguments.stage > 0:
            await _serve_layers(arguments, options, membership, stop)
        else:
            incarnation = new_incarnation()
            bundle = await first_of(_form_bundle(arguments, options, membership, incarnation), _told(stop))
            if bundle is not None:
                options = replace(options, num_slots=min(options.num_slots, bundle.num_slots))
                if options.ssd is not None and not bundle.has_ssd:
                    logger.warning("kv.ssd_dir: not all stores of the group have one, so that none of them keeps anything there")
                    options = replace(options, ssd=None)
                await _serve_store(arguments, options, membership, bundle, incarnation, stop)
    except NoMemory as error:
        if options.hugepages:
            raise ConfigError(f"kv.hugepages: {error.message}; reserve more of them, or make kv.arena_size smaller") from error
        raise ConfigError(f"kv.arena_size: {error.message}; make it smaller, or give the processes more memory") from error
    finally:
        if membership is not None:
            await membership.close()


async def _serve_store(
    arguments: ProcessArguments,
    options: StoreOptions,
    membership: Membership | None,
    bundle: Bundle | None,
    incarnation: Incarnation,
    stop: asyncio.Event,
) -> None:
    store = Store(options, bundle=bundle, incarnation=incarnation)
    try:
        try:
            endpoint = await store.start()
        except SsdUnavailable as error:
            raise ConfigError(f"kv.ssd_dir: {error}") from error
        if membership is not None:
            await membership.announce(_member("store", arguments, options, store.incarnation, store.address, endpoint))
        await first_of(store.run(), stop.wait())
    finally:
        if membership is not None:
            await membership.withdraw()
        await store.close()


async def _serve_layers(arguments: ProcessArguments, options: StoreOptions, membership: Membership, stop: asyncio.Event) -> None:
    store = LayerStore(options)
    try:
        try:
            endpoint = await store.start()
        except SsdUnavailable as error:
            raise ConfigError(f"kv.ssd_dir: {error}") from error
        await membership.announce(_member("layer-store", arguments, options, store.incarnation, store.address, endpoint))
        await first_of(store.run(), stop.wait())
    finally:
        await membership.withdraw()
        await store.close()


async def _form_bundle(arguments: ProcessArguments, options: StoreOptions, membership: Membership, incarnation: Incarnation) -> Bundle:
    """Returns once the layer stores of all further stages are there and have joined. When one is lost afterwards this process ends, at
    once: it says nothing more about transfers in which that had a part."""
    wanted = [stage_id(arguments.node_id, stage) for stage in range(1, arguments.config.prefill_node.stages)]
    join, own_layers = JoinBundle(options.node_id, incarnation), options.own_layers

    async def form() -> Bundle:
        present = {member.member_id: member.address for member in await membership.members() or () if member.role == "layer-store"}
        missing = [name for name in wanted if name not in present]
        if missing:
            raise PeerLost(f"{', '.join(missing)} not there yet")
        return await Bundle.form([present[name] for name in wanted], options.credentials, join, options.spec, own_layers, _end)

    return await persevere(form, "the stores of the group's other stages", _LOOK_EVERY_S, PeerLost, ValueError)


def _end(loss: PeerLost) -> None:
    logger.error("%s; this store's blocks are lost with it, and it begins anew", loss)
    end_process()


def _member(
    role: Literal["store", "layer-store"],
    arguments: ProcessArguments,
    options: StoreOptions,
    incarnation: Incarnation,
    address: str,
    endpoint: Endpoint,
) -> Member:
    return Member(
        role=role,
        member_id=arguments.node_id,
        incarnation=incarnation,
        address=address,
        node_id=arguments.node_id,
        metrics_address=serve_metrics(options.credentials, arguments.bind_host, arguments.metrics_port),
        pid=os.getpid(),
        details={"endpoint": endpoint.to_json()},
    )


async def _told(stop: asyncio.Event) -> None:
    """Waits for the order to stop."""
    await stop.wait()


def options_of(arguments: ProcessArguments) -> StoreOptions:
    """The options that the configuration comes to. Raises ConfigError when the arena has no room for blocks, the machine none for the
    arena, or not the transports that are named; and without a secret."""
    config = arguments.config
    check_memory(config.kv, 1, memory_bytes())
    transport_options = transport_options_of(config)
    transports, optional = choose_transports(config.kv.transports, transport_options)
    spec = arguments.model_info.kv_spec(config.dtype, config.kv.block_tokens)
    layers = layers_in_store(config.prefill_node, arguments.stage, spec.layers)
    own_spec = spec if layers is None else replace(spec, layers=len(layers))
    return StoreOptions(
        node_id=NodeId(arguments.node_id),
        spec=spec,
        layers=layers,
        num_slots=arena_slots(config.kv, own_spec),
        hugepages=config.kv.hugepages,
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
        tenant_quotas=quota_slots(config.kv, own_spec),
        ssd=ssd_options(arguments, spec, layers),
    )


def ssd_options(arguments: ProcessArguments, spec: KVSpec, layers: range | None = None) -> SsdOptions | None:
    """The options of the SSD tier, if there is one, for blocks of `spec`, or of these layers of them. Its directory is the node's own, so
    that stores of one machine can share `kv.ssd_dir`. Raises ConfigError."""
    kv, info = arguments.config.kv, arguments.model_info
    if kv.ssd_dir is None:
        return None
    bytes_per_slot = spec.bytes_per_slot if layers is None else len(layers) * spec.bytes_per_slab
    if kv.ssd_size < 2 * bytes_per_slot:
        raise ConfigError(
            f"kv.ssd_size: {kv.ssd_size} bytes have no room for blocks; one of {spec.block_tokens} tokens takes "
            f"{bytes_per_slot} bytes with this model"
        )
    if kv.demote_until < kv.demote_below:
        raise ConfigError(f"kv.demote_until: {kv.demote_until} is less than kv.demote_below, {kv.demote_below}")
    geometry = f"{spec.layers}x{spec.kv_heads}x{spec.head_dim}"
    if layers is not None:
        geometry += f"/layers {layers.start} to {layers.stop - 1}"
    return SsdOptions(
        directory=kv.ssd_dir / arguments.node_id,
        capacity_bytes=kv.ssd_size,
        fingerprint=f"{info.fingerprint}/{spec.dtype}/{spec.block_tokens}/{geometry}",
        demote_below=kv.demote_below,
        demote_until=kv.demote_until,
        flush_s=kv.ssd_flush_s,
    )
