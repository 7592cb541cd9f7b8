"""Prometheus metrics that every process has, and series of what may have ever new names."""

from __future__ import annotations

import asyncio

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics

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


class LatestSeries:
    """The counters whose first label is a name of which there are ever new ones, such as an instance's or a tenant's: only the names used
    last have series. Used by one thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._series: dict[str, dict[tuple[Counter, tuple[str, ...]], Counter]] = {}
        """By name, the one used last at the end."""

    def counter(self, metric: Counter, name: str, *labels: str) -> Counter:
        """The metric's counter of these labels, of which the name is the first."""
        series = self._series.pop(name, None) or {}
        self._series[name] = series
        key = (metric, labels)
        counter = series.get(key)
        if counter is None:
            counter = series[key] = metric.labels(name, *labels)
            if len(self._series) > self._most:
                oldest = next(iter(self._series))
                for other, its_labels in self._series.pop(oldest):
                    other.remove(oldest, *its_labels)
        return counter
