"""The admission check, the second one: would the batch still meet its objective with one more sequence in it? (Mooncake, section 7.)

The Conductor looks ahead; the node knows exactly what runs now, or is about to. Who is accepted but still in prefill is not counted: by
when such an attempt joins, others will have left, and counting both would leave a part of the node unused. Nor is who is in idle capacity,
which makes room.
"""

from __future__ import annotations

from collections.abc import Collection

from decode_node.core.attempt import DecodeAttempt
from springtide.cost import DecodeCost


def predict_step_ms(cost: DecodeCost, running: Collection[DecodeAttempt], joining: DecodeAttempt, max_batch: int) -> float:
    """The predicted time of a step with everything that runs in the batch, as far as it has places, and `joining`."""
    sequences = len(running) + 1
    context = sum(attempt.context_tokens for attempt in running) + joining.context_tokens
    batch = min(sequences, max_batch)
    return cost.predict_ms(batch, round(context * batch / sequences))


def refusal(cost: DecodeCost, accepted: Collection[DecodeAttempt], joining: DecodeAttempt, max_batch: int) -> str | None:
    """Why the attempt may not come in; None when it may."""
    running = [attempt for attempt in accepted if attempt.has_begun and not attempt.idle]
    objective_ms = min(attempt.objective_ms for attempt in (*running, joining))
    predicted_ms = predict_step_ms(cost, running, joining, max_batch)
    if predicted_ms > objective_ms:
        return f"a step would take {predicted_ms:.1f} ms, more than the objective of {objective_ms:g} ms"
    return None
