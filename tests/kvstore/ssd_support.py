"""Blocks and disks for the tests of the SSD tier."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstore.ssd import files
from kvstore.ssd.disk import Disk, aligned_memory
from kvstore.ssd.errors import DiskError
from kvstore.ssd.tier import PutBlock, SsdTier
from springtide.clock import Clock, ManualClock
from springtide.ids import BlockKey

BLOCK_BYTES = 8192
"""A multiple of the page: direct I/O."""
ODD_BLOCK_BYTES = 1000
FINGERPRINT = "a-model/bfloat16/64"
MIB = 1 << 20


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def content(block_key: BlockKey, num_bytes: int = BLOCK_BYTES) -> bytes:
    """The bytes of this block, which no other has."""
    return np.random.default_rng(int.from_bytes(block_key, "big")).bytes(num_bytes)


def memory_of(block_key: BlockKey, num_bytes: int = BLOCK_BYTES) -> memoryview:
    memory = aligned_memory(num_bytes)
    memory[:] = content(block_key, num_bytes)
    return memory


def block(number: int, parent: int | None = None, num_bytes: int = BLOCK_BYTES) -> PutBlock:
    return PutBlock(key(number), None if parent is None else key(parent), memory_of(key(number), num_bytes))


def chain(numbers: Sequence[int], num_bytes: int = BLOCK_BYTES) -> list[PutBlock]:
    """Each the child of the one before."""
    return [block(number, parent, num_bytes) for number, parent in zip(numbers, [None, *numbers[:-1]], strict=True)]


async def read(tier: SsdTier, numbers: Sequence[int], num_bytes: int = BLOCK_BYTES) -> list[str]:
    """For each block `right`, `wrong`, or the name of the error that was reported."""
    memories = [aligned_memory(num_bytes) for _ in numbers]
    errors = await tier.get([key(number) for number in numbers], memories)
    right = [memory == content(key(number), num_bytes) for number, memory in zip(numbers, memories, strict=True)]
    return [type(error).__name__ if error else "right" if same else "wrong" for error, same in zip(errors, right, strict=True)]


async def open_tier(
    directory: Path,
    capacity_bytes: int = MIB,
    num_bytes: int = BLOCK_BYTES,
    fingerprint: str = FINGERPRINT,
    disk: Disk | None = None,
    clock: Clock | None = None,
) -> SsdTier:
    return await SsdTier.open(directory, capacity_bytes, num_bytes, fingerprint, disk, clock)


def small_segments(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(files, "MIN_SEGMENT_BYTES", num_bytes)


class ManualDisk(Disk):
    """A disk that takes its time on a clock turned by hand, one request after the other, and fails or waits when told to."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.read_s = 0.0
        """Of one read."""
        self.failing_reads: set[int] = set()
        """Offsets."""
        self.write_errno = 0
        """Of what is written at `failing_writes`."""
        self.failing_writes = range(1 << 62)
        self.may_read = threading.Event()
        self.may_read.set()
        self.waiting_reads = threading.Semaphore(0)
        """Released by each read that begins to wait."""
        self._one = threading.Lock()

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        if not self.may_read.is_set():
            self.waiting_reads.release()
            self.may_read.wait()
        with self._one:
            self.clock.advance(self.read_s)
        end = offset + sum(len(buffer) for buffer in buffers)
        if any(offset <= failing < end for failing in self.failing_reads):
            raise DiskError("cannot read: injected", errno.EIO)
        super().read(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        if self.write_errno and offset in self.failing_writes:
            raise DiskError("cannot write: injected", self.write_errno)
        super().write(fd, buffers, offset)


class DyingDisk(Disk):
    """Writes so many bytes more, the last write torn where they end; then nothing any more."""

    def __init__(self, left: int | None = None) -> None:
        self.left = left
        """None: as many as one likes."""
        self._one = threading.Lock()

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        with self._one:
            if self.left is None:
                super().write(fd, buffers, offset)
                return
            data = b"".join(buffers)
            os.pwrite(fd, data[: self.left], offset)
            torn = self.left < len(data)
            self.left = max(0, self.left - len(data))
            if torn:
                raise DiskError("cannot write: the disk has died", errno.EIO)


def flip(directory: Path, wanted: np.ndarray) -> None:
    """One bit of the block with these contents, in whichever file it is."""
    for path in directory.rglob("*.kvsegment"):
        data = path.read_bytes()
        at = data.find(wanted.tobytes())
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 100)
                file.write(bytes([data[at + 100] ^ 1]))
            return
    raise AssertionError("the block is in no file")
