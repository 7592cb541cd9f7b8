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
