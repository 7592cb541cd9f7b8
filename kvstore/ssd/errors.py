"""What goes wrong with files."""

from __future__ import annotations

import errno

from springtide.errors import SpringtideError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SsdUnavailable(SpringtideError):
    """The tier cannot be opened (its directory is in use, or nothing can be written there) or has been closed."""


class BlockNotHeld(SpringtideError):
    """The tier does not hold the block."""


class CorruptBlock(SpringtideError):
    """The block's bytes are not those that were put. It has been dropped."""


class DiskError(SpringtideError):
    """The file system refused an operation; `errno` is its reason (EIO most often)."""

    def __init__(self, message: str, errno: int) -> None:
        super().__init__(message)
        self.errno = errno

    @property
    def no_room(self) -> bool:
        """Whether the file system, or the user's quota on it, is full."""
        return self.errno in _NO_ROOM


def disk_error(doing: str, error: OSError) -> DiskError:
    """The error of a system call. `doing` completes "cannot …"."""
    return DiskError(f"cannot {doing}: {error}", error.errno or errno.EIO)
