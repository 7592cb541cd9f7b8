"""Prometheus metrics of this process's transfers. Counted in plain numbers where they are asked for, since that is done for every batch of
some microseconds; made into samples when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from springtide.metrics import PlainHistogram

FAILURES = Counter(
    "springtide_messenger_failures_total", "Batches that failed, slices that were refused, connections not made", ["transport", "kind"]
)
RDMA_PATHS = Gauge("springtide_messenger_rdma_paths", "Paths that connections of this process were made with", ["device"])
RDMA_PATHS_LOST = Counter("springtide_messenger_rdma_paths_lost_total", "Paths of either direction that broke", ["device"])
_BUCKETS_S = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_LABELS = ("transport", "direction")


class Meter:
    """The counts of one transport and direction, all connections together. Used by one thread, that of the event loop."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.batches = PlainHistogram(_BUCKETS_S)
        """How long each took, in seconds."""

    def count(self, num_bytes: int, seconds: float) -> None:
        """Counts a batch that has ended, well or not."""
        self.num_bytes += num_bytes
        self.batches.observe(seconds)


_meters: dict[tuple[str, str], Meter] = {}


def meter(transport: str, direction: str) -> Meter:
    """The meter of that transport and direction."""
    return _meters.setdefault((transport, direction), Meter())


class _Transfers(Collector):
    def describe(self) -> tuple[CounterMetricFamily, CounterMetricFamily, HistogramMetricFamily]:
        moved = CounterMetricFamily("springtide_messenger_bytes_total", "Bytes moved", labels=_LABELS)
        ended = CounterMetricFamily("springtide_messenger_batches_total", "Batches ended, well or not", labels=_LABELS)
        return moved, ended, HistogramMetricFamily("springtide_messenger_batch_seconds", "Duration of a batch", labels=_LABELS)

    def collect(self) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
        moved, ended, seconds = self.describe()
        for labels, one in _meters.items():
            moved.add_metric(labels, one.num_bytes)
            ended.add_metric(labels, one.batches.count)
            one.batches.add_to(seconds, labels)
        yield from (moved, ended, seconds)


TRANSFERS = _Transfers()
REGISTRY.register(TRANSFERS)
