"""The subscribers of the pool's events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from weakref import WeakValueDictionary

from kvstore import metrics
from kvstore._native import Block
from kvstore.core.pool import Pool
from springtide.errors import SpringtideError
from springtide.protocol.storage import BlockEvent, SnapshotPart, Tier

MAX_LAG_KEYS = 200_000
"""The most keys in events that wait for one subscriber, some 20 MB. Events themselves are bounded (kvstore.core.journal.MAX_EVENT_KEYS)."""
SNAPSHOT_PART_KEYS = 4096


class WatcherLags(SpringtideError):
    """A subscriber took in events too slowly, and has to begin anew with a snapshot."""


class Snapshot:
    """All that was held at one event. The blocks themselves, for their keys never change: to list them takes a fraction of the time
    that copying their keys does, and 8 bytes each, shared by all that subscribe at this event; what is evicted stays in memory."""

    def __init__(self, pool: Pool) -> None:
        self._node_id, self._incarnation, self.sequence = pool.node_id, pool.incarnation, pool.sequence
        self._held: dict[Tier, Sequence[Block]] = {Tier.DRAM: pool.held_blocks()}
        if pool.ssd is not None:
            self._held[Tier.SSD] = pool.ssd.held_blocks()

    def parts(self) -> Iterator[SnapshotPart]:
        """The snapshot in parts, each made when it is asked for."""
        *_, last = self._held
        for tier, blocks in self._held.items():
            for begin in range(0, max(len(blocks), 1), SNAPSHOT_PART_KEYS):
                end = begin + SNAPSHOT_PART_KEYS
                keys = tuple([block.key for block in blocks[begin:end]])
                complete = tier is last and end >= len(blocks)
                yield SnapshotPart(self._node_id, self._incarnation, self.sequence, keys, tier, complete)


class Subscription:
    """A snapshot in parts, then the events that came after it. `put` never waits: a subscriber that stands still costs the store at most
    MAX_LAG_KEYS keys of events beside its snapshot, and is then cut off."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.sequence = snapshot.sequence
        self._parts = snapshot.parts()
        self._events: deque[BlockEvent] = deque()
        self._num_keys = 0
        self._wake = asyncio.Event()
        self._lags = False

    def put(self, events: Sequence[BlockEvent]) -> bool:
        """Adds events. False when it is cut off by this."""
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

    async def next(self) -> SnapshotPart | BlockEvent:
        """The next of them, for which it waits. Raises WatcherLags."""
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
    """The subscriptions to a pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._subscriptions: set[Subscription] = set()
        self._snapshots: WeakValueDictionary[int, Snapshot] = WeakValueDictionary()
        """Each by its sequence, as long as somebody has not taken all of it."""
        self.num_cut_off = 0
        """The number of those that lagged too far, since the start."""

    def __len__(self) -> int:
        return len(self._subscriptions)

    def subscribe(self) -> Subscription:
        """A new subscription. The pool's events so far must have been published."""
        snapshot = self._snapshots.get(self._pool.sequence)
        if snapshot is None:
            snapshot = self._snapshots[self._pool.sequence] = Snapshot(self._pool)
        subscription = Subscription(snapshot)
        self._subscriptions.add(subscription)
        metrics.WATCHERS.set(len(self._subscriptions))
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)
        metrics.WATCHERS.set(len(self._subscriptions))

    def publish(self, events: Sequence[BlockEvent]) -> None:
        """Gives each subscription the events; cuts off those that lag too far."""
        if events:
            for subscription in self._subscriptions:
                if not subscription.put(events):
                    self.num_cut_off += 1
                    metrics.WATCHERS_CUT_OFF.inc()
