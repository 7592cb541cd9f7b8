"""The one thread that runs the model, so that the event loop stays free, and the watchdog that notices when it hangs.

First the engine says that it is stalled, and what it had goes on elsewhere: that is soon, for a false alarm does no harm. If it is still at
it much later, the process ends. Nothing else could help: a thread cannot be killed, and while it may still write to the arena, its slots
are nobody's. Whoever started the process starts it anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import ParamSpec, TypeVar

import torch

from springtide.process import within

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

LOOK_EVERY_S, SAY_S = 0.25, 1.0
STALL_FACTOR = 4.0
HANG_FACTOR, HANG_LEAST_S = 20.0, 30.0


def default_threads(num_engines: int) -> int:
    """The cores that this process may use, divided among the engines of the machine."""
    return max(1, len(os.sched_getaffinity(0)) // num_engines)


class ModelThread:
    """The thread: calls run one after another in the order given."""

    def __init__(self, num_threads: int) -> None:
        """`num_threads`: what torch's operators use."""
        torch.set_num_threads(num_threads)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="model", initializer=torch.set_num_threads, initargs=(num_threads,))

    def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Returns what is to be awaited, or given a callback, in the event loop that calls this."""
        return asyncio.get_running_loop().run_in_executor(self._executor, lambda: work(*args, **kwargs))

    async def at_rest(self) -> None:
        """Returns when what was to run by now has ended."""
        await self.run(lambda: None)

    async def close(self) -> None:
        """Returns when what runs has ended; what waits is dropped."""
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)


def longest_s(predicted_ms: float, waiting_s: float = 0.0) -> float:
    """Seconds after which work, beside so much waiting, will not end any more."""
    return max(HANG_LEAST_S, waiting_s + HANG_FACTOR * predicted_ms / 1000)


def stalled_after_s(predicted_ms: float, silence_s: float) -> float:
    """Seconds after which work is worth going on with elsewhere. `silence_s`: of the configuration."""
    return max(silence_s, STALL_FACTOR * predicted_ms / 1000)


@dataclass(frozen=True, slots=True, eq=False)
class _WatchedWork:
    """Something that the model's thread is at, and what it may take."""

    what: str
    limit_s: float
    stall_s: float


class ObservedSpan:
    """A measure of how long something has been under way, as far as one has looked, again and again: in a process or a machine that is
    suspended no time goes by."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._at: object = None
        self._looks = 0

    def look(self, at: object) -> float:
        """Returns seconds. `at`: what is under way now, None for nothing."""
        self._looks = self._looks + 1 if at is not None and at is self._at else 0
        self._at = at
        return self._looks * self._every_s


class Watchdog:
    """A thread that looks on, so that it does not matter what the event loop is at. `on_hang` is called once. What hangs without letting go
    of Python's lock stops this thread too."""

    def __init__(self, on_hang: Callable[[], None]) -> None:
        self._on_hang = on_hang
        self._work: _WatchedWork | None = None
        self._stalled: _WatchedWork | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._look_on, name="watchdog", daemon=True).start()

    @contextmanager
    def during(self, what: str, limit_s: float, stall_s: float = inf) -> Iterator[None]:
        """What is done meanwhile, by one thread at a time, stalls when it takes longer than `stall_s`, and hangs when it takes longer than
        `limit_s`."""
        self._work = _WatchedWork(what, limit_s, stall_s)
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
        """Looks on no longer."""
        self._closed.set()

    def _look_on(self) -> None:
        seen = ObservedSpan(LOOK_EVERY_S)
        while not self._closed.wait(LOOK_EVERY_S):
            work = self._work
            working_s = seen.look(work)
            if work is None:
                continue
            if working_s >= work.stall_s:
                self._stalled = work
            if working_s >= work.limit_s:
                text = f"{work.what} has not ended within {work.limit_s:.0f} s: the model's thread hangs, and the process ends"
                within(SAY_S, partial(logger.critical, text))
                self._on_hang()
                return
