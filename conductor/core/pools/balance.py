"""Moves instances between the prefill and the decode pool when their loads differ for long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from conductor.core.pools.demand import PoolWork
from conductor.core.pools.load import PoolLoads
from conductor.core.settings import PoolBalanceSettings
from conductor.core.state import Instance
from conductor.core.types.events import SwitchRole
from springtide.ids import InstanceId
from springtide.protocol.instances import Role, RoleSwitch

_LATE_S = 120.0
"""A move of which nothing has been seen for so long after its drain has failed: a large model takes its time to load."""


@dataclass(frozen=True, slots=True)
class _Move:
    instance_id: InstanceId
    to: Role
    until: float


class PoolBalance:
    """Moves instances from one pool to the other: one at a time, each after the loads have differed without a break and the one before has
    had time to show its effect.

    Two things must agree: the loads at hand, which also see what no prediction does, and the ratio that the demand of the last minutes
    asks for, which does not turn with every burst.
    """

    def __init__(self, settings: PoolBalanceSettings) -> None:
        self._settings = settings
        self._busier: Role | None = None
        self._since = 0.0
        self._move: _Move | None = None
        self._pause_until = float("-inf")
        self._refused: InstanceId | None = None
        """The last one that did not take its order: it would be the idlest again."""

    @property
    def moving(self) -> InstanceId | None:
        """The instance that is on its way to its new role."""
        return self._move.instance_id if self._move is not None else None

    def decide(self, ready: Iterable[Instance], loads: PoolLoads, work: PoolWork, now: float) -> SwitchRole | None:
        """What is to be moved now, if anything. To be called about once a second. `ready`: the instances that can take requests."""
        pools: dict[Role, list[Instance]] = {role: [] for role in Role}
        for instance in ready:
            pools[instance.ref.role].append(instance)
        if self._switching(pools, now):
            return None
        busier = self._which(loads)
        if busier is not self._busier:
            self._busier, self._since = busier, now
        settings = self._settings
        if busier is None or now - self._since < settings.after_s or now < self._pause_until:
            return None
        other = Role.DECODE if busier is Role.PREFILL else Role.PREFILL
        givers, takers = pools[other], pools[busier]
        wanted = work.wanted(busier, len(givers) + len(takers))
        if len(givers) < 2 or wanted is None or wanted <= len(takers) or not _helps(loads, busier, len(givers), len(takers)):
            return None
        willing = [instance for instance in givers if instance.ref.instance_id != self._refused]
        idlest = min(willing, key=lambda instance: (loads.by_instance.get(instance.ref.instance_id, 0.0), instance.ref.instance_id))
        self._move = _Move(idlest.ref.instance_id, busier, now + settings.drain_s + _LATE_S)
        self._busier = None
        return SwitchRole(idlest.ref, RoleSwitch(busier, settings.drain_s))

    def failed(self, instance_id: InstanceId, now: float) -> None:
        """The instance did not take the order: the move is over, its pause begins, and next time another is asked."""
        if self.moving == instance_id:
            self._refused = instance_id
            self._end_move(now)

    def _which(self, loads: PoolLoads) -> Role | None:
        """The pool that is loaded, and so many times as the other."""
        for role, load, others in ((Role.PREFILL, loads.prefill, loads.decode), (Role.DECODE, loads.decode, loads.prefill)):
            if load >= self._settings.least_load and load >= self._settings.ratio * others:
                return role
        return None

    def _switching(self, pools: dict[Role, list[Instance]], now: float) -> bool:
        """Whether the last move is not over; when it ends, the pause begins."""
        move = self._move
        if move is None:
            return False
        arrived = any(instance.ref.instance_id == move.instance_id for instance in pools[move.to])
        if not arrived and now < move.until:
            return True
        self._end_move(now)
        return False

    def _end_move(self, now: float) -> None:
        self._move, self._pause_until = None, now + self._settings.pause_s


def _helps(loads: PoolLoads, busier: Role, givers: int, takers: int) -> bool:
    """Whether the pools' roles would not just be reversed: with the same work, the giving pool stays the less loaded one."""
    taking, giving = (loads.prefill, loads.decode) if busier is Role.PREFILL else (loads.decode, loads.prefill)
    return giving * givers / (givers - 1) < taking * takers / (takers + 1)
