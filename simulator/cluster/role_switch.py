"""An instance that is to serve in the other role ends what it has, by the rule of node_runtime.role_switch."""

from __future__ import annotations

from collections.abc import Callable

from node_runtime.role_switch import LOOK_EVERY_S, Drain
from simulator.cluster.decode import SimDecode
from simulator.cluster.loop import Loop
from simulator.cluster.prefill import SimPrefill


class SimRoleSwitch:
    """Calls `over` once the instance has had no work for a moment, or `drain_s` after the beginning."""

    def __init__(self, instance: SimPrefill | SimDecode, drain_s: float, loop: Loop, over: Callable[[], None]) -> None:
        self._instance, self._loop, self._over = instance, loop, over
        self._drain = Drain(drain_s, loop.now)
        self._look()

    def _look(self) -> None:
        if self._drain.look(self._instance.has_work, self._loop.now) is not None:
            self._over()
        else:
            self._loop.after(LOOK_EVERY_S, self._look)
