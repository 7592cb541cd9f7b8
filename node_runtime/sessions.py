"""Gateways' sessions with an engine: numbered, each with a queue of updates on their way out."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Generic, TypeVar

CommandT = TypeVar("CommandT")
UpdateT = TypeVar("UpdateT")


class Sessions(Generic[CommandT, UpdateT]):
    """`on_command(session, command)` and `on_end(session)` are called in the event loop."""

    def __init__(self, on_command: Callable[[int, CommandT], None], on_end: Callable[[int], None]) -> None:
        self._on_command = on_command
        self._on_end = on_end
        self._ids = itertools.count(1)
        self._outgoing: dict[int, asyncio.Queue[UpdateT | None]] = {}

    def send(self, session: int, update: UpdateT) -> None:
        """Without waiting. To a session that has ended: nowhere."""
        queue = self._outgoing.get(session)
        if queue is not None:
            queue.put_nowait(update)

    async def serve(self, commands: AsyncIterable[CommandT]) -> AsyncIterator[UpdateT]:
        """One session: takes its commands and yields its updates until either side ends it."""
        session = next(self._ids)
        queue: asyncio.Queue[UpdateT | None] = asyncio.Queue()
        self._outgoing[session] = queue
        receiving = asyncio.create_task(self._receive(session, commands, queue), name=f"session {session}")
        try:
            while (update := await queue.get()) is not None:
                yield update
        finally:
            receiving.cancel()
            del self._outgoing[session]
            self._on_end(session)

    async def _receive(self, session: int, commands: AsyncIterable[CommandT], queue: asyncio.Queue[UpdateT | None]) -> None:
        try:
            async for command in commands:
                self._on_command(session, command)
        finally:
            queue.put_nowait(None)
