"""Tasks that go on for as long as what made them. Nobody waits for them, so nobody would hear that one of them has died."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)

AGAIN_AFTER_S = 1.0


def supervised(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> asyncio.Task[None]:
    """Runs `work()` until it returns or the task is cancelled. What it raises is a mistake in it, no end of it: the error is logged with
    its traceback, and the work begun anew after a pause."""
    return asyncio.create_task(_supervise(work, name), name=name)


async def _supervise(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    while True:
        try:
            return await work()
        except Exception:
            logger.exception("the task %s has died; it begins anew", name)
        await asyncio.sleep(AGAIN_AFTER_S)
