"""The times between tokens, each of them, as a histogram: a request's mean hides a stall."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

_PER_OCTAVE = 32
"""Bins: a time is known within 3%."""
_LEAST_EXPONENT, _OCTAVES = -10, 34
"""From a microsecond to some hours, in milliseconds; what is beyond counts in the last bin at either end."""


class Gaps:
    def __init__(self) -> None:
        self._counts = [0] * (_OCTAVES * _PER_OCTAVE)

    def add(self, gap_ms: float, count: int) -> None:
        """So many gaps of this length."""
        fraction, exponent = math.frexp(gap_ms) if gap_ms > 0 else (0.5, _LEAST_EXPONENT)
        place = (exponent - _LEAST_EXPONENT) * _PER_OCTAVE + int((2.0 * fraction - 1.0) * _PER_OCTAVE)
        self._counts[min(max(place, 0), len(self._counts) - 1)] += count

    def percentile_ms(self, share: float) -> float | None:
        """What at least `share` of the gaps do not exceed; None without any."""
        so_far = list(accumulate(self._counts))
        if not so_far[-1]:
            return None
        octave, within = divmod(bisect_left(so_far, max(share * so_far[-1], 1)) + 1, _PER_OCTAVE)
        return math.ldexp(0.5 + within / (2 * _PER_OCTAVE), octave + _LEAST_EXPONENT)
