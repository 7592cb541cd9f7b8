"""What one side of a stream has to say, in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

WordT = TypeVar("WordT")
MessageT = TypeVar("MessageT")


class Outgoing(Generic[WordT, MessageT]):
    """Words are put in without waiting, and leave as messages."""

    def __init__(self, encode: Callable[[WordT], MessageT]) -> None:
        self._encode = encode
        self._queue: asyncio.Queue[WordT | None] = asyncio.Queue()

    def put(self, word: WordT) -> None:
        self._queue.put_nowait(word)

    def end(self) -> None:
        """Nothing more comes."""
        self._queue.put_nowait(None)

    async def stream(self) -> AsyncIterator[MessageT]:
        while (word := await self._queue.get()) is not None:
            yield self._encode(word)
