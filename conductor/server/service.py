"""The Conductor's gRPC service: a message in, an event to the core, its answer out."""

from __future__ import annotations

import logging
import time

import grpc.aio

from conductor import metrics
from conductor.core.conductor import ConductorCore
from conductor.core.events import Action, Event, Forgot, PrefillFinished, Reply, RequestSnapshot
from conductor.server import wire
from springtide.clock import Clock
from springtide.errors import InvalidRequest
from springtide.rpc import conductor_pb2, conductor_pb2_grpc

logger = logging.getLogger(__name__)
decisions = logging.getLogger("conductor.decisions")
"""One line a decision at debug level: `Alternatives` as JSON, from which `conductor.core.scheduler.decide` comes to the same outcome."""


class CoreRunner:
    """The one place where events enter the core and its actions are done. Used from the event loop only."""

    def __init__(self, core: ConductorCore, clock: Clock) -> None:
        self.core = core
        self.clock = clock

    def feed(self, event: Event) -> list[Action]:
        """Hands the event to the core, keeps its records, and returns the actions, of which the caller does those that are its own."""
        actions = self.core.handle(event, self.clock.now())
        for action in actions:
            match action:
                case RequestSnapshot(node_id):
                    metrics.SNAPSHOTS_REQUESTED.labels(node_id).inc()
                case PrefillFinished():
                    metrics.observe_prefill(action)
                case Forgot(attempt_ids):
                    logger.warning("their gateway is silent: %d attempts forgotten: %s", len(attempt_ids), ", ".join(attempt_ids))
        return actions


class ConductorService(conductor_pb2_grpc.ConductorServicer):
    def __init__(self, runner: CoreRunner, model_name: str) -> None:
        self._runner = runner
        self._model_name = model_name

    async def Schedule(
        self,
        request: conductor_pb2.ScheduleRequest,
        context: grpc.aio.ServicerContext[conductor_pb2.ScheduleRequest, conductor_pb2.ScheduleReply],
    ) -> conductor_pb2.ScheduleReply:
        settings = self._runner.core.settings
        try:
            event = wire.schedule_event(request, settings.block_tokens)
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        started = time.perf_counter()
        (reply,) = self._runner.feed(event)
        assert isinstance(reply, Reply)
        metrics.observe_reply(reply, time.perf_counter() - started, settings.block_tokens, event.num_tokens)
        if decisions.isEnabledFor(logging.DEBUG):
            ids = {"request_id": event.request_id, "attempt_id": event.attempt_id}
            decisions.debug("%s", reply.alternatives.to_json(), extra=ids)
        return wire.schedule_reply(reply, request.debug)

    async def Advance(
        self,
        request: conductor_pb2.AdvanceRequest,
        context: grpc.aio.ServicerContext[conductor_pb2.AdvanceRequest, conductor_pb2.AdvanceReply],
    ) -> conductor_pb2.AdvanceReply:
        self._runner.feed(wire.advance_event(request))
        return conductor_pb2.AdvanceReply()

    async def Renew(
        self,
        request: conductor_pb2.RenewRequest,
        context: grpc.aio.ServicerContext[conductor_pb2.RenewRequest, conductor_pb2.RenewReply],
    ) -> conductor_pb2.RenewReply:
        self._runner.feed(wire.renew_event(request))
        return conductor_pb2.RenewReply(ttl_ms=int(self._runner.core.settings.lease_s * 1000))

    async def GetCluster(
        self,
        request: conductor_pb2.GetClusterRequest,
        context: grpc.aio.ServicerContext[conductor_pb2.GetClusterRequest, conductor_pb2.ClusterStatus],
    ) -> conductor_pb2.ClusterStatus:
        return wire.cluster_status(self._runner.core, self._model_name, self._runner.clock.now())
