"""Time, injected: cores get `now` as an argument, servers read a Clock, tests turn one by hand. And how long another has said nothing, as
far as one has looked oneself.

Whoever looks may be held up: an event loop that was blocked, a process that the machine did not run, a machine that was suspended. What
came meanwhile is read only afterwards. So a look counts for one interval at most, however long ago the one before was: nobody is taken for
hung because the observer was.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

LOOK_EVERY_S = 0.25


class Clock(Protocol):
    """What servers read the time from."""

    def now(self) -> float:
        """Seconds on a monotonic clock of arbitrary origin."""
        ...


class MonotonicClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that stands still until it is advanced."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now += seconds


@dataclass(frozen=True, slots=True)
class Tick:
    """An event of every core: time went by. The core looks at what is due."""


class ObservedTime:
    """Seconds that an observer may count against others, for code without a clock of its own: it is told the time at each look."""

    def __init__(self, most_s: float) -> None:
        """`most_s`: that may lie between two looks; more is a pause of the observer's own."""
        self.now = 0.0
        self._most_s = most_s
        self._looked_at: float | None = None

    def look(self, now: float) -> None:
        if self._looked_at is not None:
            self.now += min(now - self._looked_at, self._most_s)
        self._looked_at = now


class Silence:
    """`async with Silence(limit_s) as silence:` raises TimeoutError when its body has not called `heard` for `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._silent_s = 0.0
        self._timeout = asyncio.timeout(None)
        self._next_look: asyncio.TimerHandle | None = None

    def heard(self) -> None:
        self._silent_s = 0.0

    async def __aenter__(self) -> Silence:
        await self._timeout.__aenter__()
        self._look_again()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._next_look is not None, "it has been entered"
        self._next_look.cancel()
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise TimeoutError(f"nothing was heard for {self._silent_s:.1f} s") from None

    def _look(self) -> None:
        self._silent_s += LOOK_EVERY_S
        if self._silent_s >= self._limit_s:
            self._timeout.reschedule(asyncio.get_running_loop().time())
        else:
            self._look_again()

    def _look_again(self) -> None:
        self._next_look = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)
