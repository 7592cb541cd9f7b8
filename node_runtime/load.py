"""Load reports for whoever watches the instance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from springtide.clock import Clock
from springtide.rpc import node_pb2

LOOK_EVERY_S = 0.05
SAY_EVERY_S = 1.0


async def watch(report: Callable[[], node_pb2.LoadReport | None], clock: Clock) -> AsyncIterator[node_pb2.LoadReport]:
    """Yields the report when it has changed, and every second, until there is none."""
    said: node_pb2.LoadReport | None = None
    said_at = clock.now()
    while (current := report()) is not None:
        if current != said or clock.now() - said_at >= SAY_EVERY_S:
            said, said_at = current, clock.now()
            yield current
        await asyncio.sleep(LOOK_EVERY_S)
