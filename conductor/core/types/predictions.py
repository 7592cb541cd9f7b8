"""What was predicted beside what came: of each attempt when it ends, and the errors of the recent ones."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from springtide.protocol.status import PredictionErrors

_WINDOW = 1024
_LEAST_ACTUAL = 1.0
"""A millisecond, or a token: an error is set against no less, or whatever takes no time at all would be infinitely wrong."""


class Quantity(Enum):
    """What is predicted of an attempt; in milliseconds, except `OUTPUT_TOKENS`."""

    TTFT = "ttft"
    QUEUE = "queue"
    TRANSFER = "transfer"
    PREFILL = "prefill"
    TBT = "tbt"
    OUTPUT_TOKENS = "output_tokens"

    # Each attempt looks several up: by identity, as they are single, rather than by their names' hashes.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Score:
    quantity: Quantity
    predicted: float
    actual: float

    @property
    def relative(self) -> float:
        """How much too high the prediction was, relative to what came."""
        return (self.predicted - self.actual) / max(self.actual, _LEAST_ACTUAL)


class ErrorWindow:
    """The latest 1,024 scores of each quantity: 16 KiB each."""

    def __init__(self) -> None:
        self._pairs = {quantity: np.zeros((2, _WINDOW)) for quantity in Quantity}
        self._seen = dict.fromkeys(Quantity, 0)

    def record(self, score: Score) -> None:
        seen, pairs = self._seen[score.quantity], self._pairs[score.quantity]
        pairs[0, seen % _WINDOW], pairs[1, seen % _WINDOW] = score.predicted, score.actual
        self._seen[score.quantity] = seen + 1

    def summaries(self) -> list[PredictionErrors]:
        """How good the recent predictions were, of every quantity of which there is something to say."""
        return [self._summary(quantity) for quantity in Quantity if self._seen[quantity]]

    def _summary(self, quantity: Quantity) -> PredictionErrors:
        count = min(self._seen[quantity], _WINDOW)
        predicted, actual = self._pairs[quantity][:, :count]
        errors = np.abs(predicted - actual) / np.maximum(actual, _LEAST_ACTUAL)
        median, p90 = np.percentile(errors, (50, 90))
        bias = float((predicted - actual).sum()) / max(float(actual.sum()), _LEAST_ACTUAL)
        return PredictionErrors(quantity.value, count, float(median), float(p90), bias)
