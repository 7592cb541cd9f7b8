"""A thread for what would hold up every stream on the event loop: reading large bodies and tokenising them."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

INLINE_BYTES = 4096
"""Requests up to here are done with sooner than a thread takes to begin."""
MOST_REST_S = 0.2

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class SideThread:
    """A single thread, so that whoever sends much at once competes with itself, not with the streams; the shortest waiting request comes
    first."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="gateway-prepare")
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._busy = False

    async def run(self, num_bytes: int, work: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        """What `work` returns or raises, for a request of so many bytes."""
        if num_bytes <= INLINE_BYTES:
            return work(*args, **kwargs)
        await self._turn(num_bytes)
        loop = asyncio.get_running_loop()
        began = loop.time()
        job = self._executor.submit(work, *args, **kwargs)
        # However the waiting ends, it is the next one's turn when the thread is free, not before.
        job.add_done_callback(lambda _: _call_soon(loop, self._rest, loop.time() - began))
        try:
            return await asyncio.wrap_future(job)
        finally:
            # An error knows this frame: a frame that knows it too would keep all that it held until the collector comes round.
            del job

    def close(self) -> None:
        """Begins nothing more."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, num_bytes: int) -> None:
        if not self._busy:
            self._busy = True
            return
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (num_bytes, next(self._order), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()
            raise

    def _rest(self, worked_s: float) -> None:
        """As long as it has worked: whoever sends much has half of the interpreter's time at most, and others get it in between."""
        asyncio.get_running_loop().call_later(min(worked_s, MOST_REST_S), self._next)

    def _next(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[float], None], argument: float) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, argument)
