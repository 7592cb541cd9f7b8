"""The client of Valkey/Redis, what it fails with, and what it is told and answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import redis.asyncio as redis
from redis.exceptions import RedisError

from springtide.errors import Unavailable
from springtide.supervision import heeds_cancellation

UNREACHABLE = (RedisError, OSError, TimeoutError, RuntimeError)
"""What redis-py raises when Valkey cannot be asked. RuntimeError is uvloop's, of a connection that was reset while nobody used it."""


class ValkeyClient(redis.Redis):
    """A client whose commands end as cancelled when their task has been cancelled meanwhile: redis-py may forget it, and a loop over
    commands would never end."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        command: Callable[..., Awaitable[Any]] = super().execute_command
        return await heeds_cancellation(command)(*args, **options)


async def asked(command: Any, code: str = "records_unreachable") -> Any:
    """What Valkey answers to a command. Raises Unavailable, of this code, when it cannot be asked."""
    try:
        return await command
    except UNREACHABLE as error:
        raise Unavailable(f"Valkey cannot be asked: {error}", code=code) from None


def text_of(answer: bytes | str) -> str:
    """A part of an answer, whether or not the client decodes them."""
    return answer.decode() if isinstance(answer, bytes) else answer


def exactly(number: float) -> str:
    """As a word of a command, which Valkey reads and gives back as the same number."""
    return format(number, ".17g")
