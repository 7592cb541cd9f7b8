"""Keeps a cost model to what passes really take: a profile of another day, or a measurement on a busy machine, must not last. Pure."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Generic, TypeVar

from springtide.cost import DecodeCost, PrefillCost

CostT = TypeVar("CostT", PrefillCost, DecodeCost)

_WINDOW = 16
_ENOUGH = 4
"""Fewer passes than that may be chance."""
_LEAST, _MOST = 1 / 16, 4.0
FORGET_SLOW_AFTER_S = 30.0
"""A slow spell is forgotten after so long without work: when nothing is admitted for it, nothing would ever show that it is over."""


class CostCalibration(Generic[CostT]):
    """The cost model, corrected. `cost` is the measured model times the median of how much longer than predicted the recent passes took."""

    def __init__(self, measured: CostT) -> None:
        self.cost: CostT = measured
        self._measured: CostT = measured
        self._factor = 1.0
        self._ratios: deque[float] = deque(maxlen=_WINDOW)
        self._observed_at = float("-inf")

    def observe(self, size: int, context: int, elapsed_ms: float, now: float) -> None:
        """A pass of (size, context), as the model's `predict_ms` has them, has taken so long."""
        predicted_ms = self._measured.predict_ms(size, context)
        if predicted_ms > 0 and elapsed_ms > 0:
            self._ratios.append(elapsed_ms / predicted_ms)
            self._observed_at = now
            self._update()

    def tick(self, now: float) -> None:
        """Time has passed."""
        if now - self._observed_at >= FORGET_SLOW_AFTER_S and any(ratio > 1 for ratio in self._ratios):
            self._ratios = deque((min(ratio, 1.0) for ratio in self._ratios), maxlen=_WINDOW)
            self._update()

    def _update(self) -> None:
        if len(self._ratios) < _ENOUGH:
            return
        factor = min(max(median(self._ratios), _LEAST), _MOST)
        if factor != self._factor:
            self._factor, self.cost = factor, self._measured.scaled(factor)
