"""The Conductor's service: a message in, an event to the core, its answer in the protocol's words out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Generator, Iterator

import grpc.aio

from conductor import metrics
from conductor.core.conductor import ConductorCore
from conductor.core.explanation import estimates
from conductor.core.pool_balance import PoolLoads
from conductor.core.state import Instance
from conductor.core.types.events import Decided, MoveAttempts, MovesAsked, Placed, Renewed
from conductor.server.leadership import Leadership, Standing
from conductor.server.runner import CoreRunner
from springtide.credentials import OPEN, Credentials
from springtide.errors import InvalidRequest
from springtide.ids import AttemptId, GatewayId, InstanceId
from springtide.protocol import scheduling, wire
from springtide.protocol.attempts import LiveAttempt, Phase
from springtide.protocol.instances import Role
from springtide.protocol.scheduling import GatewayOrders, NotLeader, Rejection, Schedule, ScheduleReply
from springtide.protocol.status import ClusterStatus, InstanceStatus
from springtide.rpc import conductor_pb2
from springtide.rpc.frames import Frames
from springtide.rpc.questions import AskedServicer
from springtide.slices import at_once, slices

logger = logging.getLogger(__name__)
_ADVANCED_AT_ONCE = 8
"""Reports of attempts, some 20 us each. Of more, some at a time have their turn: a gateway may have gathered a thousand."""
_RENEWED_AT_ONCE = 8
"""Attempts of a renewal in a part of it, some 10 us each where they are not known yet: a gateway may have thousands."""
_SHOWN_AT_ONCE = 4
"""Instances in a part of the cluster's status."""
_PHASES = {conductor_pb2.Phase.Value(f"PHASE_{phase.name}"): phase for phase in Phase}
decisions = logging.getLogger("conductor.decisions")
"""One line a decision at debug level, every so many (`log.decisions_every`) at info level: `Alternatives` as JSON, from which
`conductor.core.placement.scheduler.decide` comes to the same decision."""


class ConductorService(AskedServicer):
    """The service that gateways ask. A standby takes in what it is told, as the leader does; it decides nothing."""

    def __init__(
        self, runner: CoreRunner, leadership: Leadership, model_name: str, credentials: Credentials = OPEN, log_decisions_every: int = 0
    ) -> None:
        super().__init__(credentials)
        self._log_decisions_every = log_decisions_every
        self._answering: set[asyncio.Task[None]] = set()
        """What is answered in turns."""
        self._explaining: asyncio.Future[None] | None = None
        self._advances = asyncio.Lock()
        self._advances_waiting = 0
        """Reports are taken in in the order in which they came, those of one attempt above all: nobody overtakes these."""
        self._runner = runner
        self._leadership = leadership
        self._model_name = model_name

    def answer(self, connection: Frames, question: conductor_pb2.ScheduleQuestion) -> None:
        """Before anything else has its turn, but for renewals and many reports."""
        if question.HasField("renew") or (question.HasField("advance") and not self._advances_at_once(question.advance)):
            task = asyncio.create_task(self._answer_in_turns(connection, question))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
            return
        with self._refusing(question) as answer:
            if question.HasField("advance"):
                at_once(self._advanced(question.advance))
                answer.advanced.SetInParent()
            else:
                answer.reply.CopyFrom(wire.SCHEDULE_REPLY.encode(self._schedule(wire.SCHEDULE.decode(question.request))))
        connection.send(answer.SerializeToString())
        self._explain()

    def _explain(self) -> None:
        """Has the history pick out what the latest decisions are explained by. Nobody waits for it."""
        history = self._runner.history
        if history.to_explain and (self._explaining is None or self._explaining.done()):
            self._explaining = self._runner.turns.begin(history.explain())

    async def _answer_in_turns(self, connection: Frames, question: conductor_pb2.ScheduleQuestion) -> None:
        with self._refusing(question) as answer:
            if question.HasField("renew"):
                await self._runner.turns.begin(self._renewed(question.renew), awaited=True)
                answer.renewed.SetInParent()
            else:
                await self._advance(question.advance)
                answer.advanced.SetInParent()
        connection.send(answer.SerializeToString())

    @contextlib.contextmanager
    def _refusing(self, question: conductor_pb2.ScheduleQuestion) -> Iterator[conductor_pb2.ScheduleAnswer]:
        """The answer, to be filled in; it says why where that fails."""
        answer = conductor_pb2.ScheduleAnswer(number=question.number)
        try:
            yield answer
        except (ValueError, InvalidRequest) as error:
            answer.refusal = str(error)
        except Exception as error:
            # Others wait for answers over the same connection.
            logger.exception("no answer to the question %d about %s", question.number, question.request.attempt_id)
            answer.refusal = f"it has failed: {type(error).__name__}"

    def _schedule(self, asked: scheduling.Schedule) -> ScheduleReply:
        """Raises ValueError, naming the field, when it makes no sense here."""
        full_blocks = asked.num_tokens // (block_tokens := self._runner.core.settings.block_tokens)
        if len(asked.block_keys) != full_blocks:
            raise ValueError(
                f"block_keys has {len(asked.block_keys)} keys; {asked.num_tokens} tokens have {full_blocks} full blocks of {block_tokens}"
            )
        standing = self._leadership.standing(asked.epoch)
        if not standing.leads:
            return ScheduleReply(not_leader=NotLeader(standing.leader_address, standing.epoch))
        started = time.perf_counter()
        (decided,) = self._runner.feed(asked)
        assert isinstance(decided, Decided)
        if not asked.successor_of:
            metrics.observe_decided(decided, time.perf_counter() - started, block_tokens, asked.num_tokens)
        _log(asked, decided, self._log_decisions_every)
        return schedule_reply(decided, asked.debug, standing.epoch)

    def _advances_at_once(self, request: conductor_pb2.AdvanceRequest) -> bool:
        return len(request.reports) <= _ADVANCED_AT_ONCE and not self._advances_waiting

    async def _advance(self, request: conductor_pb2.AdvanceRequest) -> None:
        self._advances_waiting += 1
        try:
            async with self._advances:
                await self._runner.turns.begin(self._advanced(request), awaited=True)
        finally:
            self._advances_waiting -= 1

    def _advanced(self, request: conductor_pb2.AdvanceRequest) -> Generator[None, None, None]:
        """Raises ValueError and InvalidRequest for a report that makes no sense."""
        for message in request.reports:
            report = wire.ATTEMPT_REPORT.decode(message)
            self._runner.feed(Placed(GatewayId(request.gateway_id), report) if isinstance(report, LiveAttempt) else report)
            yield

    def _renewed(self, request: conductor_pb2.RenewRequest) -> Generator[None, None, None]:
        """Raises ValueError and InvalidRequest for an attempt that makes no sense."""
        core, unchanged, attempts = self._runner.core, list[AttemptId](), list[LiveAttempt]()
        for first in range(0, len(request.attempts), _RENEWED_AT_ONCE):
            for message in request.attempts[first : first + _RENEWED_AT_ONCE]:
                attempt_id, phase = AttemptId(message.attempt_id), _PHASES.get(message.phase)
                if phase is None or core.is_news(attempt_id, phase):
                    attempts.append(wire.LIVE_ATTEMPT.decode(message))
                else:
                    unchanged.append(attempt_id)
            yield
        self._runner.feed(Renewed(GatewayId(request.gateway_id), tuple(unchanged), tuple(attempts)))

    async def WatchOrders(
        self,
        request: conductor_pb2.WatchOrdersRequest,
        context: grpc.aio.ServicerContext[conductor_pb2.WatchOrdersRequest, conductor_pb2.GatewayOrders],
    ) -> AsyncIterator[conductor_pb2.GatewayOrders]:
        said: GatewayOrders | None = None
        while True:
            changed = self._runner.orders_changed
            orders = self._runner.gateway_orders(GatewayId(request.gateway_id))
            if orders != said or orders.moves:
                said = orders
                yield wire.GATEWAY_ORDERS.encode(orders)
            await changed.wait()

    async def MoveAttempts(
        self,
        request: conductor_pb2.MoveAttemptsRequest,
        context: grpc.aio.ServicerContext[conductor_pb2.MoveAttemptsRequest, conductor_pb2.MoveAttemptsReply],
    ) -> conductor_pb2.MoveAttemptsReply:
        standing = self._leadership.standing(0)
        if not standing.leads:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"another Conductor leads: {standing.leader_address or 'unknown'}")
        instance_id = InstanceId(request.instance_id)
        if instance_id not in self._runner.core.state.instances:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no instance {request.instance_id!r}")
        ordered = self._runner.feed(MovesAsked(instance_id, request.most))
        told = sum(len(action.attempt_ids) for action in ordered if isinstance(action, MoveAttempts))
        return conductor_pb2.MoveAttemptsReply(attempts=told + self._runner.core.moves.still_asked(instance_id))

    async def GetCluster(
        self,
        request: conductor_pb2.GetClusterRequest,
        context: grpc.aio.ServicerContext[conductor_pb2.GetClusterRequest, conductor_pb2.ClusterStatus],
    ) -> conductor_pb2.ClusterStatus:
        return await self._runner.turns.begin(self._status())

    def _status(self) -> Generator[None, None, conductor_pb2.ClusterStatus]:
        core, now = self._runner.core, self._runner.clock.now()
        loads = yield from core.pool_loads(now)
        message = wire.CLUSTER_STATUS.encode(cluster_status(core, loads, self._model_name, self._leadership.standing(), now))
        for some in slices(core.state.in_order(), _SHOWN_AT_ONCE):
            message.instances.extend(wire.INSTANCE_STATUS.encode(_instance_status(core, instance, now)) for instance in some)
            yield
        return message


def _log(event: Schedule, decided: Decided, every: int) -> None:
    """The line is made only when somebody wants it: it is as long as the cluster is large."""
    level = logging.INFO if every and decided.alternatives.turn % every == 0 else logging.DEBUG
    if decisions.isEnabledFor(level):
        ids = {"request_id": event.request_id, "attempt_id": event.attempt_id}
        decisions.log(level, "%s", decided.alternatives.to_json(), extra=ids)


# ---- answers ----


def schedule_reply(decided: Decided, debug: bool, epoch: int) -> ScheduleReply:
    """The answer to a gateway; with every alternative's estimate for `debug`."""
    rejection = decided.decision if isinstance(decided.decision, Rejection) else None
    return ScheduleReply(decided.assignment, rejection, estimates=estimates(decided.alternatives) if debug else (), epoch=epoch)


def cluster_status(core: ConductorCore, loads: PoolLoads, model: str, standing: Standing, now: float) -> ClusterStatus:
    """The state of the cluster as the core knows it, without its instances."""
    work = core.demand.recent_work(now)
    num_ready = sum(map(core.scheduler.num_ready, Role))
    return ClusterStatus(
        model=model,
        instances=(),
        requests_scheduled=core.totals.scheduled,
        requests_rejected=core.totals.rejected.total(),
        prompt_tokens=core.totals.prompt_tokens,
        cached_tokens=core.totals.cached_tokens,
        attempts_live=len(core.state.attempts),
        index_blocks=len(core.index),
        rejections_by_reason={reason.value: count for reason, count in core.totals.rejected.items()},
        ready=core.ready,
        leads=standing.leads,
        epoch=standing.epoch,
        leader_address=standing.leader_address,
        predictions=tuple(core.scores.errors.summaries()),
        prefill_load=loads.prefill,
        decode_load=loads.decode,
        prefill_work=work.prefill,
        decode_work=work.decode,
        wanted_prefill=core.demand.work(now).wanted(Role.PREFILL, num_ready) if core.scheduler.is_split else None,
        switching_instance_id=core.balance.moving or "" if core.balance is not None else "",
    )


def _instance_status(core: ConductorCore, instance: Instance, now: float) -> InstanceStatus:
    load = instance.load
    return InstanceStatus(
        instance=instance.ref,
        ready=core.scheduler.ready(instance),
        incarnation=instance.incarnation,
        running=load.running,
        waiting=load.waiting,
        queue_ms=instance.queue_ms(now),
        step_ms=load.step_ms,
        slots_total=load.slots_total,
        slots_available=load.slots_available,
        cached_blocks=core.index.blocks_of(instance.ref.node_id),
        seconds_since_report=now - instance.changed_at,
        idle=load.idle.running,
    )
