"""Throughput, goodput and latencies, from what was seen of each request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request, timed by its client, in seconds on one clock."""

    sent_s: float
    token_times_s: tuple[float, ...]
    """When each message with text came: one a token, save where a token ends inside a character."""
    ended_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    """Its kind; None for a request that was answered in full."""

    @property
    def ttft_ms(self) -> float:
        return (self.token_times_s[0] - self.sent_s) * 1e3

    @property
    def tbt_ms(self) -> list[float]:
        """The time between each two messages with text."""
        return [float(gap) for gap in np.diff(self.token_times_s) * 1e3]

    def within(self, ttft_slo_ms: float, tbt_slo_ms: float) -> bool:
        """Answered in full, its first token and every one after that in time."""
        return self.error is None and self.ttft_ms <= ttft_slo_ms and max(self.tbt_ms, default=0.0) <= tbt_slo_ms


@dataclass(frozen=True, slots=True)
class Distribution:
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """The distribution of values; None for none. Percentiles are interpolated linearly."""
        if not values:
            return None
        return cls(float(np.mean(values)), *(float(p) for p in np.percentile(values, PERCENTILES)))


@dataclass(frozen=True, slots=True)
class Summary:
    """Latencies and tokens are those of requests answered in full. Rates are per second of `duration_s`, first sending to last answer."""

    requests: int
    completed: int
    errors: dict[str, int]
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    goodput_requests_per_s: float
    within_slos: int
    ttft_slo_ms: float
    tbt_slo_ms: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    ttft_ms: Distribution | None
    tbt_ms: Distribution | None


def summarize(records: Sequence[RequestRecord], ttft_slo_ms: float, tbt_slo_ms: float) -> Summary:
    """Raises ValueError for no records."""
    if not records:
        raise ValueError("no request was sent")
    completed = [record for record in records if record.error is None]
    duration_s = max(record.ended_s for record in records) - min(record.sent_s for record in records)
    within = sum(record.within(ttft_slo_ms, tbt_slo_ms) for record in completed)
    prompt_tokens = sum(record.prompt_tokens for record in completed)
    output_tokens = sum(record.output_tokens for record in completed)
    return Summary(
        requests=len(records),
        completed=len(completed),
        errors=dict(Counter(record.error for record in records if record.error is not None)),
        duration_s=duration_s,
        requests_per_s=len(completed) / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        prompt_tokens_per_s=prompt_tokens / duration_s,
        goodput_requests_per_s=within / duration_s,
        within_slos=within,
        ttft_slo_ms=ttft_slo_ms,
        tbt_slo_ms=tbt_slo_ms,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(record.cached_tokens for record in completed),
        ttft_ms=Distribution.of([record.ttft_ms for record in completed]),
        tbt_ms=Distribution.of([gap for record in completed for gap in record.tbt_ms]),
    )
