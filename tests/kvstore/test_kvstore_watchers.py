"""Subscriptions to the pool's events."""

from __future__ import annotations

import pytest
from kvstore_support import keys_of

from kvstore.core.pool import Pool
from kvstore.core.results import Stored
from kvstore.server.watchers import MAX_LAG_EVENTS, WatcherLags, Watchers


async def test_events_come_in_order_and_a_watcher_that_lags_too_far_is_cut_off() -> None:
    watchers = Watchers(Pool([0] * 4, 1))
    quick, slow = watchers.subscribe(), watchers.subscribe()
    events = [Stored(sequence, keys_of(sequence)) for sequence in range(1, MAX_LAG_EVENTS + 2)]
    for event in events:
        watchers.publish([event])
        assert await quick.next() == event
    with pytest.raises(WatcherLags, match="watch anew"):
        await slow.next()
    watchers.unsubscribe(slow)
    watchers.publish([Stored(MAX_LAG_EVENTS + 2, [])])
    with pytest.raises(WatcherLags):
        await slow.next()
