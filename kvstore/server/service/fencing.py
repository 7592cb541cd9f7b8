"""The fencing of engines whose stream has ended.

That an engine asks for nothing more does not say that it writes nothing more: its process may be alive, frozen, or in the middle of a pass.
Its slots come back when it has let go of the arena, for which the kernel is the witness: an engine keeps the connection by which it got
the arena until after its last write (kvstore.link).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from kvstore.server.shared.context import StoreContext
from messenger.base import Identity
from springtide.ids import AttemptId
from springtide.supervision import end, supervised

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.02
SAY_AFTER_S = 5.0


class EngineFencing:
    """The engines that are being fenced. `fenced` says whether nothing of an engine's can land any more, as `Transport.fence`."""

    def __init__(self, shared: StoreContext, fenced: Callable[[Identity], Awaitable[bool]]) -> None:
        self._shared = shared
        self._fenced = fenced
        self._tasks: set[asyncio.Task[None]] = set()

    def fence(self, engine: Identity, attempts: Sequence[AttemptId]) -> None:
        """Gives up the slots of its attempts (Pool.engine_fenced) once it is fenced."""
        if attempts:
            task = supervised(lambda: self._wait_for(engine, attempts), f"fence {engine.name}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        await end(*self._tasks)

    async def _wait_for(self, engine: Identity, attempts: Sequence[AttemptId]) -> None:
        loop = asyncio.get_running_loop()
        said_at = loop.time()
        while not await self._fenced(engine):
            if loop.time() - said_at >= SAY_AFTER_S:
                logger.warning("%s has ended its stream but not let go of the arena; slots of %d attempts wait", engine.name, len(attempts))
                said_at = float("inf")
            await asyncio.sleep(LOOK_EVERY_S)
        self._shared.pool.engine_fenced(attempts)
        self._shared.changed()
