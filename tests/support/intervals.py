"""Spans of time, and how much of one several others cover."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def overlap_s(interval: Interval, others: Iterable[Interval]) -> float:
    """How much of the interval the others cover together."""
    begin, end = interval
    return sum(max(0.0, min(end, b) - max(begin, a)) for a, b in merged(others))
