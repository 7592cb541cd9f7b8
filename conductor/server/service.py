"""The Conductor's gRPC service: a message in, an event to the core, its answer out."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import grpc.aio

from conductor import metrics
from conductor.core.conductor import ConductorCore
from conductor.core.recording import Recorder
from conductor.core.types.events import (
    Action,
    Decided,
    Event,
    Forgot,
    HungChanged,
    Placed,
    PrefillFinished,
    RequestSnapshot,
    Scored,
    StoreDown,
)
from conductor.server import answers
from conductor.server.leadership import Leadership
from springtide.clock import Clock
from springtide.errors import InvalidRequest
from springtide.ids import GatewayId
from springtide.protocol import wire
from springtide.protocol.attempts import LiveAttempt
from springtide.protocol.codec import Decoder
from springtide.protocol.instances import HungInstances
from springtide.protocol.scheduling import Schedule
from springtide.rpc import conductor_pb2, conductor_pb2_grpc

T = TypeVar("T")
M = TypeVar("M")
logger = logging.getLogger(__name__)
decisions = logging.getLogger("conductor.decisions")
"""One line a decision at debug level, every so many (`log.decisions_every`) at info level: `Alternatives` as JSON, from which
`conductor.core.placement.scheduler.decide` comes to the same decision."""

predictions = logging.getLogger("conductor.predictions")
"""One line an attempt that ended well, at debug level: of each quantity, what was predicted and what came."""


class CoreRunner:
    """The one place where events enter the core and its actions are done. Used from the event loop only."""

    def __init__(self, core: ConductorCore, clock: Clock, recorder: Recorder | None = None) -> None:
        self.core = core
        self.clock = clock
        self._recorder = recorder
        self._hung_changes = asyncio.Event()

    @property
    def hung_changes(self) -> asyncio.Event:
        """Set when the core next says that other instances hang than before."""
        return self._hung_changes

    def feed(self, event: Event) -> list[Action]:
        """Hands the event to the core, keeps its records, and returns the actions, of which the caller does those that are its own."""
        now = self.clock.now()
        if self._recorder is not None:
            self._recorder.event(event, now)
        actions = self.core.handle(event, now)
        if isinstance(event, StoreDown):
            metrics.forget_node(event.node_id)
        for action in actions:
            match action:
                case RequestSnapshot(node_id):
                    metrics.SNAPSHOTS_REQUESTED.labels(node_id).inc()
                case PrefillFinished():
                    metrics.observe_prefill(action)
                case Scored():
                    metrics.observe_scores(action)
                    if predictions.isEnabledFor(logging.DEBUG):
                        ids = {"request_id": action.request_id, "attempt_id": action.attempt_id}
                        pairs = {score.quantity.value: (score.predicted, score.actual) for score in action.scores}
                        predictions.debug("%s", json.dumps(pairs), extra=ids)
                case HungChanged(instances):
                    names = ", ".join(instance.instance_id for instance in instances)
                    logger.warning("work goes on elsewhere that is at instances which hang: %s", names or "at none any more")
                    self._hung_changes.set()
                    self._hung_changes = asyncio.Event()
                case Forgot(attempt_ids):
                    logger.warning("their gateway is silent: %d attempts forgotten: %s", len(attempt_ids), ", ".join(attempt_ids))
        return actions


class ConductorService(conductor_pb2_grpc.ConductorServicer):
    """A standby takes in what it is told, as the leader does; it decides nothing."""

    def __init__(self, runner: CoreRunner, leadership: Leadership, model_name: str, log_decisions_every: int = 0) -> None:
        self._log_decisions_every = log_decisions_every
        self._runner = runner
        self._leadership = leadership
        self._model_name = model_name

    async def Schedule(
        self,
        request: conductor_pb2.ScheduleRequest,
        context: grpc.aio.ServicerContext[conductor_pb2.ScheduleRequest, conductor_pb2.ScheduleReply],
    ) -> conductor_pb2.ScheduleReply:
        asked = await _decoded(wire.SCHEDULE, request, context)
        full_blocks = asked.num_tokens // (block_tokens := self._runner.core.settings.block_tokens)
        if len(asked.block_keys) != full_blocks:
            message = (
                f"block_keys has {len(asked.block_keys)} keys; {asked.num_tokens} tokens have {full_blocks} full blocks of {block_tokens}"
            )
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        standing = self._leadership.standing(asked.epoch)
        if not standing.leads:
            return wire.SCHEDULE_REPLY.encode(answers.not_leader(standing))
        started = time.perf_counter()
        (decided,) = self._runner.feed(asked)
        assert isinstance(decided, Decided)
        metrics.observe_decided(decided, time.perf_counter() - started, block_tokens, asked.num_tokens)
        _log(asked, decided, self._log_decisions_every)
        return wire.SCHEDULE_REPLY.encode(answers.schedule_reply(decided, asked.debug, standing.epoch))

    async def Advance(
        self,
        request: conductor_pb2.AdvanceRequest,
        context: grpc.aio.ServicerContext[conductor_pb2.AdvanceRequest, conductor_pb2.AdvanceReply],
    ) -> conductor_pb2.AdvanceReply:
        for message in request.reports:
            report = await _decoded(wire.ATTEMPT_REPORT, message, context)
            self._runner.feed(Placed(GatewayId(request.gateway_id), report) if isinstance(report, LiveAttempt) else report)
        return conductor_pb2.AdvanceReply()

    async def Renew(
        self,
        request: conductor_pb2.RenewRequest,
        context: grpc.aio.ServicerContext[conductor_pb2.RenewRequest, conductor_pb2.RenewReply],
    ) -> conductor_pb2.RenewReply:
        self._runner.feed(await _decoded(wire.RENEW, request, context))
        return conductor_pb2.RenewReply(ttl_ms=int(self._runner.core.settings.lease_s * 1000))

    async def WatchHung(
        self,
        request: conductor_pb2.WatchHungRequest,
        context: grpc.aio.ServicerContext[conductor_pb2.WatchHungRequest, conductor_pb2.HungInstances],
    ) -> AsyncIterator[conductor_pb2.HungInstances]:
        while True:
            changes = self._runner.hung_changes
            yield wire.HUNG_INSTANCES.encode(HungInstances(self._runner.core.hung))
            await changes.wait()

    async def GetCluster(
        self,
        request: conductor_pb2.GetClusterRequest,
        context: grpc.aio.ServicerContext[conductor_pb2.GetClusterRequest, conductor_pb2.ClusterStatus],
    ) -> conductor_pb2.ClusterStatus:
        now = self._runner.clock.now()
        return wire.CLUSTER_STATUS.encode(answers.cluster_status(self._runner.core, self._model_name, self._leadership.standing(), now))


async def _decoded(codec: Decoder[M, T], message: M, context: grpc.aio.ServicerContext[Any, Any]) -> T:
    """The word that the message is; one that makes no sense ends the call."""
    try:
        return codec.decode(message)
    except (ValueError, InvalidRequest) as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise


def _log(event: Schedule, decided: Decided, every: int) -> None:
    """The line is made only when somebody wants it: it is as long as the cluster is large."""
    level = logging.INFO if every and decided.alternatives.turn % every == 0 else logging.DEBUG
    if decisions.isEnabledFor(level):
        ids = {"request_id": event.request_id, "attempt_id": event.attempt_id}
        decisions.log(level, "%s", decided.alternatives.to_json(), extra=ids)
