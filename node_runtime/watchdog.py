"""Notices when the model's thread of the process hangs. First the engine says that it is stalled, and what it had goes on elsewhere: that
is soon, for a false alarm does no harm. If it is still at it much later, the process ends. Nothing else could help: a thread cannot be
killed, and while it may still write to the arena, its slots are nobody's. Whoever started the process starts it anew."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf

from springtide.process import within

logger = logging.getLogger(__name__)

LOOK_EVERY_S, SAY_S = 0.25, 1.0
STALL_FACTOR = 4.0
HANG_FACTOR, HANG_LEAST_S = 20.0, 30.0


def longest_s(predicted_ms: float, waiting_s: float = 0.0) -> float:
    """What takes longer, beside so much waiting, will not end any more."""
    return max(HANG_LEAST_S, waiting_s + HANG_FACTOR * predicted_ms / 1000)


def stalled_after_s(predicted_ms: float, silence_s: float) -> float:
    """What takes longer is worth going on with elsewhere. `silence_s`: of the configuration."""
    return max(silence_s, STALL_FACTOR * predicted_ms / 1000)


def never() -> bool:
    return False


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    what: str
    limit_s: float
    stall_s: float
    waits: Callable[[], bool]


class Seen:
    """For how long something has been under way, as far as one has looked, again and again: in a process or a machine that is suspended no
    time goes by."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._at: object = None
        self._looks = 0

    def look(self, at: object) -> float:
        """Seconds. `at`: what is under way now, None for nothing."""
        self._looks = self._looks + 1 if at is not None and at is self._at else 0
        self._at = at
        return self._looks * self._every_s


class Watchdog:
    """Looks on from a thread of its own, so that it does not matter what the event loop is at. `on_hang` is called once. What hangs without
    letting go of Python's lock stops this thread too."""

    def __init__(self, on_hang: Callable[[], None]) -> None:
        self._on_hang = on_hang
        self._work: _Work | None = None
        self._stalled: _Work | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._look_on, name="watchdog", daemon=True).start()

    @contextmanager
    def during(self, what: str, limit_s: float, stall_s: float, waits: Callable[[], bool] = never) -> Iterator[None]:
        """What is done meanwhile, by one thread at a time, stalls when it takes longer than `stall_s`, and hangs when it takes longer than
        `limit_s`. While it `waits`, for what others watch over, it does not stall."""
        self._work = _Work(what, limit_s, stall_s, waits)
        try:
            yield
        finally:
            self._work = None

    @property
    def stalled(self) -> str:
        """What is under way and stalls; empty: nothing does."""
        work = self._stalled
        return f"{work.what} has not ended within {work.stall_s:.1f} s" if work is not None and work is self._work else ""

    def close(self) -> None:
        self._closed.set()

    def _look_on(self) -> None:
        seen, at_work = Seen(LOOK_EVERY_S), Seen(LOOK_EVERY_S)
        while not self._closed.wait(LOOK_EVERY_S):
            work = self._work
            working_s = at_work.look(None if work is None or work.waits() else work)
            if work is not None and working_s >= work.stall_s:
                self._stalled = work
            if seen.look(work) >= (work.limit_s if work is not None else inf):
                assert work is not None
                text = f"{work.what} has not ended within {work.limit_s:.0f} s: the model's thread hangs, and the process ends"
                within(SAY_S, partial(logger.critical, text))
                self._on_hang()
                return
