"""What is done for a context cache: one look at it, from its beginning to the time of the next. Free of I/O, clock and randomness.

A look begins with what stores there are. Those that held it are asked to pin it anew, which shows what they still hold. Where else requests
use it they have left a copy, which is pinned in place of one that is missing, or is used much less. Where nobody holds it, it is computed,
and pinned where it was; where fewer hold it than should, others copy it. All of it may be done again, by whomever, whenever.

What takes long is no part of most looks: one that wants it ends, and another, whose turn has come, begins again and works. What is held
goes on being looked at meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b

from gateway.caching.context import ContextCache, Kept, Status, Strength
from springtide.ids import Incarnation, NodeId

LOOK_EVERY_S = 20.0
"""At a cache that is as it should be. Stores that come and go are noticed sooner (`Keeper`)."""
PIN_LEASE_S = 600.0
"""How long a pin outlives its cache's keepers: so long the front end may be away as a whole."""
_MUCH_MORE, _MORE_USES = 2, 4
"""A pin moves to where it has been used so many times as often as where it is, and so often beyond that: it shall not go to and fro."""
_RETRY_S, _MOST_RETRY_S = 1.0, 30.0
MOST_BREAKDOWNS = 5
"""The most tries in a row to compute one with which whoever computes it breaks down. Each took several nodes."""
_BREAKDOWN_RETRY_S, _MOST_BREAKDOWN_RETRY_S = 4.0, 300.0
"""The pauses between them grow to minutes: where all nodes have broken down for another reason, it is over by then."""


@dataclass(frozen=True, slots=True)
class Store:
    """A store of the cluster."""

    node_id: NodeId
    incarnation: Incarnation
    address: str
    prefills: bool = False
    """Its node computes prompts: what it holds is used there without being copied."""


class Failure(Enum):
    """Why one could not be computed."""

    NOT_NOW = auto()
    """There was nobody who could."""
    BREAKDOWN = auto()
    """Whoever computed it broke down, one after the other."""
    NEVER = auto()


# ---- events ----


@dataclass(frozen=True, slots=True)
class Begun:
    """The look begins."""

    stores: tuple[Store, ...]
    uses: Mapping[NodeId, int] = field(default_factory=dict)
    """How often requests have used it of late, by where their prompts were computed."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """A store has pinned so many of its blocks, from the first: those that it holds, which may be none."""

    node_id: NodeId
    blocks: int


@dataclass(frozen=True, slots=True)
class NotPinned:
    """A store does not answer, or not as it should."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class TooManyHard:
    """A store takes no more blocks under hard pins."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class Copied:
    """A store has copied what it could get: so many blocks are there now. 0: it failed."""

    node_id: NodeId
    blocks: int


@dataclass(frozen=True, slots=True)
class Computed:
    """It has been computed, by order or because somebody asked for it, and is at this store."""

    store: Store


@dataclass(frozen=True, slots=True)
class NotComputed:
    """It could not be computed."""

    message: str
    why: Failure


@dataclass(frozen=True, slots=True)
class Postponed:
    """Nothing more of it was computed for long: it is others' turn."""

    message: str = ""


@dataclass(frozen=True, slots=True)
class Gone:
    """Its owner has deleted it, or it is somebody else's to look after."""


Event = Begun | Pinned | NotPinned | TooManyHard | Copied | Computed | NotComputed | Postponed | Gone

# ---- actions ----


@dataclass(frozen=True, slots=True)
class Pin:
    """Have a store keep it. Answered by Pinned, NotPinned or TooManyHard."""

    node_id: NodeId
    strength: Strength
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Unpin:
    """Have a store keep it no longer. Not answered."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class ForgetUses:
    """Count no longer how it has been used at a store: the copy that was used there is gone. Not answered."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class Copy:
    """Have a store copy it from others. Answered by Copied."""

    node_id: NodeId
    sources: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class Compute:
    """Have it computed, in idle capacity. Answered by Computed or NotComputed."""


@dataclass(frozen=True, slots=True)
class Save:
    """Write down what is known of it now. Answered by Gone when it is there no more, else not."""

    kept: Kept


@dataclass(frozen=True, slots=True)
class Rest:
    """The look is over; the next one is due then. None: none is."""

    until: float | None
    works: bool = False
    """What it wants takes long: one that works is due too, when its turn has come."""


Action = Pin | Unpin | ForgetUses | Copy | Compute | Save | Rest


class Look:
    """One look at one cache: events in, actions out. The last action is a Rest."""

    def __init__(self, cache: ContextCache, works: bool) -> None:
        """`works`: it may have it computed and copied."""
        self._cache = cache
        self._works = works
        self._kept = cache.kept
        self._stores: dict[NodeId, Store] = {}
        self._uses: Mapping[NodeId, int] = {}
        self._asked: set[NodeId] = set()
        """Who has yet to answer."""
        self._holders: set[NodeId] = set()
        """Who has pinned all of it."""
        self._tried: set[NodeId] = set()
        """Who does not answer, or has been asked to copy it, in this look."""
        self._looked_for: set[NodeId] = set()
        """Who has been asked to pin the copy that is used there, in this look. It may still be asked to copy it."""
        self._computed = False
        self._over = False

    @property
    def over(self) -> bool:
        return self._over

    def handle(self, event: Event, now: float) -> list[Action]:
        if self._over:
            return []
        match event:
            case Begun(stores, uses):
                self._uses = uses
                return self._on_begun(stores, now)
            case Pinned(node_id, blocks):
                return self._on_pinned(node_id, blocks, now)
            case NotPinned(node_id):
                self._tried.add(node_id)
                return self._answered(node_id, now)
            case TooManyHard(node_id) if len(self._holders) >= self._cache.replicas:
                # It is held elsewhere, hard maybe: it does not move to where it would be soft.
                self._tried.add(node_id)
                return [Unpin(node_id), *self._answered(node_id, now)]
            case TooManyHard(node_id):
                return [Pin(node_id, Strength.SOFT, self._pin_ttl_s(now))]
            case Copied(node_id, blocks):
                return [self._pin(node_id, now)] if blocks >= self._cache.blocks else self._answered(node_id, now)
            case Computed(store):
                if store.node_id in self._holders | self._asked:
                    return []
                self._computed = True
                self._stores[store.node_id] = store
                self._tried.discard(store.node_id)
                return [self._pin(store.node_id, now)]
            case NotComputed(message, why):
                return self._on_not_computed(message, why, now)
            case Postponed(message):
                return [*self._pend(message or self._kept.error), *self._rest(now)]
            case Gone():
                # Whoever is still asked to pin it comes to that before it is asked to unpin it.
                return [*(Unpin(node_id) for node_id in sorted(self._holders | self._asked)), *self._rest(None)]

    def validate(self) -> None:
        """Asserts the invariants."""
        assert self._holders <= self._stores.keys(), "who holds it is there"
        assert not self._holders & self._asked, "who has answered is not awaited"

    def _on_begun(self, stores: tuple[Store, ...], now: float) -> list[Action]:
        self._stores = {store.node_id: store for store in stores}
        held = [store for store in stores if self._kept.held.get(store.node_id) == store.incarnation]
        if self._cache.expired(now):
            ended = Kept(Status.INACTIVE, error=self._kept.error)
            return [*(Unpin(store.node_id) for store in held), *self._save(ended), *self._rest(None)]
        if self._kept.status is Status.ERROR:
            return self._rest(None)
        return [self._pin(store.node_id, now) for store in held] or self._next(now)

    def _on_pinned(self, node_id: NodeId, blocks: int, now: float) -> list[Action]:
        if blocks >= self._cache.blocks:
            self._holders.add(node_id)
            return self._answered(node_id, now)
        # A part of it is not worth its place: where another store has all of it, it is copied from there and pinned anew.
        actions: list[Action] = [Unpin(node_id)] if blocks else []
        if self._uses.get(node_id):
            actions.append(ForgetUses(node_id))
        return [*actions, *self._answered(node_id, now)]

    def _on_not_computed(self, message: str, why: Failure, now: float) -> list[Action]:
        if why is Failure.NOT_NOW:
            return self._try_later(message, now)
        breakdowns = self._kept.breakdowns + 1
        if why is Failure.BREAKDOWN and breakdowns < MOST_BREAKDOWNS:
            pause_s = min(_BREAKDOWN_RETRY_S * 4 ** (breakdowns - 1), _MOST_BREAKDOWN_RETRY_S)
            return [*self._pend(message, failures=1, breakdowns=1), *self._rest(now + pause_s)]
        if why is Failure.BREAKDOWN:
            message = f"the nodes that computed it failed, in each of {breakdowns} tries: it is tried no more"
        return [*self._save(Kept(Status.ERROR, message)), *self._rest(None)]

    def _answered(self, node_id: NodeId, now: float) -> list[Action]:
        self._asked.discard(node_id)
        return [] if self._asked else self._next(now)

    def _next(self, now: float) -> list[Action]:
        """What is still to be done, now that nobody is awaited."""
        if used := self._used_elsewhere():
            self._looked_for.update(used)
            return [self._pin(node_id, now) for node_id in used]
        if not self._holders:
            return self._recover(now)
        actions: list[Action] = []
        surplus = sorted(self._holders, key=self._by_use)[self._cache.replicas :]
        for node_id in surplus:
            self._holders.discard(node_id)
            self._tried.add(node_id)
            actions.append(Unpin(node_id))
        # What is known is written down before what takes long.
        actions += self._save(Kept(Status.READY, held={node_id: self._stores[node_id].incarnation for node_id in sorted(self._holders)}))
        missing = self._cache.replicas - len(self._holders)
        untried = sorted(self._stores.keys() - self._holders - self._tried, key=self._rank)
        if untried[:missing] and not self._works:
            return [*actions, *self._rest(now + LOOK_EVERY_S, works=True)]
        sources = tuple(sorted(self._holders, key=self._rank))
        for node_id in untried[:missing]:
            self._asked.add(node_id)
            self._tried.add(node_id)
            actions.append(Copy(node_id, sources))
        return actions if self._asked else [*actions, *self._rest(now + LOOK_EVERY_S)]

    def _used_elsewhere(self) -> list[NodeId]:
        """Stores whose copy, if they still have it, is to be pinned in place of one that is missing, or is used much less."""
        others = self._stores.keys() - self._holders - self._tried - self._looked_for
        used = sorted((node_id for node_id in others if self._uses.get(node_id)), key=self._by_use)
        missing = max(0, self._cache.replicas - len(self._holders))
        least = sorted(self._uses.get(node_id, 0) for node_id in self._holders)
        rivals = zip(used[missing:], least, strict=False)
        return used[:missing] + [node_id for node_id, uses in rivals if self._uses[node_id] >= _MUCH_MORE * uses + _MORE_USES]

    def _recover(self, now: float) -> list[Action]:
        """Nobody holds all of it."""
        if self._cache.marked:
            return [*self._save(Kept(Status.INACTIVE)), *self._rest(None)]
        if self._computed:
            return self._try_later("it was computed, but no store has kept it: there is no room", now)
        # Why it is still pending is told until it is not.
        why = self._kept.error if self._kept.status is Status.PENDING else ""
        pending = self._pend(why)
        return [*pending, Compute()] if self._works else [*pending, *self._rest(None, works=True)]

    def _try_later(self, message: str, now: float) -> list[Action]:
        pause_s = min(_RETRY_S * 2 ** min(self._kept.failures, 10), _MOST_RETRY_S)
        return [*self._pend(message, failures=1), *self._rest(now + pause_s)]

    def _pend(self, why: str, failures: int = 0, breakdowns: int = 0) -> list[Action]:
        """Writes down that it is pending, after so many more tries."""
        kept = self._kept
        return self._save(Kept(Status.PENDING, why, {}, kept.failures + failures, kept.breakdowns + breakdowns))

    def _pin(self, node_id: NodeId, now: float) -> Pin:
        self._asked.add(node_id)
        return Pin(node_id, self._cache.strength, self._pin_ttl_s(now))

    def _pin_ttl_s(self, now: float) -> float:
        return max(0.001, min(self._cache.expires_at - now, PIN_LEASE_S))

    def _save(self, kept: Kept) -> list[Action]:
        if kept == self._kept:
            return []
        self._kept = kept
        return [Save(kept)]

    def _rest(self, until: float | None, works: bool = False) -> list[Action]:
        self._over = True
        return [Rest(until if until is None else min(until, self._cache.expires_at), works)]

    def _by_use(self, node_id: NodeId) -> tuple[int, bool, bytes]:
        """Where it is used most first."""
        return (-self._uses.get(node_id, 0), *self._rank(node_id))

    def _rank(self, node_id: NodeId) -> tuple[bool, bytes]:
        """The best first: where prompts are computed; among these, another for each cache, and the same one at each look."""
        choice = blake2b(f"{self._cache.cache_id}\n{node_id}".encode(), digest_size=8).digest()
        return (not self._stores[node_id].prefills, choice)
