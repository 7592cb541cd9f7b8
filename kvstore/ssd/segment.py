"""One file of blocks."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kvstore.ssd.disk import ALIGNMENT, Disk, aligned_memory
from kvstore.ssd.errors import DiskError
from kvstore.ssd.format import ENTRY_BYTES, Entry, Layout, Table, checksum, pages

SUFFIX = ".kvsegment"
_MAX_SLOTS_OF_A_RUN = 256
"""Two buffers each: the kernel takes 1024."""
_RUN_BYTES = 2 << 20
"""Moved by one system call, where slots lie side by side and are smaller; larger ones gain nothing (docs/packages/kvstore.md)."""


class Segment:
    """A file and its table. Its methods block and raise DiskError; reads and writes of different slots may run at once in any threads."""

    def __init__(self, disk: Disk, path: Path, fd: int, layout: Layout, number: int, num_slots: int) -> None:
        """Takes over `fd`."""
        self.number = number
        self.num_slots = num_slots
        self._disk, self._path, self._fd, self._layout = disk, path, fd, layout
        self._data_offset = layout.data_offset(num_slots)
        self._padding = aligned_memory(ALIGNMENT)[: layout.stride - layout.bytes_per_slot]
        self._table_bytes = aligned_memory(self._data_offset - ALIGNMENT)
        self._table = Table(self._table_bytes, layout.header(number, num_slots))
        self._committing = threading.Lock()

    @classmethod
    def create(cls, disk: Disk, directory: Path, layout: Layout, number: int, num_slots: int, direct: bool) -> Segment:
        """A new one with all slots free. Leaves no file behind when it fails."""
        path = directory / _name(number)
        fd = disk.open(path, direct, create=True)
        try:
            disk.allocate(fd, layout.segment_bytes(num_slots))
            page = aligned_memory(ALIGNMENT)
            header = layout.header(number, num_slots)
            page[: len(header)] = header
            disk.write(fd, [page], 0)
        except BaseException:
            os.close(fd)
            path.unlink()
            raise
        return cls(disk, path, fd, layout, number, num_slots)

    @classmethod
    def open(cls, disk: Disk, path: Path, layout: Layout, direct: bool) -> Segment | None:
        """None when the file is not a whole segment of `layout`."""
        fd = disk.open(path, direct)
        try:
            size = os.fstat(fd).st_size
            page = aligned_memory(ALIGNMENT)
            if size >= ALIGNMENT:
                disk.read(fd, [page], 0)
            header = layout.read_header(page)
            if header is None or layout.segment_bytes(header[1]) != size or path.name != _name(header[0]):
                os.close(fd)
                return None
            segment = cls(disk, path, fd, layout, *header)
            disk.read(fd, [segment._table_bytes], ALIGNMENT)
            return segment
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(fd)
            raise

    @property
    def num_bytes(self) -> int:
        return self._layout.segment_bytes(self.num_slots)

    def entries(self) -> Iterable[tuple[int, Entry | None]]:
        """The entries of its table, as `Table.entries`."""
        return self._table.entries(self.num_slots)

    def write(self, slot: int, blocks: Sequence[memoryview]) -> list[int]:
        """Writes into slots from `slot` on; returns the blocks' checksums. They do not exist before they are committed."""
        checksums = [checksum(block) for block in blocks]
        self._disk.write(self._fd, self._padded(blocks), self._offset(slot))
        return checksums

    def read(self, slot: int, blocks: Sequence[memoryview]) -> list[int | DiskError]:
        """Fills `blocks` from slots from `slot` on; returns the checksums of what was read, and the errors of those that could not be."""
        try:
            self._disk.read(self._fd, self._padded(blocks), self._offset(slot))
        except DiskError as error:
            if len(blocks) == 1:
                return [error]
            return [result for i, block in enumerate(blocks) for result in self.read(slot + i, [block])]
        return [checksum(block) for block in blocks]

    def commit(self, entries: Mapping[int, Entry | None]) -> None:
        """Makes the blocks in these slots exist under their entries, or, None, not exist any more. What could not be written is written
        with the next commit nearby, so a slot whose commit failed is to be committed as None."""
        with self._committing:
            for slot, entry in entries.items():
                if entry is None:
                    self._table.clear(slot)
                else:
                    self._table.put(slot, entry)
            self._write_pages(sorted({slot * ENTRY_BYTES // ALIGNMENT for slot in entries}))

    def close(self) -> None:
        os.close(self._fd)

    def delete(self) -> None:
        """Closes it and gives its room back to the file system."""
        self.close()
        self._path.unlink()

    def _write_pages(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            offset = number * ALIGNMENT
            self._disk.write(self._fd, [self._table_bytes[offset : offset + ALIGNMENT]], ALIGNMENT + offset)

    def _padded(self, blocks: Sequence[memoryview]) -> list[memoryview]:
        if not self._padding:
            return list(blocks)
        return [part for block in blocks for part in (block, self._padding)]

    def _offset(self, slot: int) -> int:
        return self._data_offset + slot * self._layout.stride


def _name(number: int) -> str:
    return f"{number:08d}{SUFFIX}"


def number_of(path: Path) -> int:
    """The number of the segment, by its name; -1 when that is not one of a segment."""
    return int(path.stem) if path.stem.isdecimal() else -1


def slots_of_a_run(layout: Layout) -> int:
    """How many slots that lie side by side are moved by one system call."""
    return max(1, min(_MAX_SLOTS_OF_A_RUN, _RUN_BYTES // pages(layout.bytes_per_slot)))
