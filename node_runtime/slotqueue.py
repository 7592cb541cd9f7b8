"""Attempts that wait for slots because the pool, or their tenant's part of it, was full. Pure: no I/O, no clock."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from springtide.ids import AttemptId

RETRY_S = 1.0
"""A pool that looks too full is asked again after so long: how many slots the reused blocks save, only the store knows."""
HEAD_PATIENCE_S = 50.0
"""By which the first waits longer than its deadline: slots pile up for it, which whoever is behind would take if it left."""


@dataclass(slots=True)
class _Place:
    num_blocks: int
    growth_blocks: int
    requested_at: float
    deadline: float
    asked_at: float
    tenant: str = ""
    asking: bool = False
    quota_used: bool = False
    """Its tenant's quota had no room: other tenants need not wait for that."""

    @property
    def wanted_blocks(self) -> int:
        """Of the pool, which has them."""
        return 0 if self.quota_used else self.num_blocks + self.growth_blocks


class SlotQueue:
    """In the order in which the requests arrived at their gateways. Only the head asks again, so that a large attempt is not overtaken for
    ever by small ones."""

    def __init__(self) -> None:
        self._places: dict[AttemptId, _Place] = {}
        self._order: list[tuple[float, AttemptId]] = []
        self.wanted_blocks = 0
        """Of all that wait for the pool, what they are expected to grow by included."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, attempt_id: AttemptId) -> bool:
        return attempt_id in self._places

    def __iter__(self) -> Iterator[AttemptId]:
        return (attempt_id for _, attempt_id in self._order)

    def wait(
        self, attempt_id: AttemptId, num_blocks: int, requested_at: float, deadline: float, *, tenant: str = "", growth_blocks: int = 0
    ) -> None:
        """Takes its place without having asked: others already wait, or there is no place to compute it. `growth_blocks`: that it is
        expected to want later."""
        self._enter(attempt_id, _Place(num_blocks, growth_blocks, requested_at, deadline, asked_at=float("-inf"), tenant=tenant))

    def refused(
        self,
        attempt_id: AttemptId,
        num_blocks: int,
        requested_at: float,
        deadline: float,
        now: float,
        *,
        tenant: str = "",
        growth_blocks: int = 0,
        quota_used: bool = False,
    ) -> None:
        """The store had no room: keeps its place, or takes it."""
        if attempt_id not in self._places:
            self._enter(attempt_id, _Place(num_blocks, growth_blocks, requested_at, deadline, asked_at=now, tenant=tenant))
        place = self._places[attempt_id]
        self.wanted_blocks -= place.wanted_blocks
        place.asked_at, place.asking, place.quota_used = now, False, quota_used
        self.wanted_blocks += place.wanted_blocks

    def leave(self, attempt_id: AttemptId) -> None:
        place = self._places.pop(attempt_id, None)
        if place is not None:
            self.wanted_blocks -= place.wanted_blocks
            del self._order[bisect_left(self._order, (place.requested_at, attempt_id))]

    def clear(self) -> None:
        self._places.clear()
        self._order.clear()
        self.wanted_blocks = 0

    def goes_before(self, tenant: str) -> bool:
        """Whether somebody waits here whom a newcomer of the tenant may not overtake."""
        return any(not place.quota_used or place.tenant == tenant for place in self._places.values())

    def expired(self, now: float) -> list[AttemptId]:
        """Those whose deadline has passed, by HEAD_PATIENCE_S for the first that waits for the pool. They stay until they `leave`."""
        head = next((attempt_id for attempt_id in self if not self._places[attempt_id].quota_used), None)
        patience_s = {head: HEAD_PATIENCE_S}
        return [name for name, place in self._places.items() if now >= place.deadline + patience_s.get(name, 0.0)]

    def next_to_ask(self, slots_available: int, now: float, *, alone: bool = True, held_back: Collection[str] = ()) -> AttemptId | None:
        """The first that has no reason to wait but the pool, when the store may now have slots for it, or one whose tenant may have room by
        now: nobody overtakes an older one of the own tenant. It then counts as asking until `refused` or `leave`. Unless it would be
        `alone`, it waits for what it is to grow by, too. `held_back`: tenants that are to have no more."""
        over_quota = set(held_back)
        for _, attempt_id in self._order:
            place = self._places[attempt_id]
            if place.tenant in over_quota:
                continue
            if place.quota_used and (place.asking or now - place.asked_at < RETRY_S):
                over_quota.add(place.tenant)
                continue
            wanted = place.num_blocks + (0 if alone else place.growth_blocks)
            if place.asking or (wanted > slots_available and now - place.asked_at < RETRY_S):
                return None
            place.asking = True
            return attempt_id
        return None

    def _enter(self, attempt_id: AttemptId, place: _Place) -> None:
        self._places[attempt_id] = place
        self.wanted_blocks += place.wanted_blocks
        insort(self._order, (place.requested_at, attempt_id))
