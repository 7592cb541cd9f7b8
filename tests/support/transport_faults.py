"""The faults that can befall operations of a transport, and which one befalls which. Deterministic: the seed decides."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Operation = Literal["read", "write", "connect"]
FaultKind = Literal[
    "fail", "partial", "drop", "stale", "delay", "stand", "slow", "hang", "notify_twice", "notify_late", "notify_lost", "refuse"
]


@dataclass(frozen=True, slots=True)
class TransferFault:
    """A fault of one of these kinds:
    - fail: the batch raises PeerLost, nothing was moved; the connection stays
    - partial: as fail, but a part of the batch was moved
    - drop: as partial, and the connection is broken from then on
    - stale: one slice of the batch, picked at random, is refused with StaleHandle
    - delay: the batch waits `delay_s` before it moves anything
    - stand: the batch waits, before it moves anything, until the plan says `go_on`
    - slow: the batch goes no faster than `bytes_per_s`, which it shares with others that are slow on that connection
    - hang: nothing is moved until the deadline
    - notify_twice: the notification is delivered twice
    - notify_late: the notification is delivered `delay_s` after the write has returned
    - notify_lost: the notification is not delivered, though the write succeeds
    - refuse: connecting raises PeerLost
    """

    kind: FaultKind
    operation: Operation | None = None
    """The operation that it befalls; None: whichever it can befall, connecting is only ever refused."""
    probability: float = 1.0
    after: int = 0
    """Operations that it could befall and that pass unharmed first."""
    times: int | None = None
    """Times that it strikes at most; None: without limit."""
    delay_s: float = 0.0
    bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise ValueError(f"TransferFault.probability must be between 0 and 1, not {self.probability}")
        if (self.kind == "slow") != (self.bytes_per_s > 0):
            raise ValueError(f"TransferFault.bytes_per_s must be given for slow, and only for that; {self.kind} has {self.bytes_per_s}")
        if self.operation is not None and (self.kind == "refuse") != (self.operation == "connect"):
            raise ValueError(f"TransferFault.operation {self.operation!r} cannot be befallen by {self.kind}")

    def befalls(self, operation: Operation) -> bool:
        if (self.kind == "refuse") != (operation == "connect"):
            return False
        return self.operation in (None, operation)


class FaultPlan:
    """Decides for every operation which faults befall it. May be shared by several transports."""

    def __init__(self, faults: Sequence[TransferFault] = (), seed: int = 0) -> None:
        self._faults = tuple(faults)
        self._seen = [0] * len(faults)
        self._struck = [0] * len(faults)
        self.armed = True
        """While it is not, nothing fails."""
        self.going_on = asyncio.Event()
        self.random = random.Random(seed)

    def go_on(self) -> None:
        """Lets what stands move, and stands in nobody's way from now on."""
        self.going_on.set()

    def draw(self, operation: Operation) -> dict[FaultKind, TransferFault]:
        """The faults of the next operation, by kind."""
        drawn: dict[FaultKind, TransferFault] = {}
        for index, fault in enumerate(self._faults):
            if not self.armed or not fault.befalls(operation):
                continue
            self._seen[index] += 1
            spent = fault.times is not None and self._struck[index] >= fault.times
            if self._seen[index] > fault.after and not spent and self.random.random() < fault.probability:
                self._struck[index] += 1
                drawn[fault.kind] = fault
        return drawn

    @property
    def struck(self) -> Counter[FaultKind]:
        """Times that each kind was drawn so far."""
        counter: Counter[FaultKind] = Counter()
        for fault, times in zip(self._faults, self._struck, strict=True):
            counter[fault.kind] += times
        return counter
