"""Load reports on their way to the core, which take no more than a share of the event loop's time, whatever comes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Protocol

from conductor import metrics

SHARE = 0.2
"""Of the event loop's time: what is left is for those who wait for a decision."""
TURN_S = 0.0003
"""The longest at a stretch, unless other work kept the reports waiting."""
LONGEST_TURN_S = 0.001
"""The longest also then; what one report took beyond that, for the process was paused, is not made up for either."""
READING_S = 0.0005
"""In which what has come to a connection is read once it is to be read again."""
_COST_S = 0.00003
"""What a report is taken to cost before any was timed."""
_SMOOTHING = 0.02


class Reporter(Protocol):
    """Whose reports they are."""

    def report(self, message: bytes) -> None:
        """Takes in a report. Never raises."""

    def pause(self) -> None:
        """Has what comes lie where it came to, unread."""

    def resume(self) -> None:
        """Reads again."""


class ReportQueue:
    """Who has reports that have not had their turn yet; who has waited longest comes first, with the newest that it has said by then.
    Reading a report and throwing it away for a newer one costs as much as taking it in, so who waits is not read. Lives in one event
    loop."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` tells seconds."""
        self._clock = clock
        self._waiting: dict[Reporter, bytes | None] = {}
        """Not read; with the newest report that was, if it was not taken in yet."""
        self._called: dict[Reporter, bytes | None] = {}
        """Of them those whose turn it is: they are read again, and what comes now is the newest."""
        self._cost_s = _COST_S
        """Of a report, smoothed."""
        self._allowance_s = TURN_S
        self._allowed_at = clock()
        self._next_turn: asyncio.TimerHandle | None = None

    def put(self, reporter: Reporter, message: bytes) -> None:
        """Hands the report to its reporter: at once, or when it is its turn."""
        if reporter in self._called:
            del self._called[reporter]
            self._hand(reporter, message)
            if self._waiting:
                self._wait(reporter, None)
        elif self._next_turn is None and self._allowed():
            self._hand(reporter, message)
        else:
            self._wait(reporter, message)

    def discard(self, reporter: Reporter) -> None:
        """What waits of this reporter is not handed over any more."""
        self._waiting.pop(reporter, None)
        self._called.pop(reporter, None)

    def _wait(self, reporter: Reporter, message: bytes | None) -> None:
        self._waiting[reporter] = message
        reporter.pause()
        if self._next_turn is None:
            self._have_a_turn()

    def _have_a_turn(self) -> None:
        """When there is time for them again."""
        delay_s = max(0.0, TURN_S - self._allowance_s) / SHARE
        self._next_turn = asyncio.get_running_loop().call_later(delay_s, self._call, self._clock() + delay_s)

    def _call(self, due: float) -> None:
        """`due`: when it was to be."""
        self._allowed(due)
        left_s = self._allowance_s
        while self._waiting and left_s > 0:
            reporter = next(iter(self._waiting))
            self._called[reporter] = self._waiting.pop(reporter)
            reporter.resume()
            left_s -= self._cost_s
        self._next_turn = asyncio.get_running_loop().call_later(READING_S, self._end_turn)

    def _end_turn(self) -> None:
        """Those of whom nothing newer came are taken by their word before."""
        self._next_turn = None
        called, self._called = self._called, {}
        for reporter, message in called.items():
            if message is not None:
                self._hand(reporter, message)
        if self._waiting and self._next_turn is None:
            self._have_a_turn()

    def _allowed(self, due: float = math.inf) -> bool:
        """Whether there is time for a report now."""
        now = self._clock()
        most_s = min(TURN_S + SHARE * max(0.0, now - due), LONGEST_TURN_S)
        self._allowance_s = min(most_s, self._allowance_s + SHARE * (now - self._allowed_at))
        self._allowed_at = now
        return self._allowance_s > 0

    def _hand(self, reporter: Reporter, message: bytes) -> None:
        began = self._clock()
        try:
            reporter.report(message)
        finally:
            metrics.LOAD_REPORTS.inc()
            cost_s = self._clock() - began
            self._allowance_s = max(self._allowance_s - cost_s, -LONGEST_TURN_S)
            self._cost_s += _SMOOTHING * (min(cost_s, TURN_S) - self._cost_s)
