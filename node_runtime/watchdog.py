"""Ends the process when its own model thread hangs. Nothing else could: a thread cannot be killed, and while it may still write to the
arena, its slots are nobody's. Whoever started the process starts it anew."""

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

LOOK_EVERY_S, SAY_S = 1.0, 1.0
HANG_FACTOR, HANG_LEAST_S = 20.0, 30.0


def longest_s(predicted_ms: float, waiting_s: float = 0.0) -> float:
    """What takes longer, beside so much waiting, will not end any more."""
    return max(HANG_LEAST_S, waiting_s + HANG_FACTOR * predicted_ms / 1000)


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    what: str
    limit_s: float


class Seen:
    """For how long something has been under way, as far as one has looked, again and again: in a process or a machine that is suspended no
    time goes by."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._at: object = None
        self._looks = 0

    def look(self, at: object) -> float:
        """Seconds. `at`: what is under way now, None for nothing."""
        self._looks = self._looks + 1 if at is self._at else 0
        self._at = at
        return self._looks * self._every_s


class Watchdog:
    """Looks on from a thread of its own, so that it does not matter what the event loop is at. `on_hang` is called once. What hangs without
    letting go of Python's lock stops this thread too."""

    def __init__(self, on_hang: Callable[[], None]) -> None:
        self._on_hang = on_hang
        self._work: _Work | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._look_on, name="watchdog", daemon=True).start()

    @contextmanager
    def during(self, what: str, limit_s: float) -> Iterator[None]:
        """What is done meanwhile, by one thread at a time, hangs when it takes longer."""
        self._work = _Work(what, limit_s)
        try:
            yield
        finally:
            self._work = None

    def close(self) -> None:
        self._closed.set()

    def _look_on(self) -> None:
        seen = Seen(LOOK_EVERY_S)
        while not self._closed.wait(LOOK_EVERY_S):
            work = self._work
            if seen.look(work) >= (work.limit_s if work is not None else inf):
                assert work is not None
                text = f"{work.what} has not ended within {work.limit_s:.0f} s: the model's thread hangs, and the process ends"
                within(SAY_S, partial(logger.critical, text))
                self._on_hang()
                return
