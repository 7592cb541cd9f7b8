"""The way to the Conductor: found through membership unless its address is given, and found again after it was lost."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc
import grpc.aio

from conductor.gateway import wire
from conductor.gateway.state import LiveAttempt
from springtide.errors import Unavailable
from springtide.ids import GatewayId
from springtide.membership import Membership
from springtide.rpc import conductor_pb2, conductor_pb2_grpc
from springtide.rpc.channels import connect

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0
RENEW_EVERY_S = 2.0
Reply = TypeVar("Reply")
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class ConductorLink:
    def __init__(
        self,
        gateway_id: GatewayId,
        membership: Membership,
        live_attempts: Callable[[], Sequence[LiveAttempt]],
        address: str | None = None,
    ) -> None:
        """`address` fixes the Conductor's; without it, membership says where it is."""
        self._gateway_id = gateway_id
        self._membership = membership
        self._live_attempts = live_attempts
        self._fixed = address is not None
        self._address = address
        self._channel: grpc.aio.Channel | None = None
        self._reports: asyncio.Queue[conductor_pb2.AdvanceRequest] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._reachable = True

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._renew(), name="conductor-renew"),
            asyncio.create_task(self._report(), name="conductor-report"),
        ]

    async def close(self) -> None:
        """Reports what is still to be reported, if the Conductor takes it at once, and hangs up."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._reports.join(), timeout=0.3)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close(grace=None)

    async def schedule(self, request: conductor_pb2.ScheduleRequest) -> conductor_pb2.ScheduleReply:
        """Raises Unavailable when the Conductor cannot be asked or does not answer."""
        return await self._ask(lambda stub: stub.Schedule(request, timeout=CALL_TIMEOUT_S))

    async def cluster(self) -> conductor_pb2.ClusterStatus:
        """Raises Unavailable."""
        return await self._ask(lambda stub: stub.GetCluster(conductor_pb2.GetClusterRequest(), timeout=CALL_TIMEOUT_S))

    def advance(self, request: conductor_pb2.AdvanceRequest) -> None:
        """Sent in order, in the background. Lost when the Conductor is away: what it then needs to know, `Renew` teaches it."""
        self._reports.put_nowait(request)

    async def _ask(self, call: Callable[[conductor_pb2_grpc.ConductorStub], Awaitable[Reply]]) -> Reply:
        channel = await self._connect()
        try:
            reply = await call(conductor_pb2_grpc.ConductorStub(channel))
        except grpc.aio.AioRpcError as error:
            if error.code() in _LOST:
                self._note_reachable(False)
                self._abandon(channel)
            raise Unavailable(f"the Conductor at {self._address} did not answer: {error.details()}", code="no_conductor") from None
        self._note_reachable(True)
        return reply

    async def _connect(self) -> grpc.aio.Channel:
        if self._channel is not None:
            return self._channel
        if not self._fixed:
            self._address = await self._find() or self._address
        if self._address is None:
            raise Unavailable("no Conductor has announced itself", code="no_conductor")
        if self._channel is None:
            self._channel = connect(self._address)
        return self._channel

    async def _find(self) -> str | None:
        members = await self._membership.members()
        return next((member.address for member in members or [] if member.role == "conductor"), None)

    def _abandon(self, channel: grpc.aio.Channel) -> None:
        """The next call makes a new channel, which connects at once where an old one waits for its back-off; and a Conductor that was
        restarted elsewhere is found. Calls under way on this one end by themselves."""
        if channel is self._channel:
            self._channel = None
            closing = asyncio.create_task(channel.close(grace=CALL_TIMEOUT_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _note_reachable(self, reachable: bool) -> None:
        if reachable != self._reachable:
            self._reachable = reachable
            level, what = (logging.INFO, "back") if reachable else (logging.WARNING, "lost")
            logger.log(level, "the Conductor at %s is %s", self._address, what)

    async def _report(self) -> None:
        while True:
            request = await self._reports.get()
            with contextlib.suppress(Unavailable):
                await self._ask(functools.partial(_advance, request))
            self._reports.task_done()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            attempts = [wire.live_attempt(attempt) for attempt in self._live_attempts()]
            request = conductor_pb2.RenewRequest(gateway_id=self._gateway_id, attempts=attempts)
            with contextlib.suppress(Unavailable):
                await self._ask(functools.partial(_renew, request))


async def _advance(request: conductor_pb2.AdvanceRequest, stub: conductor_pb2_grpc.ConductorStub) -> None:
    await stub.Advance(request, timeout=CALL_TIMEOUT_S)


async def _renew(request: conductor_pb2.RenewRequest, stub: conductor_pb2_grpc.ConductorStub) -> None:
    await stub.Renew(request, timeout=CALL_TIMEOUT_S)
