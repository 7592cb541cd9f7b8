"""Subscribers of the pool's events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from kvstore import metrics
from kvstore.core.pool import Pool
from kvstore.core.results import PoolEvent
from springtide.errors import SpringtideError
from springtide.ids import BlockKey

MAX_LAG_EVENTS = 10_000


class WatcherLags(SpringtideError):
    """It took in events too slowly, and has to begin anew with a snapshot."""


class Subscription:
    """A snapshot, `keys` as of event `sequence`, and the events that came after."""

    def __init__(self, keys: Sequence[BlockKey], sequence: int) -> None:
        self.keys = keys
        self.sequence = sequence
        self._events: deque[PoolEvent] = deque()
        self._wake = asyncio.Event()
        self._lags = False

    def put(self, events: Sequence[PoolEvent]) -> None:
        if self._lags:
            return
        self._events.extend(events)
        if len(self._events) > MAX_LAG_EVENTS:
            self._lags = True
            self._events.clear()
            metrics.WATCHERS_CUT_OFF.inc()
        self._wake.set()

    async def next(self) -> PoolEvent:
        """Waits for it. Raises WatcherLags."""
        while not self._events:
            if self._lags:
                raise WatcherLags(f"more than {MAX_LAG_EVENTS} events behind: watch anew")
            self._wake.clear()
            await self._wake.wait()
        return self._events.popleft()


class Watchers:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._subscriptions: set[Subscription] = set()

    def subscribe(self) -> Subscription:
        """The pool's events so far must have been published."""
        subscription = Subscription(self._pool.held_keys(), self._pool.sequence)
        self._subscriptions.add(subscription)
        metrics.WATCHERS.set(len(self._subscriptions))
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)
        metrics.WATCHERS.set(len(self._subscriptions))

    def publish(self, events: Sequence[PoolEvent]) -> None:
        if events:
            for subscription in self._subscriptions:
                subscription.put(events)
