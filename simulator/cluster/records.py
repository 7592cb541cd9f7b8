"""What became of each request, and the times between its tokens."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from simulator.workload import SimRequest

NOT_REJECTED, LOST = "", "lost"
_PER_OCTAVE = 32
"""Bins: a time is known within 3%."""
_LEAST_EXPONENT, _OCTAVES = -10, 34
"""From a microsecond to some hours, in milliseconds; what is beyond counts in the last bin at either end."""


class Gaps:
    """The times between tokens, each of them, as a histogram: a request's mean hides a stall."""

    def __init__(self) -> None:
        self._counts = [0] * (_OCTAVES * _PER_OCTAVE)

    def add(self, gap_ms: float, count: int) -> None:
        """Counts so many gaps of this length."""
        fraction, exponent = math.frexp(gap_ms) if gap_ms > 0 else (0.5, _LEAST_EXPONENT)
        place = (exponent - _LEAST_EXPONENT) * _PER_OCTAVE + int((2.0 * fraction - 1.0) * _PER_OCTAVE)
        if not 0 <= place < len(self._counts):
            place = 0 if place < 0 else len(self._counts) - 1
        self._counts[place] += count

    def percentile_ms(self, share: float) -> float | None:
        """What at least `share` of the gaps do not exceed; None without any."""
        so_far = list(accumulate(self._counts))
        if not so_far[-1]:
            return None
        octave, within = divmod(bisect_left(so_far, max(share * so_far[-1], 1)) + 1, _PER_OCTAVE)
        return math.ldexp(0.5 + within / (2 * _PER_OCTAVE), octave + _LEAST_EXPONENT)


class Records:
    """Columns, one entry a request: a million requests take some 100 MB. NaN where something did not come about."""

    def __init__(self, requests: Sequence[SimRequest], all_ended: Callable[[], object]) -> None:
        count = len(requests)
        self.requests = requests
        self._all_ended = all_ended
        self.ttft_ms = array("d", [float("nan")]) * count
        self.tbt_ms = array("d", [float("nan")]) * count
        """Mean time between the tokens of the request; 0 of a single token."""
        self.finished_s = array("d", [float("nan")]) * count
        self.first_token_s = array("d", [float("nan")]) * count
        self.last_token_s = array("d", [float("nan")]) * count
        self.cached_tokens = array("q", [0]) * count
        self.output_tokens = array("q", [0]) * count
        self.gaps = Gaps()
        self.reasons: list[str] = []
        """Of rejections, as they first came."""
        self._reason = array("b", [-1]) * count
        self._num_rejected: list[int] = []
        """By reason."""
        self.completed = 0
        self.ended = 0

    def reject(self, index: int, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)
            self._num_rejected.append(0)
        number = self.reasons.index(reason)
        self._reason[index] = number
        self._num_rejected[number] += 1
        self._count_end()

    def rejected(self, index: int) -> str | None:
        reason = self._reason[index]
        return None if reason < 0 else self.reasons[reason]

    def num_rejected(self) -> dict[str, int]:
        return dict(zip(self.reasons, self._num_rejected, strict=True))

    def tokens(self, index: int, count: int, now: float, step_s: float = 0.0) -> None:
        """Notes that so many tokens came, the last one just now and each `step_s` after the one before; since those that came earlier, any
        time may have passed."""
        if self.output_tokens[index]:
            self.gaps.add(1000 * (now - self.last_token_s[index] - (count - 1) * step_s), 1)
            if count > 1:
                self.gaps.add(1000 * step_s, count - 1)
        else:
            self.first_token_s[index] = now
            self.ttft_ms[index] = 1000 * (now - self.requests[index].arrival_s)
        self.last_token_s[index] = now
        self.output_tokens[index] += count

    def finish(self, index: int, now: float, cached_tokens: int) -> None:
        self.finished_s[index] = now
        self.cached_tokens[index] = cached_tokens
        gaps = self.output_tokens[index] - 1
        self.tbt_ms[index] = 1000 * (self.last_token_s[index] - self.first_token_s[index]) / gaps if gaps > 0 else 0.0
        self.completed += 1
        self._count_end()

    def _count_end(self) -> None:
        self.ended += 1
        if self.ended == len(self.requests):
            self._all_ended()
