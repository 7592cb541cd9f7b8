"""An engine that is to serve in the other role: it takes its leave, finishes what it has, and begins anew as the other kind.

The process stays the same one (its program is replaced), so whoever started it sees no end, and its node's store keeps what it holds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from springtide.clock import Clock
from springtide.errors import InvalidRequest
from springtide.protocol.instances import Role, RoleSwitch

logger = logging.getLogger(__name__)

_PROGRAMS = {Role.PREFILL: "prefill_node", Role.DECODE: "mixed_node"}
"""Modules that are run, not imported."""
LOOK_EVERY_S = 0.05
_QUIET_S = 0.5
"""It has to be without work for so long: attempts that were on their way here when it took its leave have come and gone."""


class PendingSwitch:
    """The order to switch its role that an engine has, if it has one."""

    def __init__(self, own: Role, keeps: str = "") -> None:
        """`own`: the role that the engine has. `keeps`: why it can have no other; empty: it can."""
        self._own = own
        self._keeps = keeps
        self._ordered = asyncio.Event()
        self.order: RoleSwitch | None = None
        self.leaving = False
        """Takes no more work: it is to switch, or its process to end."""

    def take(self, order: RoleSwitch) -> None:
        """Raises InvalidRequest. An order that follows another changes nothing."""
        if order.to is self._own:
            raise InvalidRequest(f"`to` must be {self._own.other}: the engine is a {self._own} engine", param="to")
        if self._keeps:
            raise InvalidRequest(f"`to` cannot be {order.to}: {self._keeps}", param="to")
        if self.order is None:
            self.order = order
            self.leaving = True
            self._ordered.set()

    async def ordered(self) -> RoleSwitch:
        """Returns when there is an order."""
        await self._ordered.wait()
        assert self.order is not None
        return self.order


class Drain:
    """Whether an engine that takes its leave has ended what it has. Times in seconds, of any one clock."""

    def __init__(self, drain_s: float, now: float) -> None:
        self._until = now + drain_s
        self._last_work = now

    def look(self, has_work: bool, now: float) -> bool | None:
        """Is to be called every LOOK_EVERY_S. True once there has been no work for a moment, False when there still is some after
        `drain_s`, None until either."""
        if has_work:
            self._last_work = now
            return False if now >= self._until else None
        return True if now - self._last_work >= _QUIET_S else None


async def drained(has_work: Callable[[], bool], drain_s: float, clock: Clock) -> bool:
    """Returns once there has been no work for a moment, or with False when there still is some after `drain_s`."""
    drain = Drain(drain_s, clock.now())
    while (ended := drain.look(has_work(), clock.now())) is None:  # noqa: ASYNC110 - whether there is work has no event
        await asyncio.sleep(LOOK_EVERY_S)
    return ended


def become(role: Role) -> NoReturn:
    """Replaces this process's program by that of the other kind of engine, with the same arguments."""
    logger.info("begins anew as a %s engine", role)
    logging.shutdown()
    os.execv(sys.executable, [sys.executable, "-P", "-m", _PROGRAMS[role], *sys.argv[1:]])
