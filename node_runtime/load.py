"""Load reports for whoever watches the instance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from springtide.clock import Clock
from springtide.protocol import wire
from springtide.protocol.instances import LoadReport
from springtide.rpc import node_pb2

REST_S = 0.05
"""From one look at the load to the next."""
SAY_EVERY_S = 0.5


class Changes:
    """What several wait for in one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def note(self) -> None:
        """Something may have changed."""
        self._next.set()
        self._next = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """Set by the next `note`."""
        return self._next


async def watch(report: Callable[[], LoadReport | None], changes: Changes, clock: Clock) -> AsyncIterator[node_pb2.LoadReport]:
    """Yields the report when it has changed, and twice a second, until there is none."""
    said: LoadReport | None = None
    said_at = clock.now()
    while True:
        changed = changes.next
        if (current := report()) is None:
            return
        if current != said or clock.now() - said_at >= SAY_EVERY_S:
            said, said_at = current, clock.now()
            yield wire.LOAD_REPORT.encode(current)
        await asyncio.sleep(REST_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(said_at + SAY_EVERY_S - clock.now()):
                await changed.wait()
