"""The Conductor without a gateway: gRPC service, membership, watchers and ticks."""

from __future__ import annotations

import asyncio
import logging
import os

from conductor import metrics
from conductor.core.conductor import ConductorCore
from conductor.core.events import Tick
from conductor.core.settings import ConductorSettings
from conductor.server.cluster import ClusterFollower
from conductor.server.service import ConductorService, CoreRunner
from springtide.clock import MonotonicClock
from springtide.errors import ConfigError
from springtide.ids import new_incarnation
from springtide.membership import Member, Membership
from springtide.process import ProcessArguments
from springtide.rpc import conductor_pb2, conductor_pb2_grpc
from springtide.rpc.channels import new_server
from springtide.rpc.health import add_health_and_reflection
from springtide.telemetry import serve_metrics

logger = logging.getLogger(__name__)

_TICK_S = 1.0
_GRACE_S = 0.5
_SERVICE = conductor_pb2.DESCRIPTOR.services_by_name["Conductor"].full_name


class ConductorServer:
    def __init__(self, arguments: ProcessArguments) -> None:
        config, model_info = arguments.config, arguments.model_info
        if config.redis_url is None:
            raise ConfigError("redis_url is not set: the Conductor finds the cluster's members in Valkey")
        self._arguments = arguments
        self._runner = CoreRunner(ConductorCore(ConductorSettings.of(config, model_info)), MonotonicClock())
        self._membership = Membership(config.redis_url, config.cluster, config.conductor.lease_s)
        self._follower = ClusterFollower(self._membership, self._runner, config.conductor.lease_s, model_info.fingerprint)
        self._grpc = new_server()

    async def start(self) -> str:
        """Serves and announces itself; returns its gRPC host:port."""
        host = self._arguments.bind_host
        name = self._arguments.config.served_model_name or self._arguments.model_info.name
        conductor_pb2_grpc.add_ConductorServicer_to_server(ConductorService(self._runner, name), self._grpc)
        await add_health_and_reflection(self._grpc, _SERVICE)
        address = f"{host}:{self._grpc.add_insecure_port(f'{host}:0')}"
        await self._grpc.start()
        await self._membership.announce(
            Member(
                role="conductor",
                member_id=self._arguments.instance_id,
                incarnation=new_incarnation(),
                address=address,
                metrics_address=serve_metrics(host),
                pid=os.getpid(),
            )
        )
        logger.info("conductor %s serves at %s", self._arguments.instance_id, address)
        return address

    async def run(self, stop: asyncio.Event) -> None:
        """Follows the cluster until `stop`."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._follower.run()), tasks.create_task(self._tick())]
            await stop.wait()
            for task in running:
                task.cancel()

    async def close(self) -> None:
        await self._membership.close()
        await self._grpc.stop(_GRACE_S)

    async def _tick(self) -> None:
        while True:
            self._runner.feed(Tick())
            metrics.observe_cluster(self._runner.core)
            await asyncio.sleep(_TICK_S)
