"""The life of an engine process: load, warm up, connect to the node's store, announce, serve; and again after a loss of the store. An
order to switch its role ends that life, and begins another."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from grpc_health.v1 import health_pb2

from kvstore.link import StoreLink
from node_runtime.model_thread import ModelThread, default_threads
from node_runtime.role_switch import become, drained
from node_runtime.server import EngineServer
from springtide.clock import Clock, MonotonicClock
from springtide.credentials import credentials_of
from springtide.errors import ConfigError, NoMemory, PeerLost
from springtide.ids import Incarnation, InstanceId, new_incarnation
from springtide.membership import Member, Membership
from springtide.process import ProcessArguments
from springtide.protocol.instances import Role
from springtide.protocol.storage import EngineHello
from springtide.rpc import channels
from springtide.rpc.health import add_health
from springtide.supervision import first_of
from springtide.telemetry import serve_metrics

logger = logging.getLogger(__name__)

RETRY_S = 0.2
SAY_EVERY_S = 5.0
STOP_GRACE_S = 0.5


Engine: TypeAlias = EngineServer[Any, Any, Any, Any]
"""The server of an engine of either kind."""
Prepare: TypeAlias = Callable[[ModelThread], Coroutine[Any, Any, Engine]]
"""Loads, warms up and measures; returns an engine that is ready to run. Cancelled when the process is to stop before that."""


async def serve(
    arguments: ProcessArguments, names: Mapping[Role, InstanceId], threads: int | None, prepare: Prepare, stop: asyncio.Event
) -> None:
    """Runs an engine until `stop`, or an error of its core, which is raised. Does not return after an order to switch the role. `names`: by
    which the Conductor knows it, in each of its roles. `threads`: the configured number; None shares the machine's cores."""
    credentials = credentials_of(arguments.config)
    thread = ModelThread(threads or default_threads(arguments.config.num_engines))
    engine: Engine | None = None
    try:
        engine = await first_of(prepare(thread), _told(stop))
        if engine is None:
            return
        clock = MonotonicClock()
        server = channels.new_server(credentials)
        engine.register(server)
        ready = add_health(server)
        address = channels.listen(server, f"{arguments.bind_host}:0", credentials)
        await server.start()
        kernels = engine.runner.model.backend.kernels
        metrics_address = serve_metrics(credentials, arguments.bind_host, arguments.metrics_port)
        member = _Announcement(arguments, names, kernels, address, metrics_address, ready)
        attached = asyncio.create_task(_stay_connected(arguments, engine, member), name="attached to the store")
        try:
            await first_of(
                engine.run(),
                asyncio.shield(attached),
                _leave(engine, member, clock),
                _drain_when_told(stop, arguments.config.drain_s, engine, member, clock),
            )
        finally:
            # Gateways hear of the end before the store does, and with that whoever these attempts are handed over to.
            await member.end()
            await server.stop(STOP_GRACE_S)
            attached.cancel()
            await asyncio.wait({attached})
    finally:
        if engine is not None:
            await engine.close()
        await thread.close()
    if engine.pending_switch.order is not None and not stop.is_set():
        become(engine.pending_switch.order.to)


async def _told(stop: asyncio.Event) -> None:
    """Waits for the order to stop."""
    await stop.wait()


@dataclass(slots=True)
class _Announcement:
    """Makes the instance known while it can take requests."""

    arguments: ProcessArguments
    names: Mapping[Role, InstanceId]
    kernels: str
    """What the model is computed with, as of engine.backends.base.Backend."""
    address: str
    metrics_address: str
    health: Any
    """grpc_health's servicer, whose type has no stubs."""
    memberships: list[Membership] = field(default_factory=list)
    over: bool = False
    """It is not to be made known any more."""

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
        for role, name in self.names.items():
            membership = Membership.of(config, credentials_of(config))
            self.memberships.append(membership)
            await membership.announce(
                Member(
                    role="prefill" if role is Role.PREFILL else "decode",
                    member_id=name,
                    incarnation=incarnation,
                    address=self.address,
                    node_id=arguments.node_id,
                    metrics_address=self.metrics_address,
                    pid=os.getpid(),
                    details=details,
                )
            )

    async def end(self) -> None:
        """Withdraws it for good."""
        self.over = True
        await self.withdraw()

    async def withdraw(self) -> None:
        await self.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        while self.memberships:
            await self.memberships.pop().close()


async def _leave(engine: Engine, announcement: _Announcement, clock: Clock) -> None:
    """Waits for an order to switch the role; returns when nothing is left to do here, or no time for it."""
    order = await engine.pending_switch.ordered()
    logger.info("is to become a %s engine: takes no more work, and ends what it has within %.1f s", order.to, order.drain_s)
    await _drain(engine, announcement, order.drain_s, clock)


async def _drain_when_told(stop: asyncio.Event, drain_s: float, engine: Engine, announcement: _Announcement, clock: Clock) -> None:
    """Waits for the order to stop; returns when nothing is left to do here, or no time for it."""
    await _told(stop)
    if drain_s > 0:
        logger.info("is to stop: takes no more work, and ends what it has within %.1f s", drain_s)
        engine.leave()
        await _drain(engine, announcement, drain_s, clock)


async def _drain(engine: Engine, announcement: _Announcement, drain_s: float, clock: Clock) -> None:
    await announcement.end()
    if not await drained(lambda: engine.has_work, drain_s, clock):
        logger.warning("has not ended all its work: gateways will schedule it anew")


async def _stay_connected(arguments: ProcessArguments, engine: Engine, announcement: _Announcement) -> None:
    """Connects to the node's store, takes requests as long as it is there, and begins anew when it is lost."""
    while True:
        incarnation = new_incarnation()
        lost: asyncio.Future[PeerLost] = asyncio.get_running_loop().create_future()
        link = await _connect(arguments, engine, incarnation, lost)
        try:
            await first_of(engine.attach(link, incarnation), asyncio.shield(lost))
            if not lost.done():
                await announcement.announce(link, incarnation)
                logger.info("ready on %s, %d slots", announcement.address, link.num_slots)
            error = lost.result() if lost.done() else await first_of(lost, engine.broken())
            logger.warning("%s; connecting again", error)
            engine.detach(error)
        finally:
            await announcement.withdraw()
            await link.close(engine.at_rest)


async def _connect(arguments: ProcessArguments, engine: Engine, incarnation: Incarnation, lost: asyncio.Future[PeerLost]) -> StoreLink:
    """Tries until there is a store. `lost` is set when it goes. Raises ConfigError when its arena has no room in this process."""

    def on_lost(error: PeerLost) -> None:
        if not lost.done():
            lost.set_result(error)

    hello = EngineHello(InstanceId(arguments.instance_id), incarnation)
    said_at = float("-inf")
    while True:
        try:
            return await StoreLink.connect(arguments.store_socket, arguments.arena_socket, hello, engine.on_notice, on_lost)
        except PeerLost as error:
            if time.monotonic() - said_at >= SAY_EVERY_S:
                logger.info("waiting for the store: %s", error)
                said_at = time.monotonic()
            await asyncio.sleep(RETRY_S)
        except NoMemory as error:
            raise ConfigError(f"kv.arena_size: {error.message}; make it smaller, or give the processes more memory") from error
