"""Work that nobody waits for, while others wait for decisions: in parts, some of which have their turn in a round of the event loop.

All such work shares the one turn. However much of it there is, who asks waits for a fraction of a millisecond of it, and for more only
where the event loop has so much else to do that it would never come to its end.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, TypeVar

TURN_S = 0.0002
"""The longest in a round, but for the part that is under way then; unless other work kept this waiting: ..."""
SHARE = 0.2
"""... then this of the time that it took, ..."""
LONGEST_TURN_S = 0.001
"""... up to so much."""

T = TypeVar("T")


class Turns:
    """Who has work to do in turns, the next one first that has waited longest. Lives in one event loop."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` tells seconds."""
        self._clock = clock
        self._waiting = deque[tuple[Generator[object, None, Any], asyncio.Future[Any]]]()
        self._waiting_since = 0.0

    def begin(self, parts: Generator[object, None, T]) -> asyncio.Future[T]:
        """Comes to what the generator returns, whose parts end where it yields, or raises. If it is cancelled, there is no further part."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._waiting.append((parts, done))
        if len(self._waiting) == 1:
            self._waiting_since = self._clock()
            loop.call_soon(self._turn)
        return done

    def _turn(self) -> None:
        began = self._clock()
        until = began + min(TURN_S + SHARE * (began - self._waiting_since), LONGEST_TURN_S)
        while self._waiting and self._clock() < until:
            self._go_on(until)
        self._waiting_since = self._clock()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)

    def _go_on(self, until: float) -> None:
        """With the first one's work, for as long as there is time."""
        parts, done = self._waiting[0]  # it stays there meanwhile: who joins sees that turns go on
        try:
            while not done.done() and self._clock() < until:
                next(parts)
        except StopIteration as end:
            done.set_result(end.value)
        except Exception as error:
            done.set_exception(error)
        self._waiting.popleft()
        if not done.done():
            self._waiting.append((parts, done))
