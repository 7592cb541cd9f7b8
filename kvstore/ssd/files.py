"""A directory of segments, and the threads that read and write them."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvstore.ssd.disk import Disk
from kvstore.ssd.errors import DiskError, SsdUnavailable
from kvstore.ssd.format import Entry, Layout
from kvstore.ssd.recovery import Recovered, recover
from kvstore.ssd.segment import SUFFIX, Segment, number_of, slots_of_a_run
from kvstore.ssd.space import SegmentSlot, runs
from kvstore.ssd.speed import ReadSpeed
from springtide.clock import Clock

READ_THREADS = 4
WRITE_THREADS = 2
"""Apart from the readers: a read, which a request waits for, is not queued behind what is written in the background."""
MIN_SEGMENT_BYTES = 64 << 20
MAX_SEGMENTS = 256
"""Each is an open file."""
_LOCK = "lock"
_MoveRun = Callable[[SegmentSlot, Sequence[memoryview]], "Sequence[int | DiskError]"]


class SegmentFiles:
    """The segments of a directory. Knows slots, not keys: who may use which is the caller's to say. Lives in one event loop."""

    def __init__(self, directory: Path, layout: Layout, capacity_bytes: int, disk: Disk, clock: Clock) -> None:
        """Opens them. Blocks. Raises SsdUnavailable when another process has the directory open, or the file system refuses."""
        self._directory, self._layout, self._capacity_bytes, self._disk = directory, layout, capacity_bytes, disk
        self._segment_bytes = max(MIN_SEGMENT_BYTES, capacity_bytes // MAX_SEGMENTS, layout.segment_bytes(1))
        if layout.slots_in(capacity_bytes) < 1:
            raise SsdUnavailable(f"capacity_bytes: {capacity_bytes} has no room for one block, which takes {layout.segment_bytes(1)}")
        self._lock = _lock(directory)
        try:
            there = next(directory.glob(f"*{SUFFIX}"), directory / _LOCK)
            self.direct = layout.bytes_per_slot == layout.stride and disk.can_direct(directory, there)
            self.recovered: Recovered = recover(disk, directory, layout, capacity_bytes, self.direct)
        except (OSError, DiskError) as error:
            os.close(self._lock)
            raise SsdUnavailable(f"the SSD tier in {directory} cannot be opened: {error}") from error
        except BaseException:
            os.close(self._lock)
            raise
        self._segments = self.recovered.segments
        self._next_number = 1 + max([number_of(path) for path in directory.glob(f"*{SUFFIX}")], default=-1)
        self._readers = ThreadPoolExecutor(READ_THREADS, "ssd-read")
        self._writers = ThreadPoolExecutor(WRITE_THREADS, "ssd-write")
        self._committer = ThreadPoolExecutor(1, "ssd-commit")
        """Apart from the writers: while one batch is committed, they write the next."""
        self.read_speed = ReadSpeed(clock)

    @property
    def num_slots(self) -> int:
        return sum(segment.num_slots for segment in self._segments.values())

    @property
    def growable_slots(self) -> int:
        """What `grow` can add, by and by."""
        whole, rest = divmod(self._unclaimed_bytes, self._segment_bytes)
        return whole * self._layout.slots_in(self._segment_bytes) + self._layout.slots_in(rest)

    async def grow(self) -> tuple[int, int]:
        """Adds a segment; returns its number and slots. One call at a time. Raises DiskError."""
        number, num_slots = self._next_number, self._layout.slots_in(min(self._unclaimed_bytes, self._segment_bytes))
        assert num_slots > 0, "growth is asked for within the capacity"
        segment = await asyncio.get_running_loop().run_in_executor(
            self._writers, Segment.create, self._disk, self._directory, self._layout, number, num_slots, self.direct
        )
        self._next_number += 1
        self._segments[number] = segment
        return number, num_slots

    async def write(self, blocks: Sequence[tuple[SegmentSlot, memoryview]]) -> list[int | DiskError]:
        """The blocks' checksums, or what went wrong, in the order of `blocks`."""
        return await self._in_runs(self._writers, WRITE_THREADS, self._write_run, blocks)

    async def read(self, blocks: Sequence[tuple[SegmentSlot, memoryview]]) -> list[int | DiskError]:
        """Fills each memory; returns the checksums of what was read, or what went wrong, in the order of `blocks`."""
        self.read_speed.queued(len(blocks) * self._layout.bytes_per_slot)
        return await self._in_runs(self._readers, READ_THREADS, self._read_run, blocks)

    async def commit(self, entries: Mapping[SegmentSlot, Entry | None]) -> dict[SegmentSlot, DiskError]:
        """Commits as `Segment.commit`. Returns those that failed."""
        by_segment: dict[int, dict[SegmentSlot, Entry | None]] = {}
        for place, entry in entries.items():
            by_segment.setdefault(place.segment, {})[place] = entry
        loop = asyncio.get_running_loop()
        done = await asyncio.gather(*(loop.run_in_executor(self._committer, self._commit, part) for part in by_segment.values()))
        return {place: error for part, error in zip(by_segment.values(), done, strict=True) if error is not None for place in part}

    async def close(self) -> None:
        """Closes them, once nothing is in flight."""
        await asyncio.to_thread(self._close)

    @property
    def _unclaimed_bytes(self) -> int:
        claimed = sum(segment.num_bytes for segment in self._segments.values()) + self.recovered.unreadable_bytes
        return max(0, self._capacity_bytes - claimed)

    async def _in_runs(
        self, threads: ThreadPoolExecutor, num_threads: int, move: _MoveRun, blocks: Sequence[tuple[SegmentSlot, memoryview]]
    ) -> list[int | DiskError]:
        """A job for each thread rather than for each run: the event loop is woken less often, and while it is awake no thread is."""
        pending = deque(runs([(place, i) for i, (place, _) in enumerate(blocks)], slots_of_a_run(self._layout)))
        results: dict[int, int | DiskError] = {}

        def work() -> None:
            while True:
                try:
                    place, numbers = pending.popleft()
                except IndexError:
                    return
                results.update(zip(numbers, move(place, [blocks[i][1] for i in numbers]), strict=True))

        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(threads, work) for _ in range(min(num_threads, len(pending)))))
        return [results[i] for i in range(len(blocks))]

    def _write_run(self, place: SegmentSlot, blocks: Sequence[memoryview]) -> Sequence[int | DiskError]:
        try:
            return self._segments[place.segment].write(place.slot, blocks)
        except DiskError as error:
            return [error] * len(blocks)

    def _read_run(self, place: SegmentSlot, blocks: Sequence[memoryview]) -> Sequence[int | DiskError]:
        ticket = self.read_speed.began()
        try:
            return self._segments[place.segment].read(place.slot, blocks)
        finally:
            self.read_speed.ended(ticket, len(blocks) * self._layout.bytes_per_slot)

    def _commit(self, entries: Mapping[SegmentSlot, Entry | None]) -> DiskError | None:
        segment = self._segments[next(iter(entries)).segment]
        try:
            segment.commit({place.slot: entry for place, entry in entries.items()})
        except DiskError as error:
            return error
        return None

    def _close(self) -> None:
        self._readers.shutdown()
        self._writers.shutdown()
        self._committer.shutdown()
        for segment in self._segments.values():
            segment.close()
        os.close(self._lock)


def _lock(directory: Path) -> int:
    """The lock, held for as long as the file descriptor is open, so no longer than this process lives."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SsdUnavailable(f"the SSD tier cannot be opened: {error}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise SsdUnavailable(f"the SSD tier in {directory} is in use by another store: {error}") from error
    return fd
