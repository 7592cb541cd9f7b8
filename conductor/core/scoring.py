"""Keeps score of the predictions: each is set beside what came as soon as that is known."""

from __future__ import annotations

from conductor.core.forecast.queue_bias import QueueBias
from conductor.core.state import PlacedAttempt
from conductor.core.types.predictions import ErrorWindow, Quantity, Score
from springtide.protocol.attempts import Progress


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
            waited_ms = event.ttft_ms - predicted.transfer_ms - predicted.prefill_ms
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
        if attempt.first_token_at is not None and output_tokens > 1:
            self._score(attempt, Quantity.TBT, predicted.tbt_ms, 1000.0 * (now - attempt.first_token_at) / (output_tokens - 1))
        return tuple(attempt.scores)

    def _score(self, attempt: PlacedAttempt, quantity: Quantity, predicted: float, actual: float) -> None:
        score = Score(quantity, predicted, actual)
        attempt.scores.append(score)
        self.errors.record(score)
