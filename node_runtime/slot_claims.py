"""Attempts' claims on slots: who waits for those of the store, who uses which, and how many the device has pages for. Pure: no I/O, no
clock."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from math import inf
from typing import TypeVar

from engine.batch import Int32Array
from springtide.ids import AttemptId
from springtide.protocol.scheduling import PrefixSource
from springtide.protocol.starts import Request
from springtide.protocol.storage import Acquire

T = TypeVar("T")

RETRY_S = 1.0
"""A pool that looks too full is asked again after so long: how many slots the reused blocks save, only the store knows."""
HEAD_PATIENCE_S = 50.0
"""The first waits so much longer than its deadline: slots pile up for it, which whoever is behind would take if it left."""
ANSWERS_WITH_SOURCES = 2
"""A store that asks other stores for the prefix answers when they have, or have not within its own patience."""
_FRONT = 0
"""The line of those that nobody else overtakes: who has asked, and whose client waits between two tokens."""


@dataclass(slots=True)
class _Claim:
    """What one attempt waits for."""

    num_blocks: int
    growth_blocks: int
    requested_at: float
    deadline: float
    asked_at: float
    line: int
    tenant: str = ""
    asking: bool = False
    quota_used: bool = False
    """Its tenant's quota had no room: other tenants need not wait for that."""

    @property
    def wanted_blocks(self) -> int:
        """How many it waits for of the pool, which has them."""
        return 0 if self.quota_used else self.num_blocks + self.growth_blocks


class SlotClaims:
    """The slots that the store has, as far as is known, and the attempts that wait for some because the pool, or their tenant's part of it,
    was full. First is who has waited longest since its request arrived at its gateway, relative to how much it wants (highest response
    ratio): so nobody starves, and one that wants much does not have many wait that want little, which a prefill group would compute before
    it anyway. Only the first asks again, and who has asked is not overtaken any more: what piles up for a large attempt is not taken by
    small ones."""

    def __init__(self) -> None:
        self.num_slots: int | None = None
        """The most that one attempt can have; None: there is no store."""
        self.pages: int | None = None
        """So many blocks a step or a pass may have at once; None: as many as there are."""
        self.available = 0
        """Free or evictable slots: what the store has last told, or less where it has refused some since."""
        self.wanted_blocks = 0
        """Slots that all who wait for the pool want, with what they are expected to grow by."""
        self._claims: dict[AttemptId, _Claim] = {}
        self._lines: defaultdict[int, list[tuple[float, AttemptId]]] = defaultdict(list)
        """The front, and a line of its own for each power of two of blocks that those want who are not in it: in a line the oldest is
        first."""

    def __len__(self) -> int:
        return len(self._claims)

    def __contains__(self, attempt_id: AttemptId) -> bool:
        return attempt_id in self._claims

    def __iter__(self) -> Iterator[AttemptId]:
        return iter(self._claims)

    @property
    def oldest_at(self) -> float:
        """When the request of the oldest that waits for the pool arrived at its gateway; inf: nobody does."""
        return min((claim.requested_at for claim in self._claims.values() if not claim.quota_used), default=inf)

    def store_connected(self, num_slots: int, pages: int | None) -> None:
        """There is a store, all of whose slots are available."""
        self.num_slots = self.available = num_slots
        self.pages = pages

    def store_lost(self) -> None:
        """There is nothing to wait for any more."""
        self.num_slots, self.available, self.wanted_blocks = None, 0, 0
        self._claims.clear()
        self._lines.clear()

    def wait(
        self,
        attempt_id: AttemptId,
        num_blocks: int,
        requested_at: float,
        deadline: float,
        *,
        tenant: str = "",
        growth_blocks: int = 0,
        continues: bool = False,
    ) -> None:
        """Takes a place without having asked: others already wait, or there is no place to compute it. `growth_blocks`: how many more it is
        expected to want later. `continues`: its client has had tokens, and waits for the next one: its place is in the front."""
        line = _FRONT if continues else (num_blocks + growth_blocks).bit_length()
        self._enter(attempt_id, _Claim(num_blocks, growth_blocks, requested_at, deadline, float("-inf"), line, tenant))

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
        kept_blocks: int = 0,
    ) -> None:
        """The store had no room: the attempt keeps its place, or takes one in the front. `kept_blocks`: how many slots had to be available
        still once it had its own."""
        if not quota_used:
            self.available = min(self.available, num_blocks - 1 + kept_blocks)
        if attempt_id not in self._claims:
            self._enter(attempt_id, _Claim(num_blocks, growth_blocks, requested_at, deadline, now, _FRONT, tenant))
        claim = self._claims[attempt_id]
        self.wanted_blocks -= claim.wanted_blocks
        claim.asked_at, claim.asking, claim.quota_used = now, False, quota_used
        self.wanted_blocks += claim.wanted_blocks

    def leave(self, attempt_id: AttemptId) -> None:
        """The attempt waits no more; one that did not: nothing."""
        claim = self._claims.pop(attempt_id, None)
        if claim is not None:
            self.wanted_blocks -= claim.wanted_blocks
            self._leave_line(attempt_id, claim)

    def goes_before(self, tenant: str) -> bool:
        """Whether somebody waits here whom a newcomer of the tenant may not overtake."""
        return any(not claim.quota_used or claim.tenant == tenant for claim in self._claims.values())

    def expired(self, now: float) -> list[AttemptId]:
        """The attempts whose deadline has passed, by HEAD_PATIENCE_S for the first that waits for the pool. They stay until they
        `leave`."""
        if not self._claims:
            return []
        head = next((attempt_id for attempt_id in self._in_order(now) if not self._claims[attempt_id].quota_used), None)
        patience_s = {head: HEAD_PATIENCE_S}
        return [name for name, claim in self._claims.items() if now >= claim.deadline + patience_s.get(name, 0.0)]

    def next_to_ask(self, now: float, *, kept_blocks: int = 0, alone: bool = True, held_back: Collection[str] = ()) -> AttemptId | None:
        """The first that has no reason to wait but the pool, when the store may now have slots for it beside `kept_blocks`, or one whose
        tenant may have room by now: nobody overtakes one before it of the own tenant. It then counts as asking until `refused` or `leave`.
        Unless it would be `alone`, it waits for what it is to grow by, too. `held_back`: tenants that are to have no more."""
        if not self._claims:
            return None
        over_quota = set(held_back)
        for attempt_id in self._in_order(now):
            claim = self._claims[attempt_id]
            if claim.tenant in over_quota:
                continue
            if claim.quota_used and (claim.asking or now - claim.asked_at < RETRY_S):
                over_quota.add(claim.tenant)
                continue
            wanted = claim.num_blocks + (0 if alone else claim.growth_blocks)
            if claim.asking or (wanted > self.available - kept_blocks and now - claim.asked_at < RETRY_S):
                return None
            claim.asking = True
            self._leave_line(attempt_id, claim)
            claim.line = _FRONT
            self._join_line(attempt_id, claim)
            return attempt_id
        return None

    def _in_order(self, now: float) -> Iterator[AttemptId]:
        """All that wait, the first first."""
        front = (attempt_id for _, attempt_id in self._lines.get(_FRONT, ()))
        others = (_by_response_ratio(line, 1 << size, now) for size, line in self._lines.items() if size != _FRONT)
        yield from front
        yield from (attempt_id for _, attempt_id in merge(*others))

    def _enter(self, attempt_id: AttemptId, claim: _Claim) -> None:
        self._claims[attempt_id] = claim
        self.wanted_blocks += claim.wanted_blocks
        self._join_line(attempt_id, claim)

    def _join_line(self, attempt_id: AttemptId, claim: _Claim) -> None:
        insort(self._lines[claim.line], (claim.requested_at, attempt_id))

    def _leave_line(self, attempt_id: AttemptId, claim: _Claim) -> None:
        line = self._lines[claim.line]
        del line[bisect_left(line, (claim.requested_at, attempt_id))]


def _by_response_ratio(line: Iterable[tuple[float, AttemptId]], num_blocks: int, now: float) -> Iterator[tuple[float, AttemptId]]:
    """Those of a line whose claims are of so many blocks, with how long they have waited for each, negative: in rising order."""
    return (((requested_at - now) / num_blocks, attempt_id) for requested_at, attempt_id in line)


def acquire(
    request: Request,
    sources: tuple[PrefixSource, ...],
    recompute_us: Callable[[int, int], int | None],
    leave_available: int,
    leave_in_quota: int,
) -> Acquire:
    """Asks the store for the slots of a prompt that is to be computed, with what it has of the prefix, or `sources` have. `recompute_us`:
    of so many tokens, what each of the first so many blocks saves if it need not be computed."""
    reusable = request.reusable_blocks
    return Acquire(
        attempt_id=request.attempt_id,
        keys=request.keys,
        num_blocks=request.num_blocks,
        max_reused_blocks=reusable,
        sources=sources if reusable else (),
        tenant=request.tenant,
        recompute_us_per_block=recompute_us(request.num_tokens, reusable),
        leave_available=leave_available,
        leave_in_quota=leave_in_quota,
    )


def patience_s(sources: Sequence[PrefixSource], answer_s: float) -> float:
    """How long a store may take to answer to that, or where there are no `sources` to anything."""
    return answer_s * (ANSWERS_WITH_SOURCES if sources else 1)


class SlotUse:
    """The slots that the passes of each attempt have used, for a runner that keeps copies of them. An attempt's slots hold the same blocks
    until it gives them back; a slot that several share does until the last one does."""

    def __init__(self) -> None:
        self._slots: dict[AttemptId, Sequence[int] | Int32Array] = {}
        self._users: Counter[int] = Counter()

    def note(self, attempt_id: AttemptId, slots: Sequence[int] | Int32Array) -> None:
        """A pass of the attempt is launched, or a load for one. Its slots are those of its last one, or these and more, or the first of
        them."""
        known = self._slots.get(attempt_id, ())
        if len(slots) > len(known):
            self._slots[attempt_id] = slots
            self._users.update(slots[len(known) :])

    def give_back(self, attempt_id: AttemptId) -> list[int]:
        """The attempt's slots, but for those that others still use."""
        slots = self._slots.pop(attempt_id, ())
        self._users.subtract(slots)
        gone = [slot for slot in slots if not self._users[slot]]
        for slot in gone:
            del self._users[slot]
        return gone

    def clear(self) -> None:
        """The store is gone, and every slot with it."""
        self._slots.clear()
        self._users.clear()


def within_pages(
    chosen: Sequence[T], slots_of: Callable[[T], Sequence[int]], pages: int | None, taken: Sequence[int] | None = None
) -> Sequence[T]:
    """The first of `chosen` whose slots, those that several have counted once, are with those `taken` at most as many as an engine's device
    has `pages` (None: no matter how many); one of them in any case where none are taken."""
    if pages is None or sum(len(slots_of(one)) for one in chosen) + len(taken or ()) <= pages:
        return chosen
    held = set(taken or ())
    for count, one in enumerate(chosen):
        held.update(slots_of(one))
        if len(held) > pages:
            return chosen[: max(count, 1 if taken is None else 0)]
    return chosen
