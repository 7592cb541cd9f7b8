"""Words of what an attempt's time went into, as nodes tell it of attempts that are traced (docs/tracing.md).

Times count from when the attempt came to the node, on that node's own clock: whoever hears of them knows when it sent the attempt there
and when it heard, and places them in between.
"""

from __future__ import annotations

from springtide.ids import AttemptId
from springtide.values import value_class


@value_class(frozen=True, slots=True)
class StageTimes:
    """A stage's part of a pass."""

    end_ms: float
    """When it ended, after the pass began."""
    busy_ms: float
    waited_ms: float
    """For the prefix."""


@value_class(frozen=True, slots=True)
class PassTimes:
    """One chunk of a prompt on its way through the stages."""

    at_ms: float
    took_ms: float
    start: int
    """Of the prompt, the chunk's first token."""
    num_tokens: int
    others: int = 0
    """Chunks of other attempts in the same pass."""
    waited_ms: float = 0.0
    """For the prefix, in all stages together."""
    stages: tuple[StageTimes, ...] = ()
    """Empty where nobody knows of any."""


@value_class(frozen=True, slots=True)
class PrefillTimes:
    """What a prompt's time went into, beside what PrefillDone says in any case."""

    age_ms: float
    """When this was sent."""
    slots_ms: float
    """When it had its slots."""
    fetch_at_ms: float = 0.0
    """When the fetch of its prefix was ordered."""
    fetch_bytes: int = 0
    """Of what came of it."""
    passes: tuple[PassTimes, ...] = ()
    passes_left_out: int = 0
    """Further ones, of which nothing is told."""


@value_class(frozen=True, slots=True)
class DecodeTimes:
    """What an output's time went into, so far. Sent with its first step and its last."""

    attempt_id: AttemptId
    age_ms: float
    """When this was sent."""
    slots_ms: float
    """When it had its slots."""
    prompt_ms: float
    """When its prompt was in them."""
    steps: int
    """That it took part in since."""
    steps_ms: float
    """Of all these."""
    longest_step_ms: float
