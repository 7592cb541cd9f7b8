"""What happens to an engine of either kind (beside the words of gateways and of its store)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """Everything that was started through the session is aborted."""

    session: int


@dataclass(frozen=True, slots=True)
class StoreUp:
    """Connected to a store with an empty account for this engine."""

    num_slots: int
    """Of one attempt at most."""
    pages: int | None = None
    """So many blocks a step or a pass may have at once; None: as many as there are."""


@dataclass(frozen=True, slots=True)
class StoreLost:
    """The stream to the store broke: every slot is gone."""

    reason: str


MOST_BETWEEN_TICKS_S = 0.5
"""What is more than that was a pause of this process, in which nobody could be heard."""
