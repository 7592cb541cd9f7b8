"""Subscribers of the pool's events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvstore import metrics
from kvstore.core.pool import Pool
from kvstore.core.results import PoolEvent, Tier
from springtide.errors import SpringtideError
from springtide.ids import BlockKey

MAX_LAG_KEYS = 200_000
"""Keys in events that wait for one subscriber, some 20 MB. Events themselves are bounded (kvstore.core.journal.MAX_EVENT_KEYS)."""
SNAPSHOT_PART_KEYS = 4096


class WatcherLags(SpringtideError):
    """It took in events too slowly, and has to begin anew with a snapshot."""


class SnapshotPart(NamedTuple):
    """Keys held as of event `sequence`; all of them once the `complete` part has come."""

    sequence: int
    keys: Sequence[BlockKey]
    tier: Tier
    complete: bool


class Subscription:
    """A snapshot in parts, then the events that came after it. `put` never waits: a subscriber that stands still costs the store at most
    MAX_LAG_KEYS keys, and is then cut off."""

    def __init__(self, held: Mapping[Tier, Sequence[BlockKey]], sequence: int) -> None:
        self.sequence = sequence
        self._parts: deque[SnapshotPart] = deque()
        for tier, keys in held.items():
            for begin in range(0, max(len(keys), 1), SNAPSHOT_PART_KEYS):
                self._parts.append(SnapshotPart(sequence, keys[begin : begin + SNAPSHOT_PART_KEYS], tier, complete=False))
        self._parts[-1] = self._parts[-1]._replace(complete=True)
        self._events: deque[PoolEvent] = deque()
        self._num_keys = 0
        self._wake = asyncio.Event()
        self._lags = False

    def put(self, events: Sequence[PoolEvent]) -> bool:
        """False when it is cut off by this."""
        if self._lags:
            return True
        self._events.extend(events)
        self._num_keys += sum(len(event.keys) for event in events)
        if self._num_keys > MAX_LAG_KEYS:
            self._lags = True
            self._parts.clear()
            self._events.clear()
        self._wake.set()
        return not self._lags

    async def next(self) -> SnapshotPart | PoolEvent:
        """Waits for it. Raises WatcherLags."""
        while True:
            if self._lags:
                raise WatcherLags(f"more than {MAX_LAG_KEYS} blocks behind: watch anew")
            if self._parts:
                return self._parts.popleft()
            if self._events:
                event = self._events.popleft()
                self._num_keys -= len(event.keys)
                return event
            self._wake.clear()
            await self._wake.wait()


class Watchers:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._subscriptions: set[Subscription] = set()
        self.num_cut_off = 0
        """Since the start."""

    def __len__(self) -> int:
        return len(self._subscriptions)

    def subscribe(self) -> Subscription:
        """The pool's events so far must have been published."""
        held = {Tier.DRAM: self._pool.held_keys()}
        if self._pool.ssd is not None:
            held[Tier.SSD] = self._pool.ssd.keys()
        subscription = Subscription(held, self._pool.sequence)
        self._subscriptions.add(subscription)
        metrics.WATCHERS.set(len(self._subscriptions))
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)
        metrics.WATCHERS.set(len(self._subscriptions))

    def publish(self, events: Sequence[PoolEvent]) -> None:
        if events:
            for subscription in self._subscriptions:
                if not subscription.put(events):
                    self.num_cut_off += 1
                    metrics.WATCHERS_CUT_OFF.inc()
