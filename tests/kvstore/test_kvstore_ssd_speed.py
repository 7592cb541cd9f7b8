"""The estimate of how long a read takes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from ssd_support import BLOCK_BYTES, ManualDisk, block, key, open_tier, read

from kvstore.ssd.disk import aligned_memory
from kvstore.ssd.speed import ASSUMED_SECONDS_PER_BYTE, RELAX_HALF_LIFE_S, ReadSpeed
from springtide.clock import ManualClock

MIB = 1 << 20


def read_one(speed: ReadSpeed, clock: ManualClock, num_bytes: int, seconds: float) -> None:
    speed.queued(num_bytes)
    ticket = speed.began()
    clock.advance(seconds)
    speed.ended(ticket, num_bytes)


def test_a_disk_never_read_is_taken_to_be_fast() -> None:
    assert ReadSpeed(ManualClock()).estimate_s(MIB) == pytest.approx(MIB * ASSUMED_SECONDS_PER_BYTE)


def test_a_read_that_does_not_come_back_is_told_from_many_that_do() -> None:
    clock = ManualClock()
    speed = ReadSpeed(clock)
    for _ in range(10):
        read_one(speed, clock, MIB, 0.5)
    assert speed.hanging_s() == 0
    speed.began()
    clock.advance(3)
    assert speed.hanging_s() == 3


def test_the_estimate_follows_the_disk() -> None:
    clock = ManualClock()
    speed = ReadSpeed(clock)
    for seconds in (0.01, 0.5, 0.002):
        for _ in range(60):
            read_one(speed, clock, MIB, seconds)
        assert speed.estimate_s(MIB) == pytest.approx(seconds, rel=0.01)
        assert speed.estimate_s(10 * MIB) == pytest.approx(10 * seconds, rel=0.01)


def test_reads_at_once_count_the_time_of_the_disk_once() -> None:
    clock = ManualClock()
    speed = ReadSpeed(clock)
    for _ in range(30):
        speed.queued(4 * MIB)
        tickets = [speed.began() for _ in range(4)]
        for ticket in tickets:
            clock.advance(0.1)
            speed.ended(ticket, MIB)
    assert speed.estimate_s(10 * MIB) == pytest.approx(1.0, rel=0.01)
    assert speed.estimate_s(1) > 0.2, "no read is done sooner than one of them took"


def test_what_is_queued_comes_first() -> None:
    clock = ManualClock()
    speed = ReadSpeed(clock)
    read_one(speed, clock, MIB, 0.1)
    speed.queued(5 * MIB)
    assert speed.estimate_s(MIB) == pytest.approx(0.6, rel=0.01)


def test_time_without_reads_does_not_count_and_a_slow_disk_is_asked_again() -> None:
    clock = ManualClock()
    speed = ReadSpeed(clock)
    read_one(speed, clock, MIB, 4.0)
    clock.advance(RELAX_HALF_LIFE_S)
    assert speed.estimate_s(MIB) == pytest.approx(2.0, rel=0.01)
    clock.advance(20 * RELAX_HALF_LIFE_S)
    assert speed.estimate_s(MIB) == pytest.approx(MIB * ASSUMED_SECONDS_PER_BYTE, rel=0.01)
    read_one(speed, clock, MIB, 4.0)
    assert speed.estimate_s(MIB) == pytest.approx(4.0, rel=0.01)


async def test_a_slow_disk_shows_in_the_estimate_of_the_tier(tmp_path: Path) -> None:
    clock = ManualClock()
    disk = ManualDisk(clock)
    tier = await open_tier(tmp_path, disk=disk, clock=clock)
    await tier.put([block(number) for number in range(20)])
    before = tier.estimated_read_s(100)
    disk.read_s = 0.25
    for number in range(20):
        assert await read(tier, [number]) == ["right"]
    assert before < 0.01
    assert tier.estimated_read_s(100) == pytest.approx(25.0, rel=0.05)
    await tier.close()


async def test_a_disk_that_hangs_shows_in_the_estimate_at_once(tmp_path: Path) -> None:
    clock = ManualClock()
    disk = ManualDisk(clock)
    tier = await open_tier(tmp_path, disk=disk, clock=clock)
    await tier.put([block(1), block(2)])
    disk.may_read.clear()
    getting = asyncio.create_task(tier.get([key(1)], [aligned_memory(BLOCK_BYTES)]))
    await asyncio.to_thread(disk.waiting_reads.acquire)
    clock.advance(7.0)
    assert tier.estimated_read_s(1) >= 7.0
    disk.may_read.set()
    assert await getting == [None]
    await tier.close()
