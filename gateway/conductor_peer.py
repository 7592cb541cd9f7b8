"""One Conductor as a gateway speaks to it: calls, and in the background what it is to know of this gateway's attempts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc
import grpc.aio

from gateway import metrics
from springtide.credentials import OPEN, Credentials
from springtide.errors import Unavailable
from springtide.ids import GatewayId
from springtide.protocol import wire
from springtide.protocol.attempts import AttemptReport, LiveAttempt, Renew
from springtide.protocol.instances import HungInstances
from springtide.protocol.scheduling import Schedule, ScheduleReply
from springtide.protocol.status import ClusterStatus
from springtide.rpc import conductor_pb2
from springtide.rpc.channels import connect
from springtide.rpc.conductor_pb2_grpc import ConductorStub
from springtide.supervision import supervised

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0
RENEW_EVERY_S = 2.0
_FOLLOW_AGAIN_S = 0.5
_GRACE_S = CALL_TIMEOUT_S + 1.0
"""For calls in flight to end by themselves: a channel that is closed before cancels them, and with them whoever waits."""
MOST_KEPT = 4096
"""Reports that wait for a Conductor, some 100 bytes each; the oldest are lost first."""
_MOST_SENT = 1024
"""In one message: some 20 ms of its receiver's time."""
ReplyT = TypeVar("ReplyT")
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class ConductorPeer:
    def __init__(
        self,
        address: str,
        gateway_id: GatewayId,
        live_attempts: Callable[[], Sequence[LiveAttempt]],
        on_hung: Callable[[HungInstances], None],
        credentials: Credentials = OPEN,
    ) -> None:
        """Needs a running event loop. `on_hung` is told of all that hang, whenever that changes."""
        self.address = address
        self._gateway_id = gateway_id
        self._credentials = credentials
        self._live_attempts = live_attempts
        self._on_hung = on_hung
        self._channel: grpc.aio.Channel | None = None
        self._reports: asyncio.Queue[AttemptReport] = asyncio.Queue(MOST_KEPT)
        self._closing: set[asyncio.Task[None]] = set()
        self._reachable = True
        self._tasks = [
            supervised(self._renew, f"conductor-renew-{address}"),
            supervised(self._send_reports, f"conductor-report-{address}"),
            supervised(self._follow_hung, f"conductor-hung-{address}"),
        ]

    async def schedule(self, request: Schedule) -> ScheduleReply:
        """Raises Unavailable when it cannot be asked or does not answer; ValueError when its answer makes no sense."""
        message = wire.SCHEDULE.encode(request)
        return wire.SCHEDULE_REPLY.decode(await self._ask(lambda stub: stub.Schedule(message, timeout=CALL_TIMEOUT_S)))

    async def cluster(self) -> ClusterStatus:
        """Raises Unavailable."""
        request = conductor_pb2.GetClusterRequest()
        return wire.CLUSTER_STATUS.decode(await self._ask(lambda stub: stub.GetCluster(request, timeout=CALL_TIMEOUT_S)))

    def report(self, report: AttemptReport) -> None:
        """Sent in order, in the background, with all that has gathered meanwhile. Lost when the Conductor is away, or too slow for so many:
        what runs and what has ended, the next two renewals teach it; what it would have learnt for its predictions stays lost."""
        if self._reports.full():
            self._lose_one()
        self._reports.put_nowait(report)

    async def close(self, patience_s: float) -> None:
        """Reports what is still to be reported, if it is taken in time, and hangs up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._reports.join()
        await self._hang_up(grace_s=None)

    async def retire(self) -> None:
        """Hangs up on a Conductor that is no more. Calls in flight end by themselves: whoever made them is owed an answer."""
        await self._hang_up(grace_s=_GRACE_S)

    async def _hang_up(self, grace_s: float | None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close(grace=grace_s)

    async def _ask(self, call: Callable[[ConductorStub], Awaitable[ReplyT]]) -> ReplyT:
        channel = self._connected()
        try:
            reply = await call(ConductorStub(channel))
        except grpc.aio.AioRpcError as error:
            if error.code() in _LOST:
                self._note_reachable(False)
                self._abandon(channel)
            raise self._unanswered(error.details()) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Its channel was closed: after a pause of this process the grace may be over together with the time for the answer.
            raise self._unanswered("its connection was given up") from None
        self._note_reachable(True)
        return reply

    def _connected(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = connect(self.address, self._credentials)
        return self._channel

    def _unanswered(self, why: str | None) -> Unavailable:
        return Unavailable(f"the Conductor at {self.address} did not answer: {why}", code="no_conductor")

    def _abandon(self, channel: grpc.aio.Channel) -> None:
        """The next call makes a new channel, which connects at once where an old one waits for its back-off. Calls in flight on this one
        end by themselves."""
        if channel is self._channel:
            self._channel = None
            closing = asyncio.create_task(channel.close(grace=_GRACE_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _note_reachable(self, reachable: bool) -> None:
        if reachable != self._reachable:
            self._reachable = reachable
            level, what = (logging.INFO, "back") if reachable else (logging.WARNING, "lost")
            logger.log(level, "the Conductor at %s is %s", self.address, what)

    async def _send_reports(self) -> None:
        while True:
            gathered = [await self._reports.get()]
            while len(gathered) < _MOST_SENT and not self._reports.empty():
                gathered.append(self._reports.get_nowait())
            request = conductor_pb2.AdvanceRequest(gateway_id=self._gateway_id, reports=map(wire.ATTEMPT_REPORT.encode, gathered))
            try:
                await self._advance(request)
            except Unavailable:
                metrics.LOST_REPORTS.inc(len(gathered))
                # Away: the ones behind would each wait as long, only to be as late.
                while not self._reachable and not self._reports.empty():
                    self._lose_one()
            for _ in gathered:
                self._reports.task_done()

    def _lose_one(self) -> None:
        self._reports.get_nowait()
        self._reports.task_done()
        metrics.LOST_REPORTS.inc()

    async def _renew(self) -> None:
        while True:
            renew = Renew(self._gateway_id, tuple(self._live_attempts()))
            with contextlib.suppress(Unavailable):
                await self._renewal(wire.RENEW.encode(renew))
            await asyncio.sleep(RENEW_EVERY_S)

    async def _follow_hung(self) -> None:
        """A push, for it must be quick, and costs the Conductor of many gateways nothing while all is well."""
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):  # that it is lost, the renewals find out
                async for hung in ConductorStub(self._connected()).WatchHung(conductor_pb2.WatchHungRequest(gateway_id=self._gateway_id)):
                    self._on_hung(wire.HUNG_INSTANCES.decode(hung))
            await asyncio.sleep(_FOLLOW_AGAIN_S)

    async def _advance(self, request: conductor_pb2.AdvanceRequest) -> None:
        await self._ask(lambda stub: stub.Advance(request, timeout=CALL_TIMEOUT_S))

    async def _renewal(self, request: conductor_pb2.RenewRequest) -> None:
        await self._ask(lambda stub: stub.Renew(request, timeout=CALL_TIMEOUT_S))
