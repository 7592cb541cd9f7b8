"""What a run came to, as the JSON that `springtide simulate --json` writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from simulator.cluster.records import Records

PERCENTILES = (50, 90, 99)


def result_of(records: Records, series: dict[str, Any], settings: dict[str, Any], ttft_slo_ms: float, tbt_slo_ms: float) -> dict[str, Any]:
    """`summary`, `settings`, `series` and `requests`. A request counts as goodput when it completed in full with its first token within
    `ttft_slo_ms` and its tokens, in the mean, within `tbt_slo_ms` of one another. Percentiles of the time between tokens are over
    requests' means, each weighing as many tokens as it has, those of the gaps over every single one; what was rejected counts in none."""
    ttft, tbt, finished = (np.frombuffer(column) for column in (records.ttft_ms, records.tbt_ms, records.finished_s))
    cached, output = (np.frombuffer(column, np.int64) for column in (records.cached_tokens, records.output_tokens))
    done = ~np.isnan(finished)
    inputs = np.fromiter((request.input_tokens for request in records.requests), np.int64, len(records.requests))
    arrivals = np.fromiter((request.arrival_s for request in records.requests), np.float64, len(records.requests))
    good = done & (ttft <= ttft_slo_ms) & (tbt <= tbt_slo_ms)
    rejected = records.num_rejected()
    span_s = float(np.nanmax(finished) - arrivals[0]) if done.any() else 0.0
    summary: dict[str, Any] = {
        "requests": len(records.requests),
        "completed": int(done.sum()),
        "rejected": sum(rejected.values()),
        "rejected_by_reason": rejected,
        "goodput_requests": int(good.sum()),
        "goodput_per_s": float(good.sum()) / span_s if span_s else 0.0,
        "slo_attainment": float(good.sum()) / max(len(records.requests), 1),
        "wasted_prefill_tokens": int((inputs - cached)[~done & ~np.isnan(ttft)].sum()),
        **_spread("ttft_ms", ttft[done], None),
        **_spread("tbt_ms", tbt[done], np.maximum(output[done] - 1, 0)),
        **{f"gap_ms_p{percentile}": records.gaps.percentile_ms(percentile / 100) for percentile in PERCENTILES},
        "hit_rate": float(cached[done].sum()) / max(int(inputs[done].sum()), 1),
        "output_tokens": int(output[done].sum()),
        "duration_s": span_s,
    }
    return {
        "summary": summary,
        "settings": {**settings, "ttft_slo_ms": ttft_slo_ms, "tbt_slo_ms": tbt_slo_ms},
        "series": series,
        "requests": {
            "arrival_s": arrivals.round(3).tolist(),
            "input_tokens": inputs.tolist(),
            "output_tokens": output.tolist(),
            "cached_tokens": cached.tolist(),
            "ttft_ms": _with_none(ttft.round(1)),
            "tbt_ms": _with_none(tbt.round(2)),
            "rejected": [records.rejected(index) for index in range(len(records.requests))],
        },
    }


def _spread(name: str, values: np.ndarray, weights: np.ndarray | None) -> dict[str, float | None]:
    if not len(values) or (weights is not None and not weights.sum()):
        return {f"{name}_mean": None, **{f"{name}_p{percentile}": None for percentile in PERCENTILES}}
    return {
        f"{name}_mean": float(np.average(values, weights=weights)),
        **{f"{name}_p{percentile}": _percentile(values, weights, percentile / 100) for percentile in PERCENTILES},
    }


def _percentile(values: np.ndarray, weights: np.ndarray | None, share: float) -> float:
    """The least value that at least `share` of the weight does not exceed."""
    order = np.argsort(values, kind="stable")
    cumulative = np.cumsum(np.ones(len(values)) if weights is None else weights[order])
    return float(values[order][np.searchsorted(cumulative, share * cumulative[-1])])


def _with_none(values: Sequence[float] | np.ndarray) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values]
