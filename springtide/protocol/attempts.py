"""Words about attempts: what was predicted of one, and how it gets on."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Annotated

from springtide.ids import AttemptId, GatewayId, InstanceId
from springtide.protocol.codec import As
from springtide.values import value_class

NO_ATTEMPT = AttemptId("")


class Phase(IntEnum):
    """How far an attempt is. It only ever grows: a message that would lower it is late."""

    PREFILL = 1
    DECODE = 2
    FINISHED = 3
    FAILED = 4
    MOVED = 5
    """It is over, and another attempt of its request goes on: the one that has taken its place, or the one whose place it was to take."""

    @property
    def over(self) -> bool:
        return self >= Phase.FINISHED


def _measured(amount: float) -> float:
    return amount if 0 <= amount < math.inf else 0.0


Measured = Annotated[float, As(float, _measured)]
"""Of time or tokens; 0 where it was not told. What comes over the wire and is no amount counts as not told: it would spoil what is learnt
from it for good."""


@value_class(frozen=True, slots=True)
class Prediction:
    """What the Conductor that placed an attempt predicted of it; what comes teaches every Conductor that knows it."""

    ttft_ms: Measured
    queue_ms: Measured
    transfer_ms: Measured
    prefill_ms: Measured
    tbt_ms: Measured
    """Counts everything that was promised to its decode node."""
    output_tokens: Measured
    ahead_ms: Measured
    """All the work that lay before it at its prefill instance; `queue_ms` is the part of it that it was to wait for."""


@value_class(frozen=True, slots=True)
class Progress:
    """An attempt has reached `phase`. Sent to every Conductor; late and repeated ones are no-ops."""

    attempt_id: AttemptId
    phase: Phase
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_ms: Measured = 0.0
    remote_tokens: int = 0
    """Cached ones that came from another node, in `fetch_ms`."""
    fetch_ms: Measured = 0.0
    """0 when nothing was fetched."""
    queue_ms: Measured = 0.0
    """Of its prefill, as `compute_ms`; 0 when not told."""
    compute_ms: Measured = 0.0


@value_class(frozen=True, slots=True)
class LiveAttempt:
    """An attempt that runs, as Conductors are told of those that they did not place. Raises ValueError, naming the field."""

    attempt_id: AttemptId
    prefill_id: InstanceId
    decode_id: InstanceId
    phase: Phase
    num_tokens: int
    cached_tokens: int = 0
    tenant: str = ""
    max_new_tokens: int = 0
    """Upper bound of its output; 0: none."""
    prediction: Prediction | None = None
    """By the Conductor that placed it; None: not known."""
    idle: bool = False
    """As of Terms: it counts for nothing where others are concerned."""
    output_tokens: int = 0
    """Of `num_tokens`, those of the output, which earlier attempts have made."""
    successor_of: AttemptId = NO_ATTEMPT
    """As of Schedule."""

    def __post_init__(self) -> None:
        if not 0 <= self.cached_tokens < self.num_tokens:
            raise ValueError(f"cached_tokens must be in [0, num_tokens), not {self.cached_tokens} of {self.num_tokens}")


AttemptReport = Progress | LiveAttempt
"""Of an attempt that the Conductor knows; or of one that another Conductor has placed."""


@value_class(frozen=True, slots=True)
class Renew:
    """All the attempts of a gateway that run. One that two of its renewals on end do not list is over; that it is may have been lost on the
    way, while one renewal may just have been ahead of the placement's answer."""

    gateway_id: GatewayId
    attempts: tuple[LiveAttempt, ...]
