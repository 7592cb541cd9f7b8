"""An instance that is to serve in the other role ends what it has, as node_runtime.departure does."""

from __future__ import annotations

from collections.abc import Callable

from simulator.cluster.decode import SimDecode
from simulator.cluster.loop import Loop
from simulator.cluster.prefill import SimPrefill

LOOK_EVERY_S = 0.05
QUIET_S = 0.5
"""Without work for so long, it goes. Both as in node_runtime.departure."""


class Departure:
    """Calls `over` once the instance has had no work for a moment, or `drain_s` after the beginning."""

    def __init__(self, instance: SimPrefill | SimDecode, drain_s: float, loop: Loop, over: Callable[[], None]) -> None:
        self._instance, self._loop, self._over = instance, loop, over
        self._last_work = loop.now
        self._until = loop.now + drain_s
        self._look()

    def _look(self) -> None:
        now = self._loop.now
        if self._instance.has_work:
            self._last_work = now
            over = now >= self._until
        else:
            over = now - self._last_work >= QUIET_S
        if over:
            self._over()
        else:
            self._loop.after(LOOK_EVERY_S, self._look)
