"""The life of an engine process: load, warm up, connect to the node's store, announce, serve; and again after a loss of the store. An
order to switch its role ends that life, and begins another."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from grpc_health.v1 import health_pb2

from engine.batch import SequenceChunk
from engine.loader import load_model
from engine.runner import ModelRunner
from engine.tensor_parallel.runner import Parallel, TensorParallelRunner
from kvstore.link import StoreLink
from node_runtime.costs import cost_model
from node_runtime.devices import devices_of
from node_runtime.model_thread import ModelThread, default_threads
from node_runtime.node import EngineNode
from node_runtime.role_switch import become, drained
from springtide.blocks import blocks_for
from springtide.clock import Clock, MonotonicClock
from springtide.cost import DecodeCost, PrefillCost
from springtide.credentials import credentials_of
from springtide.errors import ConfigError, NoMemory, PeerLost
from springtide.ids import Incarnation, InstanceId, new_incarnation
from springtide.membership import Member, Membership
from springtide.process import ProcessArguments, end_process
from springtide.protocol.instances import Role
from springtide.protocol.storage import EngineHello
from springtide.rpc import channels
from springtide.rpc.health import add_health
from springtide.supervision import first_of
from springtide.telemetry import serve_metrics

CostT = TypeVar("CostT", PrefillCost, DecodeCost)
Prepare: TypeAlias = "Callable[[ModelThread], Coroutine[Any, Any, EngineNode[Any, Any, Any]]]"
"""Loads, warms up and measures; returns a server that is ready to run. Cancelled when the process is to stop before that."""

logger = logging.getLogger(__name__)

SCRATCH_TOKENS = 2560
"""The arena in which the model is warmed up and measured holds so many."""
RETRY_S = 0.2
SAY_EVERY_S = 5.0
STOP_GRACE_S = 0.5
RANK_GRACE_S = 60.0
"""For one rank to wait for another, beside what a pass may wait for."""


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
    """Serves an engine that has the whole model to itself; as `serve_node`."""

    async def prepare(thread: ModelThread) -> EngineNode[Any, Any, Any]:
        runner = await thread.run(load_runner, arguments, kind.role)
        cost = await thread.run(_cost_of, arguments, kind, runner)
        return kind.build(Parts(arguments, runner, thread, MonotonicClock()), cost)

    await serve_node(arguments, kind.role, kind.threads, prepare, stop)


async def serve_node(arguments: ProcessArguments, role: Role, threads: int | None, prepare: Prepare, stop: asyncio.Event) -> None:
    """Until `stop`, or an error of the core, which is raised. Does not return after an order to switch the role. `threads`: as in Kind."""
    credentials = credentials_of(arguments.config)
    thread = ModelThread(threads or default_threads(arguments.config.num_engines))
    node: EngineNode[Any, Any, Any] | None = None
    try:
        node = await first_of(prepare(thread), _told(stop))
        if node is None:
            return
        clock = MonotonicClock()
        server = channels.new_server(credentials)
        node.register(server)
        ready = add_health(server)
        port = server.add_insecure_port(f"{arguments.bind_host}:0")
        await server.start()
        address = f"{arguments.bind_host}:{port}"
        kernels = node.runner.model.backend.kernels
        member = _Announcement(arguments, role, kernels, address, serve_metrics(arguments.bind_host), ready)
        try:
            await first_of(node.run(), _stay_connected(arguments, node, member), _leave(node, member, clock), _told(stop))
        finally:
            await server.stop(STOP_GRACE_S)
    finally:
        if node is not None:
            await node.close()
        await thread.close()
    if node.pending_switch.order is not None and not stop.is_set():
        become(node.pending_switch.order.to)


def load_runner(arguments: ProcessArguments, role: Role, layers: tuple[int, int] | None = None) -> ModelRunner:
    """The model, or its layers [begin, end), over memory of its own, until there is a store's arena to compute in. On the model's thread:
    further ranks have as many threads as this one."""
    started = time.perf_counter()
    info, config = arguments.model_info, arguments.config
    spec = info.kv_spec(config.dtype, config.kv.block_tokens)
    num_slots = blocks_for(SCRATCH_TOKENS, spec.block_tokens)
    scratch = np.zeros(num_slots * spec.bytes_per_slot, np.uint8)
    devices = devices_of(arguments, role)
    if len(devices) == 1:
        model = load_model(info, config.dtype, layers, config.kernels, device=devices[0])
        runner = ModelRunner(model, spec, scratch, num_slots)
    else:
        # A pass may wait for a prefix as long as a lease lasts.
        timeout_s, meeting = config.kv.lease_s + RANK_GRACE_S, arguments.run_dir / f"{arguments.instance_id}.ranks"
        parallel = Parallel(devices, torch.get_num_threads(), timeout_s, meeting, on_lost=end_process)
        runner = TensorParallelRunner.start(info, config.dtype, spec, scratch, num_slots, parallel, layers, config.kernels)
    which = "" if layers is None else f"layers {layers[0]} to {layers[1] - 1} of "
    place = ", ".join(str(device.torch_device) if device is not None else "CPU" for device in devices)
    kernels = runner.model.backend.kernels
    logger.info("loaded %s%s in %.1f s: %s, kernels: %s", which, info.name, time.perf_counter() - started, place, kernels)
    return runner


def _cost_of(arguments: ProcessArguments, kind: Kind[CostT], runner: ModelRunner) -> CostT:
    """Warms the model up, too: a step and a chunk of a prompt, whose kernels may be others, and may be compiled only when they are used."""
    started = time.perf_counter()
    scratch = range(runner.num_slots)
    for chunk in ([0], [0, 0]):
        runner.forward([SequenceChunk(chunk, 0, scratch)])
    cost = cost_model(kind.cost, kind.role, arguments.config.profile, lambda: kind.measure(runner, scratch))
    logger.info("%s in %.1f s", cost, time.perf_counter() - started)
    return cost


async def _told(stop: asyncio.Event) -> None:
    """Waits for the order to stop."""
    await stop.wait()


@dataclass(slots=True)
class _Announcement:
    """Makes the instance known while it can take requests."""

    arguments: ProcessArguments
    role: Role
    kernels: str
    """As of engine.backends.base.Backend."""
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
            "kernels": self.kernels,
        }
        self.membership = Membership(config.redis_url, config.cluster, config.conductor.lease_s, credentials_of(config))
        await self.membership.announce(
            Member(
                role="prefill" if self.role is Role.PREFILL else "decode",
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


async def _leave(node: EngineNode[Any, Any, Any], announcement: _Announcement, clock: Clock) -> None:
    """Waits for an order to switch the role; returns when nothing is left to do here, or no time for it."""
    order = await node.pending_switch.ordered()
    logger.info("is to become a %s engine: takes no more work, and ends what it has within %.1f s", order.to, order.drain_s)
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
            await first_of(node.attach(link, incarnation), asyncio.shield(lost))
            if not lost.done():
                await announcement.announce(link, incarnation)
                logger.info("ready on %s, %d slots", announcement.address, link.num_slots)
            error = lost.result() if lost.done() else await first_of(lost, node.broken())
            logger.warning("%s; connecting again", error)
            node.detach(error)
        finally:
            await announcement.withdraw()
            await link.close(node.at_rest)


async def _connect(
    arguments: ProcessArguments, node: EngineNode[Any, Any, Any], incarnation: Incarnation, lost: asyncio.Future[PeerLost]
) -> StoreLink:
    """Tries until there is a store. `lost` is set when it goes. Raises ConfigError when its arena has no room in this process."""

    def on_lost(error: PeerLost) -> None:
        if not lost.done():
            lost.set_result(error)

    hello = EngineHello(InstanceId(arguments.instance_id), incarnation)
    said_at = float("-inf")
    while True:
        try:
            return await StoreLink.connect(arguments.store_socket, arguments.arena_socket, hello, node.on_notice, on_lost)
        except PeerLost as error:
            if time.monotonic() - said_at >= SAY_EVERY_S:
                logger.info("waiting for the store: %s", error)
                said_at = time.monotonic()
            await asyncio.sleep(RETRY_S)
        except NoMemory as error:
            raise ConfigError(f"kv.arena_size: {error.message}; make it smaller, or give the processes more memory") from error
