"""Questions to one Conductor, over one connection."""

from __future__ import annotations

import asyncio
import itertools

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from springtide.credentials import OPEN, Credentials
from springtide.rpc import frames
from springtide.rpc.conductor_pb2 import (
    AdvanceRequest,
    GetScheduleAddressRequest,
    RenewRequest,
    ScheduleAnswer,
    ScheduleQuestion,
    ScheduleReply,
    ScheduleRequest,
)
from springtide.rpc.conductor_pb2_grpc import ConductorStub

LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""Codes of a Conductor that is not there, or does not answer."""


class Unanswered(Exception):
    """There will be no answer."""

    def __init__(self, why: str, lost: bool) -> None:
        """`lost`: because of the connection; the question itself may be asked again."""
        super().__init__(why)
        self.lost = lost


class Questions:
    """Any number of questions at a time. Whoever asks may be cancelled: its answer is then nobody's. Needs a running event loop."""

    def __init__(self, channel: grpc.aio.Channel, credentials: Credentials = OPEN) -> None:
        """`channel` is asked where the Conductor is to be asked."""
        self.channel = channel
        self._credentials = credentials
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[ScheduleAnswer]] = {}
        self._failure: Unanswered | None = None
        self._connection: frames.Frames | None = None
        self._connecting = asyncio.create_task(self._connect())

    @property
    def failed(self) -> bool:
        """No question is answered any more."""
        return self._failure is not None

    async def ask(self, request: ScheduleRequest, timeout_s: float) -> ScheduleReply:
        """Raises Unanswered, as all that is told."""
        return (await self._answered(ScheduleQuestion(request=request), timeout_s)).reply

    async def advance(self, request: AdvanceRequest, timeout_s: float) -> None:
        await self._answered(ScheduleQuestion(advance=request), timeout_s)

    async def renew(self, request: RenewRequest, timeout_s: float) -> None:
        await self._answered(ScheduleQuestion(renew=request), timeout_s)

    async def _answered(self, question: ScheduleQuestion, timeout_s: float) -> ScheduleAnswer:
        number, answered = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = answered
        try:
            async with asyncio.timeout(timeout_s):
                if self._connection is None:
                    await asyncio.wait([self._connecting])
                if self._failure is not None:
                    raise Unanswered(str(self._failure), self._failure.lost)
                assert self._connection is not None
                question.number = number
                self._connection.send(question.SerializeToString())
                answer: ScheduleAnswer = await answered
                return answer
        except TimeoutError:
            raise Unanswered(f"nothing came for {timeout_s:g} s", lost=True) from None
        finally:
            self._waiting.pop(number).cancel()

    async def close(self, grace_s: float) -> None:
        """Takes no more questions; those that wait may be answered for so long."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + grace_s
        given_up = Unanswered("its connection was given up", lost=True)
        self._failure = self._failure or given_up
        while self._waiting and (left_s := give_up_at - loop.time()) > 0:
            await asyncio.wait(list(self._waiting.values()), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)  # who was answered says so
        self._connecting.cancel()
        await asyncio.wait([self._connecting])
        self._lose(given_up)

    async def _connect(self) -> None:
        try:
            where = await ConductorStub(self.channel).GetScheduleAddress(GetScheduleAddressRequest())
            self._connection = await frames.connect(where.address, frames.SCHEDULE, self._credentials, self._take, self._went)
        except grpc.aio.AioRpcError as error:
            self._lose(Unanswered(error.details() or error.code().name, error.code() in LOST))
        except (OSError, ValueError, OverflowError) as error:  # there may be no such address
            self._lose(Unanswered(str(error), lost=True))
        except asyncio.CancelledError:
            # By `close`, or since the channel was closed.
            self._lose(Unanswered("its connection was given up", lost=True))

    def _went(self, connection: frames.Frames, why: str) -> None:
        self._lose(Unanswered(why, lost=True))

    def _lose(self, failure: Unanswered) -> None:
        self._failure = self._failure or failure
        if self._connection is not None:
            self._connection.transport.abort()
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(Unanswered(str(failure), failure.lost))
                answered.exception()  # whoever asked may wait for the connection still

    def _take(self, connection: frames.Frames, message: bytes) -> None:
        try:
            answer = ScheduleAnswer.FromString(message)
        except DecodeError:
            raise ConnectionError("its answers make no sense") from None
        answered = self._waiting.get(answer.number)
        if answered is None or answered.done():
            return
        if answer.WhichOneof("outcome") in (None, "refusal"):
            answered.set_exception(Unanswered(answer.refusal or "its answer is none", lost=False))
        else:
            answered.set_result(answer)
