"""A Conductor that a test plays, asked over plain connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from springtide.credentials import OPEN
from springtide.rpc import conductor_pb2, conductor_pb2_grpc
from springtide.rpc.conductor_pb2 import ScheduleAnswer, ScheduleQuestion
from springtide.rpc.frames import SCHEDULE, Frames, FrameServer


@asynccontextmanager
async def asked(conductor: conductor_pb2_grpc.ConductorServicer) -> AsyncIterator[None]:
    """Has `conductor.Schedule` answer each connection, as if it were a call, and the address be known. Ends with every connection."""
    telling: list[asyncio.Task[None]] = []
    calls: dict[Frames, tuple[asyncio.Queue[ScheduleQuestion], asyncio.Task[None]]] = {}

    async def call(connection: Frames, unread: asyncio.Queue[ScheduleQuestion]) -> None:
        async def questions() -> AsyncIterator[ScheduleQuestion]:
            while True:
                yield await unread.get()

        try:
            async for answer in conductor.Schedule(questions(), None):
                connection.send(answer.SerializeToString())
        finally:
            connection.transport.close()

    async def tell(connection: Frames, question: ScheduleQuestion) -> None:
        answer = ScheduleAnswer(number=question.number)
        if question.HasField("advance"):
            answer.advanced.CopyFrom(await conductor.Advance(question.advance, None))
        else:
            answer.renewed.CopyFrom(await conductor.Renew(question.renew, None))
        connection.send(answer.SerializeToString())

    def take(connection: Frames, message: bytes) -> None:
        question = ScheduleQuestion.FromString(message)
        if question.WhichOneof("question") != "request":
            telling.append(asyncio.create_task(tell(connection, question)))
            return
        if connection not in calls:
            unread: asyncio.Queue[ScheduleQuestion] = asyncio.Queue()
            calls[connection] = unread, asyncio.create_task(call(connection, unread))
        calls[connection][0].put_nowait(question)

    server = FrameServer(SCHEDULE, OPEN, take)
    address = await server.start("127.0.0.1")

    async def where(request: conductor_pb2.GetScheduleAddressRequest, context: Any) -> conductor_pb2.ScheduleAddress:
        return conductor_pb2.ScheduleAddress(address=address)

    setattr(conductor, "GetScheduleAddress", where)  # noqa: B010
    try:
        yield
    finally:
        await server.close()
        tasks = [*telling, *(task for _, task in calls.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
