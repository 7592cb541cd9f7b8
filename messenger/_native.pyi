"""The C part of Messenger (messenger/native/): what runs without the GIL. Nothing in it waits for Python."""

from collections.abc import Sequence

import numpy as np

from messenger.base import Slice

class SliceBatch:
    """The slices of one read or write, checked against regions of `local_bytes` here and `remote_bytes` in granules of `granule` there, and
    joined where they are neighbours. Raises ValueError or OverflowError when one is wrong. Used once, by `copy` or by Lanes."""

    num_bytes: int
    outcome: int
    """How it has ended in Lanes: 0 complete, 1 the lanes were lost, 2 interrupted."""
    def __new__(cls, slices: Sequence[Slice], local_bytes: int, remote_bytes: int, granule: int) -> SliceBatch: ...
    def failed(self) -> list[tuple[int, int]]:
        """The slices that were refused: (index, messenger.batch.SliceVerdict)."""

    def copy(self, local: np.ndarray, remote: np.ndarray, generations: np.ndarray, write: bool, begin: int, end: int) -> None:
        """Copies bytes [begin, end) of the batch, all its slices being one row; several threads may copy different ones at once."""

    def stop(self) -> None:
        """Lets `copy` return at the next piece."""

class Lanes:
    """The caller's end of the data lanes to one peer."""

    def __new__(cls, memory: np.ndarray, silence_s: float, checksums: bool) -> Lanes: ...
    def attach(self, fd: int, express: bool) -> None:
        """Lends a connected socket until it is reaped or `close` has returned. The express lane is kept for small batches. Raises
        OSError when the lanes are lost, are 64 already, or the machine has no room for another."""

    def submit(self, batch: SliceBatch, write: bool) -> bool:
        """Hands over a batch. True: it has ended already. Else it will be among those reaped."""

    def stop(self, batch: SliceBatch) -> None:
        """Begins no more parts of it."""

    def interrupt(self, batch: SliceBatch) -> None:
        """Does what `stop` does, and gives up the parts in flight, with the lanes that they are on."""

    def lose(self, reason: str) -> None:
        """Ends every batch and every lane."""

    def reap(self) -> tuple[list[SliceBatch], list[int], str | None]:
        """Batches that have ended; file descriptors that are given back, each in the middle of an exchange; why all is lost, if it is."""

    def close(self) -> None:
        """Does what `lose` does, and waits until every thread has ended: some microseconds. What has ended by it is still to be reaped.
        Idempotent."""

    def fileno(self) -> int:
        """A file descriptor that is readable when there is something to reap."""

class LaneSession:
    """The owner's end of one data lane: it serves the region from a thread of its own until the peer goes or `abort`."""

    ended: bool
    complaint: str | None
    """What the peer did wrong, if that ended the session."""
    error: int
    """The error number that ended it, else 0."""
    def __new__(cls, fd: int, memory: np.ndarray, generations: np.ndarray, granule: int, signal: int, checksums: bool) -> LaneSession:
        """`fd` and `signal`, an eventfd that is written to at the end, are lent until `join` has returned."""

    def abort(self) -> None:
        """No byte of the peer lands after the next `settle`; the session ends soon."""

    def join(self) -> None:
        """Waits for the end, and lets go of the region. Idempotent."""

def settle() -> None:
    """Returns when no session writes on the strength of a generation that it read before this was called."""
