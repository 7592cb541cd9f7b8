"""Work that can wait, while others wait for decisions: in parts, some of which have their turn in a round of the event loop.

All such work shares the one turn. However much of it there is, who asks waits for a fraction of a millisecond of it, and for more only
where the event loop has so much else to do that it would never come to its end: then it has about a fifth of the time. What somebody gives
up waiting for in the end goes before the rest, which keeps a part of the turn.
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
LONGEST_TURN_S = 0.05
"""... up to so much: that the process was paused is not made up for."""
AWAITED_SHARE = 0.75
"""Of a turn, where there is other work, too."""

T = TypeVar("T")
Work = tuple[Generator[object, None, Any], asyncio.Future[Any]]


class Turns:
    """Who has work to do in turns, of those that are awaited and of the others the next one first that has waited longest. Lives in one
    event loop."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` tells seconds."""
        self._clock = clock
        self._awaited, self._others = deque[Work](), deque[Work]()
        self._waiting_since = 0.0

    def begin(self, parts: Generator[object, None, T], *, awaited: bool = False) -> asyncio.Future[T]:
        """Comes to what the generator returns, whose parts end where it yields, or raises. If it is cancelled, there is no further part.
        `awaited`: by who will give it up."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        idle = not (self._awaited or self._others)
        (self._awaited if awaited else self._others).append((parts, done))
        if idle:
            self._waiting_since = self._clock()
            loop.call_soon(self._turn)
        return done

    def _turn(self) -> None:
        began = self._clock()
        turn_s = min(TURN_S + SHARE * (began - self._waiting_since), LONGEST_TURN_S)
        self._work_on(self._awaited, began + AWAITED_SHARE * turn_s)
        # However long the last part of that took.
        self._work_on(self._others, max(began + turn_s, self._clock() + (1 - AWAITED_SHARE) * turn_s))
        self._work_on(self._awaited, began + turn_s)
        self._waiting_since = self._clock()
        if self._awaited or self._others:
            asyncio.get_running_loop().call_soon(self._turn)

    def _work_on(self, line: deque[Work], until: float) -> None:
        while line and self._clock() < until:
            self._go_on(line, until)

    def _go_on(self, line: deque[Work], until: float) -> None:
        """With the first one's work, for as long as there is time."""
        parts, done = line[0]  # it stays there meanwhile: who joins sees that turns go on
        try:
            while not done.done() and self._clock() < until:
                next(parts)
        except StopIteration as end:
            done.set_result(end.value)
        except Exception as error:
            done.set_exception(error)
        line.popleft()
        if not done.done():
            line.append((parts, done))
