"""What happens to a prefill group (beside what `node_runtime` tells either kind of engine)."""

from __future__ import annotations

from collections.abc import Sequence

from node_runtime.events import EngineEvent
from springtide.protocol.outputs import Failure, PromptLogprobs, SampledToken
from springtide.protocol.starts import PrefillStart
from springtide.protocol.storage import Acquired
from springtide.protocol.timings import StageTimes
from springtide.values import value_class


@value_class(frozen=True, slots=True)
class PassLeft:
    """The first of several stages is done with the pass: the next one can begin."""

    pass_id: int


@value_class(frozen=True, slots=True)
class PassDone:
    """A pass is done in all stages. `sampled[i]` belongs to row i; None for rows that do not end their prompt, a Failure for one that
    no token can follow. Passes end in the order of their begin."""

    pass_id: int
    sampled: Sequence[SampledToken | Failure | None]
    elapsed_ms: float
    """The time since its begin, or since the end of the pass before it when that came later."""
    waited_ms: float = 0.0
    """What was waited for the prefix, in all stages together."""
    scores: Sequence[PromptLogprobs | None] = ()
    """Of each row; None for rows that want none, and nothing at all where no row wants any."""
    beside_idle: bool | None = None
    """Other engines of the machine did idle work meanwhile; None: for a part of the time, or nobody knows."""
    stages: tuple[StageTimes, ...] = ()
    """Each stage's part, the first one's first; empty where nobody knows."""
    shared: bool = False
    """A decode node's step was computed with it: what it took says nothing of it alone."""


@value_class(frozen=True, slots=True)
class PassInterrupted:
    """The prefix that the pass waited for does not arrive: truncated, which a FetchTruncated tells, or overdue. No stage is at it any
    more."""

    pass_id: int
    overdue: bool
    waited_ms: float = 0.0
    """The same as of PassDone."""


@value_class(frozen=True, slots=True)
class PassFailed:
    """A pass has come to nothing. No stage is at it any more."""

    pass_id: int
    message: str


@value_class(frozen=True, slots=True)
class PassGaveWay:
    """A pass was broken off, as GiveWay has it. No stage is at it any more."""

    pass_id: int


@value_class(frozen=True, slots=True)
class Placed:
    """A prompt that stays here has its slots, and is to be computed. `arrived_at`: when it came here; `asked_at`: when the store was asked,
    both in seconds of the core's clock."""

    session: int
    start: PrefillStart
    acquired: Acquired
    arrived_at: float
    asked_at: float


PassEnded = PassDone | PassInterrupted | PassGaveWay | PassFailed
PassEvent = PassLeft | PassEnded
Event = EngineEvent[PrefillStart] | PassEvent | Placed
