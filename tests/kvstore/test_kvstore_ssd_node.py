"""The blocks of a node's SSD and their bytes, kept in step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from ssd_support import BLOCK_BYTES, ManualDisk, key, open_tier

from kvstore.core.pool import Pool
from kvstore.server.shared.ssd import Ssd
from kvstore.server.shared.stripe_ssd import OwnSsd
from kvstore.ssd.disk import aligned_memory
from springtide.clock import ManualClock
from springtide.ids import AttemptId, Slot

NUM_SLOTS = 16


class Bench:
    def __init__(self) -> None:
        self.disk = ManualDisk(ManualClock())
        self.pool = Pool([0] * NUM_SLOTS, 1, ssd_capacity=100)
        self.ssd: Ssd

    @property
    def blocks_on_ssd(self) -> int:
        assert self.pool.ssd is not None
        assert len(self.pool.ssd) == len(self.ssd.own.tier), "the blocks and their bytes are kept in step"
        return len(self.pool.ssd)

    def cache(self, *numbers: int) -> None:
        keys, attempt_id = [key(number) for number in numbers], AttemptId(str(numbers))
        self.pool.acquire(attempt_id, keys, len(keys), 0)
        self.pool.commit(attempt_id, 0, keys)
        self.pool.release(attempt_id)

    async def demote(self, at_most: int = NUM_SLOTS) -> int:
        return await self.ssd.put(self.ssd.copy_out(self.ssd.blocks.next_copies(at_most)))

    def spoil(self, number: int) -> None:
        """What reads this block fails."""
        files, place = self.ssd.own.tier._files, self.ssd.own.tier._records[key(number)].place
        self.disk.failing_reads = {files._segments[place.segment]._offset(place.slot)}


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench()
    tier = await open_tier(tmp_path, disk=bench.disk, clock=bench.disk.clock)
    assert bench.pool.ssd is not None
    arena = np.frombuffer(aligned_memory(NUM_SLOTS * BLOCK_BYTES), np.uint8)
    bench.ssd = Ssd(OwnSsd(tier, arena, BLOCK_BYTES), bench.pool.ssd)
    yield bench
    bench.disk.may_read.set()
    await bench.ssd.close()


@pytest.mark.parametrize("reader", ["verify", "read"])
async def test_a_block_that_fails_while_its_reader_is_cancelled_is_given_up(bench: Bench, reader: str) -> None:
    bench.cache(1, 2)
    assert await bench.demote(1) == 1
    bench.spoil(1)
    bench.disk.may_read.clear()
    reading = asyncio.create_task(bench.ssd.verify() if reader == "verify" else bench.ssd.read([key(1)], 0, [Slot(9)]))
    await asyncio.to_thread(bench.disk.waiting_reads.acquire)
    reading.cancel()
    await asyncio.sleep(0)
    bench.disk.may_read.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert bench.blocks_on_ssd == 0
    assert await bench.demote() == 2, "it is written anew, and what continues it"


async def test_a_block_whose_bytes_are_gone_does_not_keep_its_children_out(bench: Bench) -> None:
    bench.cache(1, 2)
    assert await bench.demote(1) == 1
    await bench.ssd.own.tier.remove([key(1)])
    assert await bench.demote() == 0
    assert bench.blocks_on_ssd == 0
    assert await bench.demote() == 2


async def test_what_made_room_before_it_was_read_costs_nothing_else(bench: Bench) -> None:
    bench.cache(1, 2, 3)
    assert await bench.demote() == 3
    await bench.ssd.remove(bench.ssd.blocks.make_room(1))
    losses = bench.ssd.blocks.losses
    assert await bench.ssd.read([key(1), key(2), key(3)], 0, [Slot(7), Slot(8), Slot(9)]) == 2
    assert bench.ssd.blocks.losses == losses, "nothing was looked for among all blocks"
    assert bench.blocks_on_ssd == 2


async def test_blocks_evicted_by_order_while_they_are_written_are_not_kept(bench: Bench) -> None:
    bench.cache(1, 2)
    writing = asyncio.create_task(bench.demote())
    await asyncio.sleep(0)
    assert bench.pool.evict(None).blocks == 2
    assert await writing == 0
    assert bench.blocks_on_ssd == 0


async def test_a_prompt_in_two_batches_written_beside_each_other_is_kept_whole(bench: Bench) -> None:
    bench.cache(1, 2, 3, 4)
    head = bench.ssd.blocks.next_copies(2)
    first = asyncio.create_task(bench.ssd.put(bench.ssd.copy_out(head)))
    in_flight = {copy.key for copy in head}
    rest = bench.ssd.blocks.next_copies(NUM_SLOTS, in_flight=in_flight)
    assert [copy.key for copy in rest] == [key(3), key(4)]
    assert bench.ssd.blocks.next_copies(NUM_SLOTS, in_flight=in_flight | {copy.key for copy in rest}) == []
    second = asyncio.create_task(bench.ssd.put(bench.ssd.copy_out(rest), after=first))
    assert await asyncio.gather(second, first) == [2, 2]
    assert bench.blocks_on_ssd == 4


async def test_the_estimate_fits_its_field_however_long_a_read_hangs(bench: Bench) -> None:
    bench.cache(1)
    await bench.demote()
    bench.disk.may_read.clear()
    reading = asyncio.create_task(bench.ssd.read([key(1)], 0, [Slot(9)]))
    await asyncio.to_thread(bench.disk.waiting_reads.acquire)
    bench.disk.clock.advance(1e6)
    assert bench.ssd.read_us_per_block == 1 << 31
    bench.disk.may_read.set()
    assert await reading == 1
