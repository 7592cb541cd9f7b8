"""The scores of predictions: each is set beside what came as soon as that is known, and the recent errors are summed up."""

from __future__ import annotations

import numpy as np

from conductor.core.forecast.queue_bias import QueueBias
from conductor.core.state import PlacedAttempt
from conductor.core.types.events import Quantity, Score
from springtide.protocol.attempts import Progress
from springtide.protocol.status import PredictionErrors

_WINDOW = 1024
_LEAST_ACTUAL = 1.0
"""A millisecond, or a token: an error is set against no less, or whatever takes no time at all would be infinitely wrong."""
_SPARED = 0.5
"""Of what was predicted, what was computed where another prompt's computation has spared the rest: then the time until the first token says
nothing of the queue."""


class Scorekeeper:
    """Sets beside each other what was predicted and what came; teaches `queue_bias` what it sees."""

    def __init__(self, queue_bias: QueueBias) -> None:
        self._queue_bias = queue_bias
        self.errors = ErrorWindow()

    def first_token(self, attempt: PlacedAttempt, event: Progress) -> None:
        """Scores an attempt whose prefill is over. What the event does not tell is not scored."""
        predicted = attempt.prediction
        if predicted is None:
            return
        if event.ttft_ms > 0:
            self._score(attempt, Quantity.TTFT, predicted.ttft_ms, event.ttft_ms)
            spared = 0 < event.compute_ms < _SPARED * predicted.prefill_ms
            waited_ms = event.ttft_ms - predicted.transfer_ms - predicted.prefill_ms
            if not spared:
                self._queue_bias.observe(predicted.prefill_ms, predicted.ahead_ms, max(waited_ms, 0.0))
        if event.compute_ms > 0:
            self._score(attempt, Quantity.QUEUE, predicted.queue_ms, event.queue_ms)
            self._score(attempt, Quantity.PREFILL, predicted.prefill_ms, event.compute_ms)
        if event.fetch_ms > 0:
            self._score(attempt, Quantity.TRANSFER, predicted.transfer_ms, event.fetch_ms)

    def finished(self, attempt: PlacedAttempt, output_tokens: int, now: float) -> tuple[Score, ...]:
        """Scores an attempt whose whole output is out. Returns all its scores."""
        predicted = attempt.prediction
        if predicted is None or output_tokens < 1:
            return ()
        self._score(attempt, Quantity.OUTPUT_TOKENS, predicted.output_tokens, output_tokens)
        if (tbt_ms := attempt.tbt_ms(output_tokens, now)) is not None:
            self._score(attempt, Quantity.TBT, predicted.tbt_ms, tbt_ms)
        return tuple(attempt.scores)

    def _score(self, attempt: PlacedAttempt, quantity: Quantity, predicted: float, actual: float) -> None:
        score = Score(quantity, predicted, actual)
        attempt.scores.append(score)
        self.errors.record(score)


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
