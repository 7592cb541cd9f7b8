"""Load reports on their way to the core, which take no more than a share of the event loop's time, whatever comes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Protocol

from conductor import metrics

SHARE = 0.2
"""Of the event loop's time: what is left is for reading them, and for those who wait for a decision."""
TURN_S = 0.0003
"""The longest at a stretch, unless other work kept the reports waiting."""
LONGEST_TURN_S = 0.005
"""The longest also then; what one report took beyond that, for the process was paused, is not made up for either."""


class Reporter(Protocol):
    """Whose reports they are."""

    def report(self, message: bytes) -> None:
        """Takes in a report. Never raises."""


class ReportQueue:
    """The newest report of each instance that has not had its turn yet; what is newer takes the place of what is older. Those that have
    waited longest come first. Lives in one event loop."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` tells seconds."""
        self._clock = clock
        self._waiting: dict[Reporter, bytes] = {}
        self._allowance_s = TURN_S
        self._allowed_at = clock()
        self._next_turn: asyncio.TimerHandle | None = None

    def put(self, reporter: Reporter, message: bytes) -> None:
        """Hands the report to its reporter: at once, or when it is its turn."""
        self._waiting[reporter] = message
        if self._next_turn is None:
            self._turn()

    def discard(self, reporter: Reporter) -> None:
        """What waits of this reporter is not handed over any more."""
        self._waiting.pop(reporter, None)

    def _turn(self, due: float = math.inf) -> None:
        """`due`: when reports that wait were to have their turn."""
        self._next_turn = None
        now = self._clock()
        most_s = min(TURN_S + SHARE * max(0.0, now - due), LONGEST_TURN_S)
        self._allowance_s = min(most_s, self._allowance_s + SHARE * (now - self._allowed_at))
        try:
            while self._waiting and self._allowance_s > 0:
                reporter = next(iter(self._waiting))
                reporter.report(self._waiting.pop(reporter))
                metrics.LOAD_REPORTS.inc()
                before, now = now, self._clock()
                self._allowance_s = max(self._allowance_s - (now - before), -LONGEST_TURN_S)
        finally:
            self._allowed_at = now
            if self._waiting:
                delay_s = (TURN_S - self._allowance_s) / SHARE
                self._next_turn = asyncio.get_running_loop().call_later(delay_s, self._turn, now + delay_s)
