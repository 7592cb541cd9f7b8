"""The life of an engine process: load, warm up, connect to the node's store, announce, serve; and again after a loss of the store. An
order to switch its role ends that life, and begins another."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from grpc_health.v1 import health_pb2

from engine.base import SequenceChunk
from engine.loader import load_model
from engine.runner import ModelRunner
from kvstore.link import StoreLink
from node_runtime.costs import cost_model
from node_runtime.departure import Role, become, drained
from node_runtime.model_thread import ModelThread, default_threads
from node_runtime.node import EngineNode
from springtide.blocks import blocks_for
from springtide.clock import Clock, MonotonicClock
from springtide.cost import DecodeCost, PrefillCost
from springtide.errors import PeerLost
from springtide.ids import new_incarnation
from springtide.membership import Member, Membership
from springtide.process import ProcessArguments
from springtide.rpc import channels, store_pb2
from springtide.rpc.health import add_health
from springtide.telemetry import serve_metrics

CostT = TypeVar("CostT", PrefillCost, DecodeCost)

logger = logging.getLogger(__name__)

SCRATCH_TOKENS = 2560
"""The arena in which the model is warmed up and measured holds so many."""
RETRY_S = 0.2
SAY_EVERY_S = 5.0
STOP_GRACE_S = 0.5


@dataclass(frozen=True, slots=True)
class Parts:
    """What a server is made of, ready to run."""

    arguments: ProcessArguments
    runner: ModelRunner
    thread: ModelThread
    clock: Clock


@dataclass(frozen=True, slots=True)
class Kind(Generic[CostT]):
    """A kind of engine. `threads`: the configured number; None shares the machine's cores."""

    role: Role
    threads: int | None
    cost: type[CostT]
    measure: Callable[[ModelRunner, Sequence[int]], CostT]
    """In scratch slots."""
    build: Callable[[Parts, CostT], EngineNode[Any, Any, Any]]


async def serve(arguments: ProcessArguments, kind: Kind[CostT], stop: asyncio.Event) -> None:
    """Until `stop`, or an error of the core, which is raised. Does not return after an order to switch the role."""
    config = arguments.config
    thread = ModelThread(kind.threads or default_threads(config.prefill + config.decode))
    try:
        runner = await thread.run(_load, arguments)
        if stop.is_set():
            return
        cost = await thread.run(_cost_of, arguments, kind, runner)
        clock = MonotonicClock()
        node = kind.build(Parts(arguments, runner, thread, clock), cost)
        server = channels.new_server()
        node.register(server)
        ready = add_health(server)
        port = server.add_insecure_port(f"{arguments.bind_host}:0")
        await server.start()
        address = f"{arguments.bind_host}:{port}"
        member = _Announcement(arguments, kind.role, address, serve_metrics(arguments.bind_host), ready)
        try:
            await _first_of(stop, node.run(), _stay_connected(arguments, node, member), _depart(node, member, clock))
        finally:
            await server.stop(STOP_GRACE_S)
    finally:
        await thread.close()
    if node.departure.order is not None and not stop.is_set():
        become(node.departure.order.role)


def _load(arguments: ProcessArguments) -> ModelRunner:
    """The model over memory of its own, until there is a store's arena to compute in."""
    started = time.perf_counter()
    info, config = arguments.model_info, arguments.config
    spec = info.kv_spec(config.dtype, config.kv.block_tokens)
    num_slots = blocks_for(SCRATCH_TOKENS, spec.block_tokens)
    runner = ModelRunner(load_model(info, config.dtype), spec, np.zeros(num_slots * spec.bytes_per_slot, np.uint8), num_slots)
    logger.info("loaded %s in %.1f s", info.name, time.perf_counter() - started)
    return runner


def _cost_of(arguments: ProcessArguments, kind: Kind[CostT], runner: ModelRunner) -> CostT:
    """Warms the model up, too."""
    started = time.perf_counter()
    scratch = range(runner.num_slots)
    runner.forward([SequenceChunk([0], 0, scratch)])
    cost = cost_model(kind.cost, kind.role, arguments.config.profile, lambda: kind.measure(runner, scratch))
    logger.info("%s in %.1f s", cost, time.perf_counter() - started)
    return cost


async def _first_of(stop: asyncio.Event, *work: Any) -> None:
    """Runs everything until `stop` is set or one of them ends, whose error is raised; then cancels the rest."""
    tasks = [asyncio.ensure_future(one) for one in (stop.wait(), *work)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class _Announcement:
    """Makes the instance known while it can take requests."""

    arguments: ProcessArguments
    role: Role
    address: str
    metrics_address: str
    health: Any
    """grpc_health's servicer, whose type has no stubs."""
    membership: Membership | None = None
    over: bool = False
    """Never again."""

    async def announce(self, link: StoreLink, incarnation: int) -> None:
        arguments, config, info = self.arguments, self.arguments.config, self.arguments.model_info
        if self.over:
            return
        await self.health.set("", health_pb2.HealthCheckResponse.SERVING)
        if config.redis_url is None:
            return
        spec = info.kv_spec(config.dtype, config.kv.block_tokens)
        details = {
            "store_address": link.address,
            "fingerprint": info.fingerprint,
            "model": info.name,
            "context_length": str(info.context_length),
            "block_tokens": str(spec.block_tokens),
            "dtype": spec.dtype,
            "bytes_per_token": str(spec.bytes_per_token),
        }
        self.membership = Membership(config.redis_url, config.cluster, config.conductor.lease_s)
        await self.membership.announce(
            Member(
                role=self.role,
                member_id=arguments.instance_id,
                incarnation=incarnation,
                address=self.address,
                node_id=arguments.node_id,
                metrics_address=self.metrics_address,
                pid=os.getpid(),
                details=details,
            )
        )

    async def withdraw(self) -> None:
        await self.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        if self.membership is not None:
            await self.membership.close()
            self.membership = None


async def _depart(node: EngineNode[Any, Any, Any], announcement: _Announcement, clock: Clock) -> None:
    """Waits for an order to switch the role; returns when nothing is left to do here, or no time for it."""
    order = await node.departure.ordered()
    logger.info("is to become a %s engine: takes no more work, and ends what it has within %.1f s", order.role, order.drain_s)
    announcement.over = True
    await announcement.withdraw()
    if not await drained(lambda: node.has_work, order.drain_s, clock):
        logger.warning("has not ended all its work: gateways will schedule it anew")


async def _stay_connected(arguments: ProcessArguments, node: EngineNode[Any, Any, Any], announcement: _Announcement) -> None:
    """Connects to the node's store, takes requests as long as it is there, and begins anew when it is lost."""
    while True:
        incarnation = new_incarnation()
        lost: asyncio.Future[PeerLost] = asyncio.get_running_loop().create_future()
        link = await _connect(arguments, node, incarnation, lost)
        try:
            await node.attach(link, incarnation)
            await announcement.announce(link, incarnation)
            logger.info("ready on %s, %d slots", announcement.address, link.num_slots)
            error = await lost
            logger.warning("%s; connecting again", error)
            node.detach(error)
        finally:
            await announcement.withdraw()
            await link.close(node.thread.at_rest)


async def _connect(
    arguments: ProcessArguments, node: EngineNode[Any, Any, Any], incarnation: int, lost: asyncio.Future[PeerLost]
) -> StoreLink:
    """Tries until there is a store. `lost` is set when it goes."""

    def on_lost(error: PeerLost) -> None:
        if not lost.done():
            lost.set_result(error)

    hello = store_pb2.EngineHello(instance_id=arguments.instance_id, incarnation=incarnation)
    said_at = float("-inf")
    while True:
        try:
            return await StoreLink.connect(arguments.store_socket, arguments.arena_socket, hello, node.on_notice, on_lost)
        except PeerLost as error:
            if time.monotonic() - said_at >= SAY_EVERY_S:
                logger.info("waiting for the store: %s", error)
                said_at = time.monotonic()
            await asyncio.sleep(RETRY_S)
