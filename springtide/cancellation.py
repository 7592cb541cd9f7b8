"""For awaiting what may forget that it was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def heeds_cancellation(function: Callable[Arguments, Awaitable[Result]]) -> Callable[Arguments, Awaitable[Result]]:
    """Ends `function` as cancelled whatever it came to, once its task has been cancelled.

    Python 3.11's `asyncio.wait_for` forgets a cancellation that meets the answer (CPython issue 86296), and redis-py sends each command
    through it: a loop over such calls would outlive its `cancel()` for ever.
    """

    @wraps(function)
    async def heeding(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        try:
            return await function(*arguments, **named)
        finally:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise asyncio.CancelledError

    return heeding
