"""What the SSD tier holds after a restart."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from ssd_support import (
    BLOCK_BYTES,
    FINGERPRINT,
    MIB,
    ODD_BLOCK_BYTES,
    ManualDisk,
    block,
    chain,
    content,
    key,
    open_tier,
    read,
    small_segments,
)

from kvstore.ssd.disk import ALIGNMENT, Disk
from kvstore.ssd.errors import DiskError, SsdUnavailable
from kvstore.ssd.format import ENTRY_BYTES
from springtide.clock import ManualClock


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.kvsegment"))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("num_bytes", [BLOCK_BYTES, ODD_BLOCK_BYTES])
async def test_what_was_put_is_there_after_a_restart(tmp_path: Path, num_bytes: int) -> None:
    tier = await open_tier(tmp_path, num_bytes=num_bytes)
    await tier.put(chain([1, 2, 3], num_bytes))
    await tier.put(chain([1, 4], num_bytes))
    await tier.remove([key(3)])
    before = tier.counts()
    await tier.close()
    tier = await open_tier(tmp_path, num_bytes=num_bytes)
    assert tier.blocks() == [(key(1), None), (key(2), key(1)), (key(4), key(1))]
    assert await read(tier, [1, 2, 4, 3], num_bytes) == ["right", "right", "right", "BlockNotHeld"]
    assert tier.counts().held + tier.counts().free == tier.counts().capacity == before.capacity
    await tier.close()


async def test_a_slot_used_again_holds_the_new_block_after_a_restart(tmp_path: Path) -> None:
    tier = await open_tier(tmp_path)
    capacity = tier.counts().capacity
    await tier.put([block(number) for number in range(capacity)])
    await tier.remove([key(number) for number in range(0, capacity, 2)])
    await tier.put([block(1000 + number) for number in range(0, capacity, 2)])
    await tier.close()
    tier = await open_tier(tmp_path)
    numbers = [number + 1000 * (number % 2 == 0) for number in range(capacity)]
    assert await read(tier, numbers) == ["right"] * capacity
    assert len(tier) == capacity
    await tier.close()


async def test_blocks_of_another_model_or_size_are_never_served(tmp_path: Path) -> None:
    tier = await open_tier(tmp_path)
    await tier.put(chain([1, 2]))
    await tier.close()
    other = await open_tier(tmp_path, fingerprint="another-model/bfloat16/64")
    assert (len(other), segments(tmp_path)) == (0, [])
    await other.put([block(1)])
    await other.close()
    larger = await open_tier(tmp_path, num_bytes=2 * BLOCK_BYTES, fingerprint="another-model/bfloat16/64")
    assert len(larger) == 0
    await larger.close()


async def test_a_directory_is_open_once(tmp_path: Path) -> None:
    tier = await open_tier(tmp_path)
    with pytest.raises(SsdUnavailable, match="in use by another store"):
        await open_tier(tmp_path)
    await tier.close()
    await (await open_tier(tmp_path)).close()


async def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SsdUnavailable, match="file/tier"):
        await open_tier(tmp_path / "file" / "tier")


async def test_files_that_are_not_segments_are_left_alone_and_broken_segments_deleted(tmp_path: Path) -> None:
    tier = await open_tier(tmp_path)
    await tier.put([block(1)])
    await tier.close()
    (tmp_path / "notes.txt").write_text("mine")
    whole = segments(tmp_path)[0].read_bytes()
    for number, data in enumerate([b"", b"torn", whole[:-1], whole, bytes(len(whole))], start=5):
        (tmp_path / f"{number:08d}.kvsegment").write_bytes(data)
    tier = await open_tier(tmp_path)
    assert [path.name for path in segments(tmp_path)] == ["00000000.kvsegment"]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert await read(tier, [1]) == ["right"]
    await tier.close()


async def test_a_block_whose_ancestor_is_lost_is_dropped_with_all_its_descendants(tmp_path: Path) -> None:
    tier = await open_tier(tmp_path)
    await tier.put(chain([1, 2, 3, 4]))
    await tier.put(chain([1, 5, 6]))
    await tier.close()
    (segment,) = segments(tmp_path)
    overwrite(segment, ALIGNMENT + ENTRY_BYTES, b"torn")  # of the second block
    for dropped in ({"torn": 1, "orphan": 2}, {"torn": 0, "orphan": 0}):
        tier = await open_tier(tmp_path)
        assert [own for own, _ in tier.blocks()] == [key(1), key(5), key(6)]
        assert tier.counts().dropped == dropped
        assert tier.counts().held + tier.counts().free == tier.counts().capacity
        assert await read(tier, [1, 5, 6]) == ["right"] * 3
        await tier.close()


class DiskWithABadFile(Disk):
    """Whose table, or all of it, cannot be read."""

    def __init__(self, bad: str) -> None:
        self.bad = bad

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(self.bad):
            raise DiskError("cannot read: injected", errno.EIO)
        super().read(fd, buffers, offset)


@pytest.mark.parametrize("bad", range(3))
async def test_a_segment_that_cannot_be_read_is_left_out_and_there_again_when_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bad: int
) -> None:
    small_segments(monkeypatch, 12 * BLOCK_BYTES)
    capacity = 40 * BLOCK_BYTES
    tier = await open_tier(tmp_path, capacity)
    for number in range(30):
        await tier.put([block(number)])
    await tier.close()
    paths = segments(tmp_path)
    assert len(paths) == 3
    tier = await open_tier(tmp_path, capacity, disk=DiskWithABadFile(paths[bad].name))
    held = [int.from_bytes(own, "big") for own, _ in tier.blocks()]
    assert 18 <= len(held) <= 22 and await read(tier, held) == ["right"] * len(held)
    assert [record.levelname for record in caplog.records] == ["ERROR"] and paths[bad].name in caplog.text
    stored = await tier.put([block(1000 + number) for number in range(30)])
    assert 0 < sum(stored) < 30
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= capacity, "the one left out counts"
    await tier.close()
    tier = await open_tier(tmp_path, capacity)
    assert await read(tier, range(30)) == ["right"] * 30
    await tier.close()


async def test_blocks_that_cannot_be_cleared_at_the_start_do_not_prevent_it(tmp_path: Path) -> None:
    tier = await open_tier(tmp_path)
    await tier.put(chain([1, 2, 3]))
    await tier.remove([key(2)])
    await tier.close()
    disk = ManualDisk(ManualClock())
    disk.write_errno, disk.failing_writes = errno.EIO, range(ALIGNMENT, ALIGNMENT + 1)
    for expected in (disk, None):
        tier = await open_tier(tmp_path, disk=expected)
        assert [own for own, _ in tier.blocks()] == [key(1)]
        assert tier.counts().dropped["orphan"] == 1
        await tier.close()


async def test_a_disk_without_room_for_the_probe_of_direct_io_serves_what_it_has(tmp_path: Path) -> None:
    tier = await open_tier(tmp_path)
    direct = tier.direct
    await tier.put([block(1)])
    await tier.close()
    disk = ManualDisk(ManualClock())
    disk.write_errno = errno.ENOSPC
    tier = await open_tier(tmp_path, disk=disk)
    assert (tier.direct, await read(tier, [1])) == (direct, ["right"])
    await tier.close()


async def test_a_child_is_not_held_after_a_restart_when_its_parent_was_removed_before_it(tmp_path: Path) -> None:
    tier = await open_tier(tmp_path)
    await tier.put(chain([1, 2, 3]))
    await tier.remove([key(2)])
    assert [own for own, _ in tier.blocks()] == [key(1)]
    await tier.close()
    tier = await open_tier(tmp_path)
    assert tier.blocks() == [(key(1), None)]
    assert tier.counts().dropped["orphan"] == 1
    await tier.close()


@pytest.mark.parametrize("while_open", [True, False])
async def test_every_flipped_bit_is_noticed(tmp_path: Path, while_open: bool) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    tier = await open_tier(tmp_path, num_bytes=ODD_BLOCK_BYTES)
    await tier.put([block(number, num_bytes=ODD_BLOCK_BYTES) for number in range(20)])
    (segment,) = segments(tmp_path)
    data = segment.read_bytes()
    for number in range(0, 20, 3):
        flip(segment, data.index(content(key(number), ODD_BLOCK_BYTES)) + rng.randrange(ODD_BLOCK_BYTES), rng.randrange(8))
    if not while_open:
        await tier.close()
        tier = await open_tier(tmp_path, num_bytes=ODD_BLOCK_BYTES)
    outcomes = await read(tier, range(20), ODD_BLOCK_BYTES)
    assert outcomes == ["right" if number % 3 else "CorruptBlock" for number in range(20)]
    assert tier.counts().dropped["corrupt"] == 7
    assert await read(tier, [0, 3], ODD_BLOCK_BYTES) == ["BlockNotHeld"] * 2
    await tier.close()
    tier = await open_tier(tmp_path, num_bytes=ODD_BLOCK_BYTES)
    assert len(tier) == 13
    await tier.close()


async def test_an_entry_is_good_only_in_its_own_place(tmp_path: Path) -> None:
    tier = await open_tier(tmp_path)
    await tier.put([block(1), block(2)])
    await tier.close()
    (segment,) = segments(tmp_path)
    first = segment.read_bytes()[ALIGNMENT : ALIGNMENT + ENTRY_BYTES]
    overwrite(segment, ALIGNMENT + 2 * ENTRY_BYTES, first)
    tier = await open_tier(tmp_path)
    assert tier.counts().dropped["torn"] == 1
    assert await read(tier, [1, 2]) == ["right", "right"]
    await tier.close()


async def test_a_smaller_capacity_keeps_what_was_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_segments(monkeypatch, 12 * BLOCK_BYTES)
    tier = await open_tier(tmp_path, 120 * BLOCK_BYTES)
    for number in range(90):
        await tier.put([block(number)])
    await tier.close()
    tier = await open_tier(tmp_path, 40 * BLOCK_BYTES)
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= 40 * BLOCK_BYTES
    held = [int.from_bytes(own, "big") for own, _ in tier.blocks()]
    assert len(held) >= 20
    assert held == list(range(90 - len(held), 90))
    assert await read(tier, held) == ["right"] * len(held)
    await tier.close()


async def test_segments_without_a_block_give_their_room_back_at_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_segments(monkeypatch, 12 * BLOCK_BYTES)
    tier = await open_tier(tmp_path, MIB)
    await tier.put([block(number) for number in range(50)])
    await tier.remove([key(number) for number in range(50)])
    await tier.close()
    tier = await open_tier(tmp_path, MIB, fingerprint=FINGERPRINT)
    assert (segments(tmp_path), tier.counts().free) == ([], tier.counts().capacity)
    assert await tier.put([block(1)]) == [True]
    await tier.close()
