"""Work that goes on when the request that began it has been answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

from springtide.supervision import end

logger = logging.getLogger(__name__)


class Background:
    """The tasks of one gateway that nobody waits for. They end with it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[object, object, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def finish(self, patience_s: float) -> None:
        """Gives them time to end by themselves."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=patience_s)

    async def close(self) -> None:
        """Ends what has not. Idempotent."""
        await end(*self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)
