"""Files, read and written straight from and to the arena where the file system can."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvstore.ssd.errors import DiskError, disk_error

ALIGNMENT = 4096
"""The alignment of offsets, lengths and memory in direct I/O."""
_HUGE_PAGE = 2 << 20
_PROBE = "direct-io-probe"
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


def aligned_memory(num_bytes: int) -> memoryview:
    """Zeroed memory, of at least one byte; on huge pages if there is room for one: direct I/O then moves few long pieces, not many
    pages."""
    if num_bytes < _HUGE_PAGE:
        return memoryview(mmap.mmap(-1, max(1, num_bytes)))
    mapped = mmap.mmap(-1, num_bytes + _HUGE_PAGE)
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    begin = -np.frombuffer(mapped, np.uint8).ctypes.data % _HUGE_PAGE
    return memoryview(mapped)[begin : begin + num_bytes]


class Disk:
    """The operations on the tier's files. They block, and raise DiskError.

    Direct I/O spares the kernel's copy and keeps blocks from pushing everything else out of the page cache: the arena is the cache.
    """

    def open(self, path: Path, direct: bool, create: bool = False) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0) | (os.O_CREAT | os.O_EXCL if create else 0)
        try:
            return os.open(path, flags, 0o600)
        except OSError as error:
            raise disk_error(f"open {path}", error) from error

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Makes the file that long and reserves the room, so that writes within find it. New bytes are zero."""
        try:
            there = os.fstatvfs(fd)
            if there.f_bavail * there.f_frsize < num_bytes:  # to try would take what is left from everybody, until the file is deleted
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            raise disk_error(f"reserve {num_bytes} bytes for {_path(fd)}", error) from error

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        """Writes all of `buffers`, one after another."""
        remaining = list(buffers)
        try:
            while remaining:
                moved = os.pwritev(fd, remaining, offset)
                offset += moved
                remaining = _after(remaining, moved)
        except OSError as error:
            raise disk_error(f"write at {offset} of {_path(fd)}", error) from error

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        """Fills `buffers`, one after another."""
        remaining = list(buffers)
        try:
            while remaining:
                moved = os.preadv(fd, remaining, offset)
                if not moved:
                    raise DiskError(f"cannot read at {offset} of {_path(fd)}: the file ends there", errno.EIO)
                offset += moved
                remaining = _after(remaining, moved)
        except OSError as error:
            raise disk_error(f"read at {offset} of {_path(fd)}", error) from error

    def can_direct(self, directory: Path, there: Path) -> bool:
        """Whether a page can be written and read back there by direct I/O; on a full disk, whether `there`, a file of the directory, can be
        read so. Raises DiskError when files cannot be made for another reason."""
        try:
            return self._can_direct_new(directory / _PROBE)
        except DiskError as error:
            if not error.no_room:
                raise
        return self._can_direct_old(there)

    def _can_direct_new(self, path: Path) -> bool:
        path.unlink(missing_ok=True)
        os.close(self.open(path, direct=False, create=True))
        try:
            fd = self.open(path, direct=True)
            try:
                page = aligned_memory(ALIGNMENT)
                self.write(fd, [page], 0)
                self.read(fd, [page], 0)
            finally:
                os.close(fd)
        except DiskError as error:
            if error.errno in _NOT_DIRECT:
                return False
            raise
        finally:
            path.unlink(missing_ok=True)
        return True

    def _can_direct_old(self, path: Path) -> bool:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            try:
                os.preadv(fd, [aligned_memory(ALIGNMENT)], 0)
            finally:
                os.close(fd)
        except OSError as error:
            return error.errno not in _NOT_DIRECT
        return True


def _path(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def _after(buffers: list[memoryview], moved: int) -> list[memoryview]:
    """What of `buffers` is left when `moved` bytes are done."""
    for i, buffer in enumerate(buffers):
        if moved < len(buffer):
            return [buffer[moved:], *buffers[i + 1 :]]
        moved -= len(buffer)
    return []
