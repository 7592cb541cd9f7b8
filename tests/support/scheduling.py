"""A Conductor asked without a gateway, as gateways ask it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from gateway.schedule_stream import ScheduleStream
from springtide.credentials import OPEN, Credentials
from springtide.rpc.conductor_pb2 import ScheduleReply, ScheduleRequest

SOON_S = 60.0


@asynccontextmanager
async def asking(channel: grpc.aio.Channel, credentials: Credentials = OPEN) -> AsyncIterator[ScheduleStream]:
    stream = ScheduleStream(channel, credentials)
    try:
        yield stream
    finally:
        await stream.close(0.0)


async def scheduled(channel: grpc.aio.Channel, request: ScheduleRequest, credentials: Credentials = OPEN) -> ScheduleReply:
    """Raises Unanswered."""
    async with asking(channel, credentials) as conductor:
        return await conductor.ask(request, SOON_S)
