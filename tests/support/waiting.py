"""How tests wait for what others bring about, which signal nothing: until it is so, with a limit that a slow machine keeps."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

PATIENCE_S = 60.0
POLL_S = 0.02
_Found = TypeVar("_Found")


def wait_until(
    condition: Callable[[], _Found],
    what: str = "what is to come",
    within_s: float = PATIENCE_S,
    more: Callable[[], str] = str,
    poll_s: float = POLL_S,
) -> _Found:
    """What the condition says as soon as that is true. An AssertionError, with what `more` says, where that takes too long."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {within_s:g} s for {what}:\n{more()}"
        time.sleep(poll_s)
    return found


async def until(condition: Callable[[], Awaitable[_Found] | _Found], within_s: float = PATIENCE_S, poll_s: float = 0.005) -> _Found:
    """The same while everything else goes on. Raises TimeoutError where that takes too long, also the condition itself."""
    async with asyncio.timeout(within_s):
        while True:
            said = condition()
            found = cast(_Found, await said if inspect.isawaitable(said) else said)
            if found:
                return found
            await asyncio.sleep(poll_s)
