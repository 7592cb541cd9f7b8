"""Subscribers of the pool's events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

from kvstore import metrics
from kvstore._native import Block
from kvstore.core.pool import Pool
from kvstore.core.results import PoolEvent
from springtide.errors import SpringtideError
from springtide.ids import BlockKey
from springtide.protocol.storage import Tier

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


class Snapshot:
    """What was held as of event `sequence`. The blocks themselves, for their keys never change: to list them takes a fraction of the time
    that copying their keys does, and 8 bytes each, shared by all that subscribe at this event; what is evicted stays in memory."""

    def __init__(self, held: Mapping[Tier, Sequence[Block]], sequence: int) -> None:
        self.sequence = sequence
        self._held = held

    def parts(self) -> Iterator[SnapshotPart]:
        """Each is made when it is asked for."""
        *_, last = self._held
        for tier, blocks in self._held.items():
            for begin in range(0, max(len(blocks), 1), SNAPSHOT_PART_KEYS):
                end = begin + SNAPSHOT_PART_KEYS
                yield SnapshotPart(self.sequence, [block.key for block in blocks[begin:end]], tier, tier is last and end >= len(blocks))


class Subscription:
    """A snapshot in parts, then the events that came after it. `put` never waits: a subscriber that stands still costs the store at most
    MAX_LAG_KEYS keys of events beside its snapshot, and is then cut off."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.sequence = snapshot.sequence
        self._parts = snapshot.parts()
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
            self._parts = iter(())
            self._events.clear()
        self._wake.set()
        return not self._lags

    async def next(self) -> SnapshotPart | PoolEvent:
        """Waits for it. Raises WatcherLags."""
        while True:
            if self._lags:
                raise WatcherLags(f"more than {MAX_LAG_KEYS} blocks behind: watch anew")
            part = next(self._parts, None)
            if part is not None:
                return part
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
        self._snapshots: WeakValueDictionary[int, Snapshot] = WeakValueDictionary()
        """By sequence, as long as somebody has not taken all of it."""
        self.num_cut_off = 0
        """Since the start."""

    def __len__(self) -> int:
        return len(self._subscriptions)

    def subscribe(self) -> Subscription:
        """The pool's events so far must have been published."""
        snapshot = self._snapshots.get(self._pool.sequence)
        if snapshot is None:
            held = {Tier.DRAM: self._pool.held_blocks()}
            if self._pool.ssd is not None:
                held[Tier.SSD] = self._pool.ssd.held_blocks()
            snapshot = self._snapshots[self._pool.sequence] = Snapshot(held, self._pool.sequence)
        subscription = Subscription(snapshot)
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
