"""The transfers that this store makes for attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kvstore.server.transfer.fetch import PrefixFetch
from kvstore.server.transfer.hand_over import HandOverWriter
from springtide.ids import AttemptId
from springtide.supervision import end


class AttemptTransfers:
    """The fetches and hand-overs that are in flight, by attempt. They outlive the engine that asked for them until they are at rest."""

    def __init__(self) -> None:
        self.fetches: dict[AttemptId, PrefixFetch] = {}
        self.hand_overs: dict[AttemptId, HandOverWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start_fetch(self, attempt_id: AttemptId, fetch: PrefixFetch, on_error: Callable[[BaseException], None]) -> None:
        """Runs it. `on_error` is told of what nobody expected."""
        self.fetches[attempt_id] = fetch
        self._start(fetch.run(), lambda: self.fetches.pop(attempt_id, None), on_error)

    def start_hand_over(self, attempt_id: AttemptId, hand_over: HandOverWriter, on_error: Callable[[BaseException], None]) -> None:
        """Runs it, as `start_fetch`."""
        self.hand_overs[attempt_id] = hand_over
        self._start(hand_over.run(), lambda: self.hand_overs.pop(attempt_id, None), on_error)

    async def cancel_hand_over(self, attempt_id: AttemptId) -> None:
        """Returns when nothing will be written for the attempt any more."""
        hand_over = self.hand_overs.get(attempt_id)
        if hand_over is not None:
            hand_over.cancel()
            await hand_over.ended.wait()

    async def close(self) -> None:
        await end(*self._tasks)

    def _start(self, work: Coroutine[Any, Any, None], forget: Callable[[], object], on_error: Callable[[BaseException], None]) -> None:
        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            forget()
            if not task.cancelled() and (error := task.exception()) is not None:
                on_error(error)

        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(done)
