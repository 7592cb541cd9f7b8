"""What happens to a prefill group (beside what `node_runtime` tells either kind of engine)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from node_runtime.events import SessionEnded, StoreLost, StoreUp
from springtide.clock import Tick
from springtide.protocol import storage
from springtide.protocol.outputs import SampledToken
from springtide.protocol.starts import AbortAttempt, PrefillStart


@dataclass(frozen=True, slots=True)
class Start:
    """A gateway's session wants an attempt to be run."""

    session: int
    start: PrefillStart


@dataclass(frozen=True, slots=True)
class PassLeft:
    """The first of several stages is done with the pass: the next one can begin."""

    pass_id: int


@dataclass(frozen=True, slots=True)
class PassDone:
    """In all stages. `sampled[i]` belongs to row i; None for rows that do not end their prompt. Passes end in the order of their begin."""

    pass_id: int
    sampled: Sequence[SampledToken | None]
    elapsed_ms: float
    """From its begin, or from the end of the pass before it when that came later."""
    waited_ms: float = 0.0
    """For the prefix, in all stages together."""


@dataclass(frozen=True, slots=True)
class PassInterrupted:
    """The prefix that the pass waited for does not arrive: truncated, which a FetchTruncated tells, or overdue. No stage is at it any
    more, nor is one after PassFailed."""

    pass_id: int
    overdue: bool
    waited_ms: float = 0.0
    """As of PassDone."""


@dataclass(frozen=True, slots=True)
class PassFailed:
    pass_id: int
    message: str


PassEnded = PassDone | PassInterrupted | PassFailed
Event = Start | AbortAttempt | SessionEnded | PassLeft | PassEnded | Tick | StoreUp | StoreLost | storage.Notice
