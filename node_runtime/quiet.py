"""Idle work that costs others on the same machine something though it takes no processor from them: caches, memory, the clock that cores
share. Who is slowed asks for quiet; who does idle work rests while somebody does. Pure.

Nothing is known of machines beforehand. An engine compares what its passes for online requests take while other engines of its machine do
idle work, and while none does. On a card, or with cores enough, it finds no difference and never asks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

_WINDOW, _ENOUGH = 64, 16
"""Passes of either kind that are looked back at, and without which nothing is concluded."""
FIRST_QUIET_S, LONGEST_QUIET_S = 60.0, 960.0
"""What was found holds for so long; then idle work is let run beside `_ENOUGH` passes, to see whether it still does. Each time it does, it
holds twice as long: looking costs those who are slowed meanwhile."""
MOST_REST_S = 10.0
"""Idle work that has rested for so long has one pass in any case: it is never starved."""


class Disturbance:
    """By how much idle work of the machine's other engines slows this one's passes, and whether it is to rest therefore."""

    def __init__(self, most_slowdown: float) -> None:
        """`most_slowdown`: what is put up with; 0.05 is a twentieth."""
        self._most = 1.0 + most_slowdown
        self._alone: deque[float] = deque(maxlen=_WINDOW)
        self._beside: deque[float] = deque(maxlen=_WINDOW)
        self._quiet_until = float("-inf")
        self._next_quiet_s = FIRST_QUIET_S
        self.slowdown = 0.0
        """As found last: 0.2 is a fifth longer."""

    def observe(self, ratio: float, beside: bool | None, now: float) -> None:
        """A pass has taken `ratio` times what was predicted: beside idle work of others, or with none, or (None) partly."""
        if beside is None or (beside and self.wanted(now)):
            return  # Idle work that has yet to come to rest tells nothing of what follows.
        (self._beside if beside else self._alone).append(ratio)
        if not beside or len(self._beside) < _ENOUGH or len(self._alone) < _ENOUGH:
            return
        slowed = median(self._beside) / median(self._alone)
        self.slowdown = slowed - 1.0
        if slowed > self._most:
            self._quiet_until, self._next_quiet_s = now + self._next_quiet_s, min(2 * self._next_quiet_s, LONGEST_QUIET_S)
            self._beside.clear()
        else:
            self._next_quiet_s = FIRST_QUIET_S

    def wanted(self, now: float) -> bool:
        """Whether quiet is wanted while there is work for online requests."""
        return now < self._quiet_until


@dataclass(slots=True)
class IdleTurns:
    """When an engine's own idle work may go on."""

    quiet: bool = False
    """Another engine of the machine wants quiet."""
    _waits_since: float | None = None

    def look(self, waiting: bool, now: float) -> None:
        """Whether there is idle work that could go on."""
        if not waiting:
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = now

    def had(self, now: float) -> None:
        """A pass of it has come to its end."""
        self._waits_since = now

    def overdue(self, now: float) -> bool:
        """It has rested for so long that its next pass is not to be kept from it, nor broken off."""
        return self._waits_since is not None and now - self._waits_since >= MOST_REST_S

    def may_begin(self, now: float) -> bool:
        """Whether a pass of idle work alone may begin."""
        return not self.quiet or self.overdue(now)
