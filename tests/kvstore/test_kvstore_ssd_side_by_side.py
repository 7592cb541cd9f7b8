"""Puts that run side by side, of blocks that continue each other, and a process or a machine that ends in between: whatever reached the
disk, what is served afterwards has all its ancestors."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from ssd_support import BLOCK_BYTES, block, chain, key, open_tier, read, small_segments

from kvstore.ssd.disk import ALIGNMENT, Disk
from kvstore.ssd.errors import DiskError

DATA = range(2 * ALIGNMENT, 1 << 62)
"""Offsets of blocks, where the table of a segment is one page: before them lie the header and that."""


class OvertakenDisk(Disk):
    """The first block that is written waits until an entry is: then the disk dies, and takes nothing any more."""

    def __init__(self) -> None:
        self._dead = threading.Event()
        self._first = threading.Lock()

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        if offset in DATA and self._first.acquire(blocking=False):
            self._dead.wait()
        if self._dead.is_set():
            raise DiskError("cannot write: the disk has died", errno.EIO)
        super().write(fd, buffers, offset)
        if offset == ALIGNMENT:
            self._dead.set()


class ForgetfulDisk(Disk):
    """Once it `forgets`, what it says is written may be lost, as in a power cut."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._one = threading.Lock()
        self.forgets = 0.0
        """Share of the writes."""

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        with self._one:
            lost = self._rng.random() < self.forgets
        if not lost:
            super().write(fd, buffers, offset)


async def test_a_child_whose_entry_overtook_its_parents_is_not_served_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_segments(monkeypatch, 34 * BLOCK_BYTES)
    tier = await open_tier(tmp_path, 34 * BLOCK_BYTES, disk=OvertakenDisk())
    parents, children = await asyncio.gather(tier.put(chain([1, 2])), tier.put([block(3, 2), block(4, 3)]))
    assert (parents, children) == ([False, False], [False, False])
    await tier.close()

    tier = await open_tier(tmp_path, 34 * BLOCK_BYTES)
    assert (tier.blocks(), tier.counts().dropped["orphan"]) == ([], 2)
    assert tier.counts().free == tier.counts().capacity, "their room can be used"
    assert await read(tier, [1, 2, 3, 4]) == ["BlockNotHeld"] * 4
    assert await tier.put([block(3, 2)]) == [False]
    assert await tier.put(chain([1, 2, 3, 4])) == [True] * 4
    await tier.close()
    tier = await open_tier(tmp_path, 34 * BLOCK_BYTES)
    assert await read(tier, [1, 2, 3, 4]) == ["right"] * 4
    await tier.close()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
async def test_whatever_a_power_cut_took_what_is_served_is_right_and_has_its_ancestors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    small_segments(monkeypatch, 12 * BLOCK_BYTES)
    capacity = 300 * BLOCK_BYTES
    numbers = list(range(1, 121))
    parent = {number: rng.choice([None, *range(max(1, number - 6), number)]) for number in numbers}
    for _ in range(5):
        disk = ForgetfulDisk(rng)
        tier = await open_tier(tmp_path, capacity, disk=disk)
        held = [number for number in numbers if key(number) in tier]
        assert len(held) == len(tier)
        assert all(parent[number] is None or parent[number] in held for number in held), "its parent is missing"
        outcomes = dict(zip(held, await read(tier, held), strict=True))
        # A block that the power cut took from under its entry is found out when it is read.
        assert set(outcomes.values()) <= {"right", "CorruptBlock"}
        lost = [number for number, outcome in outcomes.items() if outcome != "right"]
        await tier.remove([key(number) for number in reversed(numbers) if _descends(number, lost, parent)])
        disk.forgets = share
        batches = [numbers[first : first + 8] for first in range(0, len(numbers), 8)]
        await asyncio.gather(*(tier.put([block(number, parent[number]) for number in batch]) for batch in batches))
        gone = [number for number in numbers if rng.random() < 0.1]
        await tier.remove([key(number) for number in reversed(numbers) if _descends(number, gone, parent)])
        await tier.close()


def _descends(number: int | None, ancestors: Sequence[int], parent: dict[int, int | None]) -> bool:
    """Or is one of them."""
    while number is not None:
        if number in ancestors:
            return True
        number = parent[number]
    return False
