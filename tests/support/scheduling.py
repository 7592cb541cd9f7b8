"""A Conductor asked without a gateway, as gateways ask it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from gateway.questions import Questions
from springtide.credentials import OPEN, Credentials
from springtide.rpc.conductor_pb2 import ScheduleReply, ScheduleRequest

SOON_S = 60.0


@asynccontextmanager
async def asking(channel: grpc.aio.Channel, credentials: Credentials = OPEN) -> AsyncIterator[Questions]:
    questions = Questions(channel, credentials)
    try:
        yield questions
    finally:
        await questions.close(0.0)


async def scheduled(channel: grpc.aio.Channel, request: ScheduleRequest, credentials: Credentials = OPEN) -> ScheduleReply:
    """Raises Unanswered."""
    async with asking(channel, credentials) as conductor:
        return await conductor.ask(request, SOON_S)
