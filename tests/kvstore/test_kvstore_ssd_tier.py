"""What the SSD tier does while it is open."""

from __future__ import annotations

import asyncio
import errno
import random
from pathlib import Path

import pytest
from ssd_support import (
    BLOCK_BYTES,
    MIB,
    ODD_BLOCK_BYTES,
    ManualDisk,
    block,
    chain,
    content,
    key,
    memory_of,
    open_tier,
    read,
    small_segments,
)

from kvstore.ssd.disk import ALIGNMENT, aligned_memory
from kvstore.ssd.errors import SsdUnavailable
from kvstore.ssd.health import RETRY_S, TierState
from kvstore.ssd.tier import PutBlock
from springtide.clock import ManualClock


@pytest.mark.parametrize("num_bytes", [BLOCK_BYTES, ODD_BLOCK_BYTES, 3 * MIB])
async def test_what_was_put_is_got(tmp_path: Path, num_bytes: int) -> None:
    tier = await open_tier(tmp_path, 20 * num_bytes + MIB, num_bytes)
    assert await tier.put(chain([1, 2, 3], num_bytes)) == [True] * 3
    assert await read(tier, [3, 1, 2, 1], num_bytes) == ["right"] * 4
    assert tier.counts().held == len(tier) == 3
    await tier.close()


async def test_blocks_side_by_side_and_scattered_are_got_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_segments(monkeypatch, 40 * BLOCK_BYTES)
    tier = await open_tier(tmp_path, 200 * BLOCK_BYTES)
    assert all(await tier.put([block(number) for number in range(150)]))
    await tier.remove([key(number) for number in range(0, 150, 7)])
    assert all(await tier.put([block(number) for number in range(200, 215)]))
    numbers = [number for number in range(150) if number % 7] + list(range(200, 215))
    random.Random(1).shuffle(numbers)
    assert await read(tier, numbers) == ["right"] * len(numbers)
    await tier.close()


async def test_what_is_not_held_is_reported_and_the_rest_is_got(tmp_path: Path) -> None:
    tier = await open_tier(tmp_path)
    await tier.put(chain([1, 2]))
    assert await read(tier, [1, 9, 2]) == ["right", "BlockNotHeld", "right"]
    await tier.close()


async def test_a_block_that_is_held_is_not_written_again(tmp_path: Path) -> None:
    tier = await open_tier(tmp_path)
    await tier.put([block(1)])
    free = tier.counts().free
    other = PutBlock(key(1), None, memory_of(key(2)))
    assert await tier.put([other, block(3), block(3)]) == [True, True, True]
    assert tier.counts().free == free - 1
    assert await read(tier, [1, 3]) == ["right", "right"]
    await tier.close()


async def test_a_block_without_its_parent_is_refused(tmp_path: Path) -> None:
    tier = await open_tier(tmp_path)
    assert await tier.put([block(2, parent=1), block(1), block(3, parent=1)]) == [False, True, True]
    await tier.close()


async def test_a_child_whose_parent_goes_while_it_is_written_is_not_held(tmp_path: Path) -> None:
    tier = await open_tier(tmp_path)
    await tier.put([block(1)])
    free = tier.counts().free
    putting = asyncio.create_task(tier.put([block(2, parent=1)]))
    await asyncio.sleep(0)
    await tier.remove([key(1)])
    assert await putting == [False]
    assert tier.counts().free == free + 1
    await tier.close()


async def test_a_block_that_another_put_is_writing_is_not_written_twice(tmp_path: Path) -> None:
    tier = await open_tier(tmp_path)
    free = tier.counts().free
    results = await asyncio.gather(*(tier.put([block(1)]) for _ in range(3)))
    assert [True] in results
    assert tier.counts().free == free - 1
    await tier.close()


async def test_what_continues_a_block_under_way_is_written_beside_it_and_held_after_it(tmp_path: Path) -> None:
    tier = await open_tier(tmp_path)
    first, *later = chain(range(4))
    puts = [asyncio.create_task(tier.put(part)) for part in ([first], later[:2], later[2:])]
    assert [await put for put in puts] == [[True], [True, True], [True]]
    assert await read(tier, range(4)) == ["right"] * 4
    await tier.close()


async def test_what_continues_a_block_under_way_is_refused_with_it(tmp_path: Path) -> None:
    disk = ManualDisk(ManualClock())
    tier = await open_tier(tmp_path, disk=disk, clock=disk.clock)
    await tier.put([block(9)])
    free, place = tier.counts().free, tier._records[key(9)].place
    offset = tier._files._segments[place.segment]._offset(place.slot + 1)
    disk.write_errno, disk.failing_writes = errno.EIO, range(offset, offset + 1)
    first, *later = chain(range(4))
    puts = [asyncio.create_task(tier.put(part)) for part in ([first], later[:2], later[2:])]
    assert [await put for put in puts] == [[False], [False, False], [False]]
    disk.write_errno = 0
    disk.clock.advance(1e6)
    assert tier.counts().free == free, "their room is free again"
    assert await tier.put([first, *later]) == [True] * 4
    await tier.close()


async def test_a_full_tier_refuses_until_something_is_removed(tmp_path: Path) -> None:
    tier = await open_tier(tmp_path)
    capacity = tier.counts().capacity
    assert tier.counts().free == capacity
    stored = await tier.put(chain(range(capacity + 5)))
    assert stored == [True] * capacity + [False] * 5
    assert tier.counts().free == 0
    await tier.remove([key(capacity - 1), key(capacity - 2)])
    assert tier.counts().free == 2
    assert await read(tier, [capacity - 1]) == ["BlockNotHeld"]
    assert await tier.put([block(1000), block(1001), block(1002)]) == [True, True, False]
    assert await read(tier, [0, 1000, 1001]) == ["right"] * 3
    await tier.close()


async def test_the_files_stay_within_the_capacity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_segments(monkeypatch, 10 * BLOCK_BYTES)
    tier = await open_tier(tmp_path, 75 * BLOCK_BYTES)
    stored = await tier.put([block(number) for number in range(100)])
    assert sum(stored) == tier.counts().capacity >= 50
    assert size_of(tmp_path) <= 75 * BLOCK_BYTES
    await tier.close()


async def test_a_block_removed_while_it_is_read_is_got_whole(tmp_path: Path) -> None:
    disk = ManualDisk(ManualClock())
    tier = await open_tier(tmp_path, disk=disk)
    capacity = tier.counts().capacity
    await tier.put([block(number) for number in range(capacity)])
    disk.may_read.clear()
    reading = asyncio.create_task(read(tier, [7]))
    await asyncio.to_thread(disk.waiting_reads.acquire)
    await tier.remove([key(7)])
    assert await tier.put([block(1000)]) == [False], "its slot is still being read"
    disk.may_read.set()
    assert await reading == ["right"]
    assert await tier.put([block(1000)]) == [True]
    await tier.close()


async def test_the_memory_of_a_cancelled_get_is_at_rest_when_it_ends(tmp_path: Path) -> None:
    disk = ManualDisk(ManualClock())
    tier = await open_tier(tmp_path, disk=disk)
    await tier.put([block(1)])
    disk.may_read.clear()
    memory = aligned_memory(BLOCK_BYTES)
    getting = asyncio.create_task(tier.get([key(1)], [memory]))
    await asyncio.to_thread(disk.waiting_reads.acquire)
    for _ in range(3):
        getting.cancel()
        await asyncio.sleep(0)
    assert not getting.done()
    disk.may_read.set()
    with pytest.raises(asyncio.CancelledError):
        await getting
    assert memory == content(key(1))
    await tier.close()


async def test_close_waits_for_what_is_under_way_and_then_everything_is_refused(tmp_path: Path) -> None:
    tier = await open_tier(tmp_path)
    putting = asyncio.create_task(tier.put(chain(range(50))))
    await asyncio.sleep(0)
    await tier.close()
    await tier.close()
    assert await putting == [True] * 50
    for call in (tier.put([block(1)]), tier.get([key(1)], [aligned_memory(BLOCK_BYTES)]), tier.remove([key(1)])):
        with pytest.raises(SsdUnavailable, match="closed"):
            await call


async def test_puts_gets_and_removes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    small_segments(monkeypatch, 20 * BLOCK_BYTES)
    tier = await open_tier(tmp_path, 100 * BLOCK_BYTES)

    async def user(first: int, rng: random.Random) -> list[str]:
        outcomes: list[str] = []
        for _ in range(40):
            numbers = [rng.randrange(first, first + 40) for _ in range(8)]
            match rng.choice(["put", "get", "remove"]):
                case "put":
                    await tier.put([block(number) for number in numbers])
                case "get":
                    outcomes += await read(tier, numbers)
                case _:
                    await tier.remove([key(number) for number in numbers])
        return outcomes

    users = [user(20 * i, random.Random(seed + i)) for i in range(5)]
    outcomes = {outcome for part in await asyncio.gather(*users) for outcome in part}
    assert outcomes == {"right", "BlockNotHeld"}
    counts = tier.counts()
    assert counts.held + counts.free == counts.capacity
    await tier.close()


async def test_memory_of_a_wrong_size_or_alignment_is_refused_by_name(tmp_path: Path) -> None:
    tier = await open_tier(tmp_path)
    with pytest.raises(ValueError, match="a block has 8192 bytes, its memory 4096"):
        await tier.get([key(1)], [aligned_memory(4096)])
    if tier.direct:
        with pytest.raises(ValueError, match="not aligned to 4096"):
            await tier.put([PutBlock(key(1), None, aligned_memory(2 * BLOCK_BYTES)[512 : 512 + BLOCK_BYTES])])
    await tier.close()


async def test_a_tier_without_room_for_one_block_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(SsdUnavailable, match="capacity_bytes: 10000 has no room for one block"):
        await open_tier(tmp_path, 10_000)


async def test_a_disk_that_fails_to_write_is_asked_again_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvstore.ssd.health")
    clock = ManualClock()
    disk = ManualDisk(clock)
    tier = await open_tier(tmp_path, disk=disk, clock=clock)
    await tier.put([block(1)])
    disk.write_errno = errno.EIO
    assert await tier.put(chain([2, 3])) == [False, False]
    assert tier.counts().state is TierState.FAILING
    assert tier.counts().free == 0
    assert await read(tier, [1, 2]) == ["right", "BlockNotHeld"]
    disk.write_errno = 0
    assert await tier.put([block(2)]) == [False], "it is not asked at every put"
    clock.advance(RETRY_S)
    assert await tier.put(chain([2, 3])) == [True, True]
    assert tier.counts().state is TierState.TAKING
    assert tier.counts().held + tier.counts().free == tier.counts().capacity
    assert [record.message.partition(",")[0] for record in caplog.records] == [
        "the SSD tier takes no blocks",
        "the SSD tier takes blocks again",
    ]
    await tier.close()


async def test_a_block_whose_entry_cannot_be_written_is_not_held_now_or_after_a_restart(tmp_path: Path) -> None:
    clock = ManualClock()
    disk = ManualDisk(clock)
    tier = await open_tier(tmp_path, disk=disk, clock=clock)
    await tier.put([block(1)])
    disk.write_errno, disk.failing_writes = errno.EIO, range(2 * ALIGNMENT)
    assert await tier.put(chain([2, 3])) == [False, False]
    disk.write_errno = 0
    clock.advance(RETRY_S)
    assert await tier.put([block(4)]) == [True]
    for _ in range(2):
        assert [own for own, _ in tier.blocks()] == [key(1), key(4)]
        assert await read(tier, [1, 4]) == ["right", "right"]
        await tier.close()
        tier = await open_tier(tmp_path)
    await tier.close()


async def test_a_block_whose_removal_cannot_be_written_may_be_found_again_and_is_whole(tmp_path: Path) -> None:
    disk = ManualDisk(ManualClock())
    tier = await open_tier(tmp_path, disk=disk)
    await tier.put(chain([1, 2, 3]))
    disk.write_errno = errno.EIO
    await tier.remove([key(3), key(2)])
    assert await read(tier, [1, 2, 3]) == ["right", "BlockNotHeld", "BlockNotHeld"]
    assert tier.counts().state is TierState.FAILING
    await tier.close()
    tier = await open_tier(tmp_path)
    assert await read(tier, [1, 2, 3]) == ["right"] * 3
    await tier.close()


async def test_a_block_that_cannot_be_read_is_dropped_and_its_slot_not_used_again(tmp_path: Path) -> None:
    clock = ManualClock()
    disk = ManualDisk(clock)
    tier = await open_tier(tmp_path, disk=disk, clock=clock)
    await tier.put(chain([1, 2, 3]))
    before = tier.counts()
    disk.failing_reads = {tier_offset(tmp_path, 2)}
    assert await read(tier, [1, 2, 3]) == ["right", "DiskError", "right"]
    assert key(2) not in tier
    counts = tier.counts()
    assert (counts.free, counts.retired, counts.capacity) == (before.free, 1, before.capacity - 1)
    assert counts.dropped["disk_error"] == 1
    await tier.close()


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def tier_offset(directory: Path, number: int) -> int:
    (segment,) = directory.glob("*.kvsegment")
    return segment.read_bytes().index(content(key(number)))
