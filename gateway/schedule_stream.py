"""Questions to one Conductor, over one call."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import grpc
import grpc.aio

from springtide.rpc.conductor_pb2 import ScheduleAnswer, ScheduleQuestion, ScheduleReply, ScheduleRequest
from springtide.rpc.conductor_pb2_grpc import ConductorStub

LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""Codes of a Conductor that is not there, or does not answer."""


class Unanswered(Exception):
    """There will be no answer."""

    def __init__(self, why: str, lost: bool) -> None:
        """`lost`: because of the connection; the question itself may be asked again."""
        super().__init__(why)
        self.lost = lost


class ScheduleStream:
    """Any number of questions at a time. Whoever asks may be cancelled: its answer is then nobody's. Needs a running event loop."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._call = ConductorStub(channel).Schedule()
        self._numbers = itertools.count()
        self._unsent: asyncio.Queue[ScheduleQuestion] = asyncio.Queue()
        self._waiting: dict[int, asyncio.Future[ScheduleReply]] = {}
        self._failure: Unanswered | None = None
        self._sending = asyncio.create_task(self._send())
        self._receiving = asyncio.create_task(self._receive())

    @property
    def failed(self) -> bool:
        """No question is answered any more."""
        return self._failure is not None

    async def ask(self, request: ScheduleRequest, timeout_s: float) -> ScheduleReply:
        """Raises Unanswered."""
        if self._failure is not None:
            raise Unanswered(str(self._failure), self._failure.lost)
        number = next(self._numbers)
        self._waiting[number] = answered = asyncio.get_running_loop().create_future()
        self._unsent.put_nowait(ScheduleQuestion(number=number, request=request))
        try:
            async with asyncio.timeout(timeout_s):
                reply: ScheduleReply = await answered
                return reply
        except TimeoutError:
            raise Unanswered(f"nothing came for {timeout_s:g} s", lost=True) from None
        finally:
            self._waiting.pop(number, None)

    async def close(self, grace_s: float) -> None:
        """Takes no more questions; those that wait may be answered for so long."""
        give_up_at = asyncio.get_running_loop().time() + grace_s
        self._failure = self._failure or Unanswered("its connection was given up", lost=True)
        while self._waiting and not self._receiving.done() and (left_s := give_up_at - asyncio.get_running_loop().time()) > 0:
            due: list[asyncio.Future[Any]] = [*self._waiting.values(), self._receiving]
            await asyncio.wait(due, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)  # who was answered says so
        self._receiving.cancel()
        await asyncio.gather(self._receiving, return_exceptions=True)

    async def _send(self) -> None:
        """One after the other, and by nobody who may be cancelled in the middle: that would end the call."""
        while True:
            question = await self._unsent.get()
            if question.number in self._waiting:
                await self._call.write(question)

    async def _receive(self) -> None:
        failure = Unanswered("it has ended the call", lost=True)
        try:
            async for answer in self._call:
                self._take(answer)
        except grpc.aio.AioRpcError as error:
            failure = Unanswered(error.details() or error.code().name, error.code() in LOST)
        except asyncio.CancelledError:
            # By `close`, or since the channel was closed.
            failure = Unanswered("its connection was given up", lost=True)
        finally:
            self._failure = self._failure or failure
            self._call.cancel()
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
            for answered in self._waiting.values():
                if not answered.done():
                    answered.set_exception(Unanswered(str(failure), failure.lost))

    def _take(self, answer: ScheduleAnswer) -> None:
        answered = self._waiting.get(answer.number)
        if answered is None or answered.done():
            return
        if answer.HasField("reply"):
            answered.set_result(answer.reply)
        else:
            answered.set_exception(Unanswered(answer.refusal or "its answer is none", lost=False))
