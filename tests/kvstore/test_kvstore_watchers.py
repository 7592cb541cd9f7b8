"""Subscriptions to the pool's events."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import subprocess
import sys
import tracemalloc
import weakref
from collections.abc import Sequence

import pytest
from kvstore_support import Starter, keys_of

from kvstore.core.journal import MAX_EVENT_KEYS
from kvstore.core.pool import Pool
from kvstore.server.shared.watchers import MAX_LAG_KEYS, SNAPSHOT_PART_KEYS, WatcherLags, Watchers
from springtide.ids import AttemptId, BlockKey, Incarnation, NodeId
from springtide.protocol.storage import BlocksRemoved, BlocksStored, SnapshotPart, Tier

NODE, INCARNATION = NodeId("here"), Incarnation(5)


def many_keys(count: int) -> list[BlockKey]:
    return [BlockKey(number.to_bytes(16, "big")) for number in range(count)]


def stored(sequence: int, keys: Sequence[BlockKey]) -> BlocksStored:
    return BlocksStored(NODE, INCARNATION, sequence, tuple(keys), Tier.DRAM)


async def test_events_come_in_order_and_a_watcher_that_lags_too_far_is_cut_off() -> None:
    watchers = Watchers(Pool([0] * 4, 1, node_id=NODE, incarnation=INCARNATION))
    quick, slow = watchers.subscribe(), watchers.subscribe()
    assert await quick.next() == SnapshotPart(NODE, INCARNATION, 0, (), Tier.DRAM, complete=True)
    keys = many_keys(1000)
    for sequence in range(1, MAX_LAG_KEYS // len(keys) + 2):
        watchers.publish([stored(sequence, keys)])
        assert await quick.next() == stored(sequence, keys)
    with pytest.raises(WatcherLags, match="watch anew"):
        await slow.next()
    watchers.unsubscribe(slow)
    watchers.publish([stored(MAX_LAG_KEYS + 2, [])])
    with pytest.raises(WatcherLags):
        await slow.next()


async def test_a_snapshot_of_many_blocks_comes_in_bounded_parts_and_what_happens_meanwhile_after_it() -> None:
    pool, keys = Pool([0] * 10_000, 1), many_keys(10_000)
    pool.acquire(AttemptId("a"), keys, len(keys), 0)
    pool.commit(AttemptId("a"), 0, keys)
    pool.take_events()
    watchers = Watchers(pool)
    subscription = watchers.subscribe()
    pool.release(AttemptId("a"))
    assert pool.evict(None).blocks == 10_000
    watchers.publish(pool.take_events())
    parts = [await subscription.next() for _ in range(3)]
    assert all(isinstance(part, SnapshotPart) and len(part.keys) <= SNAPSHOT_PART_KEYS for part in parts)
    assert [part.complete for part in parts if isinstance(part, SnapshotPart)] == [False, False, True]
    assert list(itertools.chain.from_iterable(part.keys for part in parts)) == keys
    removed = [await subscription.next() for _ in range(3)]
    assert all(isinstance(event, BlocksRemoved) and len(event.keys) <= MAX_EVENT_KEYS for event in removed)
    assert sum(len(event.keys) for event in removed) == 10_000


async def test_subscribers_of_the_same_event_share_a_snapshot_that_is_given_up_with_the_last() -> None:
    pool, keys = Pool([0] * 10_000, 1), many_keys(10_000)
    pool.acquire(AttemptId("a"), keys, len(keys), 0)
    pool.commit(AttemptId("a"), 0, keys)
    pool.take_events()
    watchers = Watchers(pool)
    idle = watchers.subscribe()
    tracemalloc.start()
    subscribed = [watchers.subscribe() for _ in range(100)]
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 100 * len(keys), "less than a byte a key"
    for subscription in subscribed:
        parts = [await subscription.next() for _ in range(3)]
        assert list(itertools.chain.from_iterable(part.keys for part in parts)) == keys
    held = weakref.ref(next(iter(watchers._snapshots.values())))
    del subscription, subscribed
    watchers.publish([stored(pool.sequence + 1, many_keys(MAX_LAG_KEYS + 1))])
    with pytest.raises(WatcherLags):
        await idle.next()
    watchers._subscriptions.clear()
    gc.collect()
    assert held() is None


WATCHER = """
import asyncio, sys
from springtide.rpc import channels, store_pb2 as pb
from springtide.rpc.store_pb2_grpc import StoreStub
async def main():
    async with channels.connect(sys.argv[1]) as channel:
        for _ in range(2):
            held, complete = set(), False
            try:
                async for event in StoreStub(channel).Watch(pb.WatchStoreRequest(watcher="slow")):
                    held.update(event.snapshot.keys)
                    held.update(event.stored.keys)
                    held.difference_update(event.removed.keys)
                    if event.snapshot.complete:
                        print("snapshot", len(held), event.snapshot.sequence, flush=True)
            except Exception as error:
                print("cut off", error.code().name, flush=True)
asyncio.run(main())
"""


async def test_a_stopped_subscriber_is_cut_off_and_resynchronised_while_the_store_goes_on(start: Starter) -> None:
    """100 000 blocks, and a subscriber that is stopped with SIGSTOP while they are replaced three times over."""
    _, engine = await start("prefill-0", num_slots=100_000)
    with subprocess.Popen([sys.executable, "-c", WATCHER, engine.link.address], stdout=subprocess.PIPE, text=True) as watcher:  # noqa: ASYNC220
        try:
            assert watcher.stdout is not None
            assert await asyncio.to_thread(watcher.stdout.readline) == "snapshot 0 0\n"
            os.kill(watcher.pid, signal.SIGSTOP)
            await engine.keep(*(keys_of(label, *range(999)) for label in range(400)))
            stat = await engine.stat()
            assert stat.slots_cached == 100_000 - 1
            os.kill(watcher.pid, signal.SIGCONT)
            said = await asyncio.to_thread(watcher.stdout.readline)
            # Who has been still for too long for a ping has lost the connection, too; on a slow machine before it lags too far.
            assert said == "cut off UNAVAILABLE\n" or (said, stat.watchers_cut_off) == ("cut off OUT_OF_RANGE\n", 1)
            assert await asyncio.to_thread(watcher.stdout.readline) == f"snapshot {stat.slots_cached} {stat.sequence}\n"
        finally:
            watcher.kill()
