"""The hedging of reads from peers: after how long another source is asked to help."""

from __future__ import annotations

import statistics
from collections import deque

_WINDOW = 256
_LATE_FACTOR = 4
"""Against the median: a percentile near the end would take the reads from one slow store for the rule."""
_REFRESH_EVERY = 16
_LEAST_S, _MOST_S = 0.02, 1.0
_FULL_PRICE_BYTES = 1 << 20
"""Smaller reads take hardly less time than one of so much."""


class Hedging:
    """The delay of hedging: a read is late when it takes four times as long as the middle one of those lately, for as many bytes; never
    before 20 ms, always after a second."""

    def __init__(self) -> None:
        self._s_per_byte: deque[float] = deque(maxlen=_WINDOW)
        self._seen = 0
        self._median: float | None = None

    def observe(self, num_bytes: int, elapsed_s: float) -> None:
        """Takes in how long a read has taken."""
        self._s_per_byte.append(elapsed_s / max(num_bytes, _FULL_PRICE_BYTES))
        self._seen += 1
        if self._median is None or self._seen % _REFRESH_EVERY == 0:
            self._median = statistics.median(self._s_per_byte)

    def delay_s(self, num_bytes: int) -> float:
        """The time after which a read of so many bytes is late."""
        if self._median is None:
            return _MOST_S
        return min(max(_LATE_FACTOR * self._median * max(num_bytes, _FULL_PRICE_BYTES), _LEAST_S), _MOST_S)
