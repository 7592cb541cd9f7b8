"""What the cores of both kinds of node share: the events that come to either, beside its own, and the one action beside its own and the
orders to the store."""

from __future__ import annotations

from typing import Generic, TypeAlias, TypeVar

from springtide.clock import Tick
from springtide.protocol import storage
from springtide.protocol.outputs import DecodeUpdate, PrefillUpdate
from springtide.protocol.starts import AbortAttempt, DecodeStart, ForetellTokens, PrefillStart
from springtide.values import value_class

StartT = TypeVar("StartT", PrefillStart, DecodeStart)
UpdateT = TypeVar("UpdateT", PrefillUpdate, DecodeUpdate)

MOST_BETWEEN_TICKS_S = 0.5
"""More than that between two ticks was a pause of this process, in which nobody could be heard."""


@value_class(frozen=True, slots=True)
class Start(Generic[StartT]):
    """A gateway wants an attempt to be run, in its session."""

    session: int
    start: StartT


@value_class(frozen=True, slots=True)
class SessionEnded:
    """A gateway's session is over: everything that was started through it is aborted."""

    session: int


@value_class(frozen=True, slots=True)
class StoreConnected:
    """The engine is connected to a store, with an empty account."""

    num_slots: int
    """The most that one attempt can have."""
    pages: int | None = None
    """So many blocks a step or a pass may have at once; None: as many as there are."""


@value_class(frozen=True, slots=True)
class StoreLost:
    """The stream to the store broke: every slot is gone."""

    reason: str


@value_class(frozen=True, slots=True)
class Quiet:
    """Another engine of the machine wants no idle work beside its own work, or does not any more."""

    wanted: bool


Ordered: TypeAlias = Start[StartT] | AbortAttempt | ForetellTokens | SessionEnded
"""What comes of what a gateway says. Prefill engines are foretold nothing."""
EngineEvent: TypeAlias = Ordered[StartT] | Tick | StoreConnected | StoreLost | Quiet | storage.Notice
"""What happens to an engine of either kind; what it computes tells events of its own."""


@value_class(frozen=True, slots=True)
class SendUpdate(Generic[UpdateT]):
    """An action: one message to the gateway of the session."""

    session: int
    update: UpdateT
