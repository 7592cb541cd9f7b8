"""Prometheus metrics that every process has, and series of what may have ever new names."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily

from springtide import __version__

disable_created_metrics()  # type: ignore[no-untyped-call]  # when each series began: they would be half of every page

BUILD = Gauge("springtide_build_info", "1; its labels say which version the process runs, and as what", ["version", "role"])
EVENT_LOOP_LAG_SECONDS = Histogram(
    "springtide_event_loop_lag_seconds",
    "By how much later than wanted the event loop had its turn, looked at four times a second",
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
)
VALKEY_UP = Gauge("springtide_valkey_up", "1 if Valkey answered when it was last asked, 0 if not, by what it was asked for", ["client"])
CERTIFICATE_EXPIRY = Gauge(
    "springtide_certificate_expiry_timestamp_seconds",
    "Unix time at which the certificate in use ends: cluster, what processes show one another; public, what clients are shown",
    ["certificate"],
)

_LAG_EVERY_S = 0.25


def show_build(role: str) -> None:
    BUILD.labels(__version__, role).set(1)


async def watch_event_loop() -> None:
    """Goes on for ever."""
    loop = asyncio.get_running_loop()
    while True:
        wanted_at = loop.time() + _LAG_EVERY_S
        await asyncio.sleep(_LAG_EVERY_S)
        EVENT_LOOP_LAG_SECONDS.observe(max(0.0, loop.time() - wanted_at))


class PlainHistogram:
    """A histogram in plain numbers, for what is told too often for one of the library's: made into samples when somebody asks. Its bounds
    are shown as they are given."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        """By bucket, the last for all above any."""
        self._sum = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Adds it to the family as its metric of these labels. From any thread."""
        cumulated = accumulate(map(float, list(self._counts)))
        family.add_metric(labels, list(zip((*map(str, self._bounds), "+Inf"), cumulated, strict=True)), self._sum)


class NamedSeries:
    """The series of counters whose first label is a name of which there are ever new ones, such as an instance's or a tenant's: so many
    names have some of their own. When there are more, those that were not used for `UNUSED_S` make room, and if there are none, what is new
    counts as `OTHERS`': nobody's names take another's series away, and sums are right. Used by one thread."""

    OTHERS = "(others)"
    UNUSED_S = 3600.0

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._names: dict[str, _OfName] = {}
        """By when they were last used."""

    def counter(self, metric: Counter, name: str, *labels: str) -> Counter:
        """The metric's counter of these labels, of which the name is the first."""
        now, known = self._clock(), self._names.pop(name, None)
        if known is None:
            if len(self._names) >= self._most and not self._has_made_room(now):
                return metric.labels(self.OTHERS, *labels)
            known = _OfName(now)
        known.used_at = now
        self._names[name] = known
        key = (metric, labels)
        if (counter := known.counters.get(key)) is None:
            counter = known.counters[key] = metric.labels(name, *labels)
        return counter

    def _has_made_room(self, now: float) -> bool:
        name, oldest = next(iter(self._names.items()))
        if now - oldest.used_at < self.UNUSED_S:
            return False
        del self._names[name]
        for metric, labels in oldest.counters:
            metric.remove(name, *labels)
        return True


@dataclass(slots=True)
class _OfName:
    used_at: float
    counters: dict[tuple[Counter, tuple[str, ...]], Counter] = field(default_factory=dict)
