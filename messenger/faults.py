"""Faults that the inproc transport injects, so that tests see what real networks do. Deterministic: the seed decides."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FaultKind = Literal["fail", "partial", "drop", "stale", "delay", "notify_twice", "notify_late"]


@dataclass(frozen=True, slots=True)
class Fault:
    """
    - fail: the batch raises PeerLost, nothing was moved; the connection stays
    - partial: as fail, but a part of the batch was moved
    - drop: as partial, and the connection is broken from then on
    - stale: one slice of the batch, picked at random, is refused with StaleHandle (and its neighbours, when they are in one granule)
    - delay: the batch waits `delay_s` before it moves anything
    - notify_twice: the notification is delivered twice
    - notify_late: the notification is delivered `delay_s` after the write has returned
    """

    kind: FaultKind
    operation: Literal["read", "write"] | None = None
    """None: either."""
    probability: float = 1.0
    after: int = 0
    """So many batches that it could befall pass unharmed first."""
    times: int | None = None
    """It strikes at most so often; None: without limit."""
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise ValueError(f"Fault.probability must be between 0 and 1, not {self.probability}")


class FaultPlan:
    """Decides for every batch which faults befall it."""

    def __init__(self, faults: Sequence[Fault] = (), seed: int = 0) -> None:
        self._faults = tuple(faults)
        self._seen = [0] * len(faults)
        self._struck = [0] * len(faults)
        self.random = random.Random(seed)

    def draw(self, operation: Literal["read", "write"]) -> dict[FaultKind, Fault]:
        """The faults of the next batch, by kind."""
        drawn: dict[FaultKind, Fault] = {}
        for index, fault in enumerate(self._faults):
            if fault.operation not in (None, operation):
                continue
            self._seen[index] += 1
            spent = fault.times is not None and self._struck[index] >= fault.times
            if self._seen[index] > fault.after and not spent and self.random.random() < fault.probability:
                self._struck[index] += 1
                drawn[fault.kind] = fault
        return drawn
