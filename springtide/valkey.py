"""The client of Valkey/Redis, and what it fails with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import redis.asyncio as redis
from redis.exceptions import RedisError

from springtide.supervision import heeds_cancellation

UNREACHABLE = (RedisError, OSError, TimeoutError, RuntimeError)
"""What redis-py raises when Valkey cannot be asked. RuntimeError is uvloop's, of a connection that was reset while nobody used it."""


class ValkeyClient(redis.Redis):
    """A client whose commands end as cancelled when their task has been cancelled meanwhile: redis-py may forget it, and a loop over
    commands would never end."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        command: Callable[..., Awaitable[Any]] = super().execute_command
        return await heeds_cancellation(command)(*args, **options)
