"""Time, injected: cores get `now` as an argument, servers read a Clock, tests turn one by hand. And how long another has said nothing, as
far as one has looked oneself.

Whoever looks may be held up: an event loop that was blocked, a process that the machine did not run, a machine that was suspended. What
came meanwhile is read only afterwards. So a look counts for one interval at most, however long ago the one before was: nobody is taken for
hung because the observer was.
"""

from __future__ import annotations

import time
from typing import Protocol

from springtide.values import value_class


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


MOST_PATIENCE_S = 3.0
"""What is waited for at most before somebody is taken for lost, however slow the network: streams stand still meanwhile."""


def patience_s(least_s: float, round_trip_s: float) -> float:
    """How long to wait for a sign of somebody at the other end of a network on which answers come within `round_trip_s` as a rule: one that
    was lost on the way, and has been sent again, is to be there by then."""
    return max(least_s, min(2 * round_trip_s, MOST_PATIENCE_S))


class RoundTrips:
    """How long answers take of late. Not what they vary by: a process that is busy for a moment makes no network slow."""

    def __init__(self) -> None:
        self._smoothed_s: float | None = None

    @property
    def smoothed_s(self) -> float:
        """0 before the first."""
        return self._smoothed_s or 0.0

    def answered(self, after_s: float) -> None:
        """Takes in how long an answer took."""
        known = self._smoothed_s
        self._smoothed_s = after_s if known is None else known + (after_s - known) / 4


@value_class(frozen=True, slots=True)
class Tick:
    """An event of every core: time went by. The core looks at what is due."""


class ObservedTime:
    """Seconds that an observer may count against others, for code without a clock of its own: it is told the time at each look."""

    def __init__(self, most_s: float) -> None:
        """`most_s`: that may lie between two looks; more is a pause of the observer's own."""
        self.now = 0.0
        self.stood_still_s = 0.0
        """What went by and may not be counted."""
        self._most_s = most_s
        self._looked_at: float | None = None

    def look(self, now: float) -> None:
        if self._looked_at is not None:
            counted_s = min(now - self._looked_at, self._most_s)
            self.now += counted_s
            self.stood_still_s += now - self._looked_at - counted_s
        self._looked_at = now
