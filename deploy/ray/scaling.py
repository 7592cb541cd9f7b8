"""How many nodes a pool should have, from what the Conductor says of it. Pure: times come in, numbers go out."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import islice

from deploy.ray.resources import Pool
from springtide.config import RayConfig
from springtide.ids import prefill_side
from springtide.protocol.instances import Role
from springtide.protocol.status import ClusterStatus

_OVERLOADED = 1.0
"""The load from which on a pool does not keep its objectives, whatever was predicted of its work."""


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """What the Conductor says of one pool (springtide.protocol.status.ClusterStatus)."""

    work: float
    """Nodes that the work of recent requests, those refused included, would keep busy."""
    load: float
    """Mean load of its nodes, 1 being as much as the objectives allow."""
    ready: int


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Raises ValueError where the two bounds are no range."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"a pool has 1 node at least and no more at least than at most, not {self.least} to {self.most}")

    def within(self, count: int) -> int:
        return min(max(count, self.least), self.most)


class PoolSize:
    """The number of nodes that one pool should have. It follows what is asked for with patience, in both directions: it grows to the
    smallest, and shrinks to the largest number that was asked for in the time that counts, if there was no break in it."""

    def __init__(self, limits: PoolLimits, settings: RayConfig, present: int = 0) -> None:
        """`present`: nodes that are there already."""
        self._limits = limits
        self._settings = settings
        self._asked: deque[tuple[float, int]] = deque()
        self.wanted = limits.within(present)

    def see(self, figures: PoolFigures | None, now: float) -> int:
        """The number, after a look at the pool's figures. None: there are none just now, which is a break."""
        if figures is None:
            self._asked.clear()
            return self.wanted
        self._asked.append((now, self._fitting(figures)))
        settings = self._settings
        while len(self._asked) > 1 and self._asked[1][0] <= now - max(settings.scale_up_after_s, settings.scale_down_after_s):
            self._asked.popleft()
        grown = self._throughout(now - settings.scale_up_after_s)
        shrunk = self._throughout(now - settings.scale_down_after_s)
        if grown and min(grown) > self.wanted:
            self.wanted = min(grown)
        elif shrunk and max(shrunk) < self.wanted:
            self.wanted = max(shrunk)
        return self.wanted

    def _fitting(self, figures: PoolFigures) -> int:
        count = math.ceil(figures.work / self._settings.scale_load)
        if figures.load >= _OVERLOADED:
            # Those that were asked for last are still to come: until they are there, it is neither too small nor too large.
            count = max(count, figures.ready + 1 if figures.ready >= self.wanted else self.wanted)
        return self._limits.within(count)

    def _throughout(self, since: float) -> list[int]:
        """What was asked for since then, and at that moment; empty where it is not known from then on."""
        if not self._asked or self._asked[0][0] > since:
            return []
        first = max(index for index, (time, _) in enumerate(self._asked) if time <= since)
        return [count for _, count in islice(self._asked, first, None)]


def figures_of(pool: Pool, status: ClusterStatus, scale_load: float) -> PoolFigures:
    """Instances have all the work of both roles, but for what nodes of one role beside them do, which are busy `scale_load` of their time;
    and of the loads the larger one."""
    ready = {(each.instance.role, each.instance.instance_id) for each in status.instances if each.ready}
    both = {name for role, name in ready if role is Role.DECODE and (Role.PREFILL, prefill_side(name)) in ready}
    if pool is not Pool.INSTANCE:
        work, load = (status.prefill_work, status.prefill_load) if pool is Pool.PREFILL else (status.decode_work, status.decode_load)
        return PoolFigures(work, load, sum(role is Role(pool) for role, _ in ready) - len(both))
    others = {each: sum(role is each for role, _ in ready) - len(both) for each in Role}
    works = {Role.PREFILL: status.prefill_work, Role.DECODE: status.decode_work}
    work = sum(max(0.0, works[each] - scale_load * others[each]) for each in Role)
    return PoolFigures(work, max(status.prefill_load, status.decode_load), len(both))
