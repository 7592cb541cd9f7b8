"""The Conductor without a gateway: gRPC service, membership, watchers and ticks."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from conductor import metrics
from conductor.core.conductor import ConductorCore
from conductor.core.recording import Recorder
from conductor.core.settings import ConductorSettings
from conductor.core.types.events import TickPart
from conductor.server.gc_tuning import GcTuner
from conductor.server.grpc_service import ConductorService
from conductor.server.leadership import Leadership, LeaseClock, OneOfSeveral, OnlyConductor
from conductor.server.observer import ObserverService, sample_loads
from conductor.server.orders import Orders
from conductor.server.record_file import RecordFile
from conductor.server.runner import CoreRunner
from conductor.server.watch import ClusterFollower
from springtide.clock import Clock, MonotonicClock
from springtide.credentials import credentials_of
from springtide.errors import ConfigError
from springtide.ids import new_incarnation
from springtide.leader_lease import LeaderLease
from springtide.membership import Member, Membership
from springtide.process import ProcessArguments
from springtide.rpc import conductor_pb2, conductor_pb2_grpc, observation_pb2, observation_pb2_grpc
from springtide.rpc.channels import listen, new_server
from springtide.rpc.health import add_health_and_reflection
from springtide.telemetry import serve_metrics

logger = logging.getLogger(__name__)

_TICK_S = 1.0
_TICKS_A_SAMPLE = 5
_GRACE_S = 0.5
_SERVICE = conductor_pb2.DESCRIPTOR.services_by_name["Conductor"].full_name
_OBSERVER = observation_pb2.DESCRIPTOR.services_by_name["Observer"].full_name


class ConductorServer:
    def __init__(self, arguments: ProcessArguments, clock: Clock | None = None) -> None:
        config, model_info = arguments.config, arguments.model_info
        if config.redis_url is None:
            raise ConfigError("redis_url is not set: the Conductor finds the cluster's members in Valkey")
        self._arguments = arguments
        self._redis_url = config.redis_url
        self._incarnation = new_incarnation()
        settings = ConductorSettings.of(config, model_info)
        self._record: RecordFile | None = None
        if config.conductor.record_dir is not None:
            # A file of this life of the Conductor.
            self._record = RecordFile.create(config.conductor.record_dir, f"{arguments.instance_id}-{self._incarnation:016x}")
        recorder = Recorder(settings, self._record.write) if self._record is not None else None
        self._runner = CoreRunner(ConductorCore(settings), clock or MonotonicClock(), recorder)
        self._lease_clock = clock or LeaseClock()
        self._leadership: Leadership | None = None
        self._orders: Orders | None = None
        self._credentials = credentials_of(config)
        self._membership = Membership.of(config, self._credentials)
        self.follower = ClusterFollower(
            self._membership, self._runner, config.conductor.lease_s, config.silence_s, model_info.fingerprint, self._credentials
        )
        self._grpc = new_server(self._credentials)
        self._service: ConductorService | None = None

    async def start(self) -> str:
        """Serves and announces itself; returns its gRPC host:port."""
        host = self._arguments.bind_host
        name = self._arguments.config.served_model_name or self._arguments.model_info.name
        address = listen(self._grpc, f"{host}:0", self._credentials)
        self._leadership = self._stand(address)
        self._orders = Orders(self._runner, self._leadership, self._credentials)
        log_decisions_every = self._arguments.config.log.decisions_every
        service = self._service = ConductorService(self._runner, self._leadership, name, self._credentials, log_decisions_every)
        await service.listen(host)
        conductor_pb2_grpc.add_ConductorServicer_to_server(service, self._grpc)
        observer = ObserverService(self._runner, self._leadership, name, self._incarnation)
        observation_pb2_grpc.add_ObserverServicer_to_server(observer, self._grpc)
        await add_health_and_reflection(self._grpc, _SERVICE, _OBSERVER)
        await self._grpc.start()
        await self._membership.announce(
            Member(
                role="conductor",
                member_id=self._arguments.instance_id,
                incarnation=self._incarnation,
                address=address,
                metrics_address=serve_metrics(self._credentials, host, self._arguments.metrics_port),
                pid=os.getpid(),
            )
        )
        logger.info("conductor %s serves at %s", self._arguments.instance_id, address)
        return address

    async def run(self, stop: asyncio.Event) -> None:
        """Follows the cluster, and leads it when it comes to that, until `stop`."""
        assert self._leadership is not None, "run() comes after start()"
        async with asyncio.TaskGroup() as tasks:
            leading = tasks.create_task(self._leadership.run())
            following = [tasks.create_task(self.follower.run()), tasks.create_task(self._tick())]
            await stop.wait()
            # It must not decide on a cluster that it no longer follows.
            leading.cancel()
            await self._leadership.resign()
            for task in following:
                task.cancel()

    async def close(self) -> None:
        if self._leadership is not None:
            await self._leadership.resign()
        if self._orders is not None:
            await self._orders.close()
        await self._membership.close()
        if self._service is not None:
            await self._service.hang_up()
        await self._grpc.stop(_GRACE_S)
        if self._record is not None:
            await asyncio.to_thread(self._record.close)

    def _stand(self, address: str) -> Leadership:
        config = self._arguments.config
        if not config.several_conductors:
            return OnlyConductor(address)
        lease_s = config.conductor.leader_lease_s
        token, name = f"{self._incarnation:016x}", self._arguments.instance_id
        lease = LeaderLease(self._redis_url, config.cluster, lease_s, token, name, address, self._credentials)
        return OneOfSeveral(lease, lease_s, address, self._lease_clock)

    async def _tick(self) -> None:
        runner = self._runner
        for tick in itertools.count():
            if tick % _TICKS_A_SAMPLE == 0:
                await runner.turns.begin(sample_loads(runner))
            await runner.turns.begin(self._tick_parts())
            await asyncio.sleep(_TICK_S / 2)
            await runner.turns.begin(metrics.observe_cluster(runner.core, runner.clock.now()))
            await asyncio.sleep(_TICK_S / 2)

    def _tick_parts(self) -> Generator[None, None, None]:
        assert self._orders is not None, "run() comes after start()"
        seconds = 0.0
        while True:
            began = time.perf_counter()
            self._orders.give(self._runner.feed(TickPart()))
            seconds += time.perf_counter() - began
            if not self._runner.core.ticks:
                break
            yield
        metrics.TICK_SECONDS.observe(seconds)


async def serve(arguments: ProcessArguments, stop: asyncio.Event, beside: Callable[[str], Coroutine[Any, Any, None]] | None = None) -> None:
    """Runs the Conductor until `stop`, and what is to run `beside` it in the same process, which is given its address. What that still does
    after `stop` it may need the Conductor for, which ends after it."""
    server, ended = ConductorServer(arguments), asyncio.Event()
    try:
        address = await server.start()
        async with asyncio.TaskGroup() as tasks:
            settling = tasks.create_task(GcTuner(server.follower).run())
            tasks.create_task(server.run(ended))
            await (stop.wait() if beside is None else beside(address))
            ended.set()
            settling.cancel()
    finally:
        await server.close()
