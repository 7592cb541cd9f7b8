"""What engines compute on: each its own accelerator, or all of them the cores of one machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from simulator.cluster.loop import Loop, Timer

Compute: TypeAlias = "Callable[[float, Callable[[], None]], Job]"
"""Begins so many seconds of an engine's work; the second argument is called when it is done."""


class Job:
    """A job of so many seconds of work for one engine, of which `progress` is done as of `since`, at `rate` seconds a second from then
    on."""

    __slots__ = ("_done", "_loop", "_processor", "_timer", "contention", "progress", "rate", "since", "work_s")

    def __init__(self, processor: Processor, loop: Loop, work_s: float, contention: float, done: Callable[[], None]) -> None:
        self._processor, self._loop, self._done = processor, loop, done
        self._timer: Timer | None = None
        self.work_s, self.contention = work_s, contention
        self.progress, self.since, self.rate = 0.0, loop.now, 1.0

    def progress_now(self) -> float:
        return self.progress + self.rate * (self._loop.now - self.since)

    def resize(self, work_s: float) -> None:
        """Makes it so much work altogether, no less than has been done."""
        self.work_s = work_s
        self.set_rate(self.rate)

    def set_rate(self, rate: float) -> None:
        self.progress, self.since, self.rate = self.progress_now(), self._loop.now, rate
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.after((self.work_s - self.progress) / rate, self._end)

    def _end(self) -> None:
        self._processor.ended(self)
        self._done()


class Processor:
    """What engines compute on. With `cores`, engines of one core each share them equally when there are more at work than cores; None: each
    has its own. They share the memory as well: each other core at work makes a job longer by the share that is its `contention`."""

    def __init__(self, loop: Loop, cores: float | None = None) -> None:
        self._loop, self._cores = loop, cores
        self._jobs: dict[Job, None] = {}
        """In the order of their begin, as sets have none that repeats itself."""

    def start(self, contention: float, work_s: float, done: Callable[[], None]) -> Job:
        job = Job(self, self._loop, work_s, contention, done)
        self._jobs[job] = None
        if self._cores is None:
            job.set_rate(1.0)
        else:
            self._share()
        return job

    def ended(self, job: Job) -> None:
        self._jobs.pop(job, None)
        if self._cores is not None:
            self._share()

    def _share(self) -> None:
        if self._cores is None or not self._jobs:
            return
        busy = min(self._cores, len(self._jobs))
        for job in self._jobs:
            job.set_rate(busy / len(self._jobs) / (1.0 + job.contention * (busy - 1.0)))
