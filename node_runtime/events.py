"""What happens to an engine of either kind (beside the store's notices in `node_runtime.storage`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Abort:
    attempt_id: str


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """Everything that was started through the session is aborted."""

    session: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: a few of them a second."""


MOST_BETWEEN_TICKS_S = 0.5
"""What is more than that was a pause of this process, in which nobody could be heard."""
