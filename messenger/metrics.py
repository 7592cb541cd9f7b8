"""Prometheus metrics of this process's transfers, counted where they are asked for."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

BYTES = Counter("springtide_messenger_bytes_total", "Bytes moved", ["transport", "direction"])
BATCHES = Counter("springtide_messenger_batches_total", "Batches ended, well or not", ["transport", "direction"])
FAILURES = Counter(
    "springtide_messenger_failures_total", "Batches that failed, slices that were refused, connections not made", ["transport", "kind"]
)
SECONDS = Histogram(
    "springtide_messenger_batch_seconds",
    "Duration of a batch",
    ["transport", "direction"],
    buckets=(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
)
