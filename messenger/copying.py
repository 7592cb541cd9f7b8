"""Copies between two mapped regions, fenced piece by piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from messenger import native
from messenger.base import Completion, Region, Slice
from messenger.plan import Plan, make_plan, slice_error

if native.AVAILABLE:
    from messenger import _native

_PIECE_BYTES = 4 << 20
"""Copied between two looks at the fence and at whether to go on."""


class CopyJob:
    """One plan on its way. `run` may be called from several threads at once for different ranges of pieces. numpy lets go of the GIL for
    every piece of more than some bytes."""

    def __init__(self, plan: Plan, local: np.ndarray, remote: Region, inward: bool) -> None:
        """`inward`: from `remote` to `local`, which are mapped until every `run` has returned."""
        self.stale = np.zeros(plan.num_pieces, np.bool_)
        """Pieces whose generation was wrong before or after the copy, bool [pieces]. What is marked already is not copied."""
        self._plan = plan
        self._local = local
        self._remote = remote
        self._inward = inward
        self._stopped = False

    def stop(self) -> None:
        """Lets `run` return before its next piece."""
        self._stopped = True

    def run(self, pieces: slice) -> None:
        plan, generations, remote_memory, local_memory = self._plan, self._remote.generations, self._remote.memory, self._local
        columns = (plan.local, plan.remote, plan.length, plan.granule, plan.generation)
        rows = zip(*(column[pieces].tolist() for column in columns), strict=True)
        for piece, (local, remote, length, granule, generation) in enumerate(rows, pieces.start):
            if self._stopped:
                return
            if self.stale[piece] or generations[granule] != generation:
                self.stale[piece] = True
                continue
            here, there = local_memory[local : local + length], remote_memory[remote : remote + length]
            if self._inward:
                np.copyto(here, there)
            else:
                np.copyto(there, here)
            if generations[granule] != generation:
                self.stale[piece] = True


class CopyWork(ABC):
    """A batch to be copied in shares by several threads. A share is a range of its bytes, all its slices being one row."""

    num_bytes: int
    inward: bool

    @abstractmethod
    def run(self, begin: int, end: int) -> None:
        """Copies bytes [begin, end), or in Python the pieces that begin there."""

    def run_all(self, shares: Iterator[tuple[int, int]]) -> None:
        """Takes one after another; several threads may do so with the same iterator (of a list: it is drawn from under the GIL)."""
        for begin, end in shares:
            self.run(begin, end)

    @abstractmethod
    def stop(self) -> None:
        """Lets every `run` return soon, those to come at once."""

    @abstractmethod
    def completion(self) -> Completion:
        """After all of it was copied."""


class PythonCopy(CopyWork):
    def __init__(self, batch: Sequence[Slice], local: np.ndarray, remote: Region, inward: bool) -> None:
        """As NativeCopy."""
        self.inward = inward
        self._plan = make_plan(batch, local.nbytes, remote.memory.nbytes, remote.granule, _PIECE_BYTES)
        self.num_bytes = self._plan.num_bytes
        self._job = CopyJob(self._plan, local, remote, inward)
        self._starts = np.cumsum(self._plan.length) - self._plan.length

    def run(self, begin: int, end: int) -> None:
        first, last = np.searchsorted(self._starts, (begin, end)).tolist()
        self._job.run(slice(first, last))

    def stop(self) -> None:
        self._job.stop()

    def completion(self) -> Completion:
        return self._plan.completion(self._job.stale)


class NativeCopy(CopyWork):
    def __init__(self, batch: Sequence[Slice], local: np.ndarray, remote: Region, inward: bool) -> None:
        """`inward`: from `remote` to `local`, which are mapped until every `run` has returned. Raises InvalidSlice."""
        self.inward = inward
        self._batch = batch
        self._local = local
        self._remote = remote
        self._work = native_batch(batch, local.nbytes, remote.memory.nbytes, remote.granule)
        self.num_bytes = self._work.num_bytes

    def run(self, begin: int, end: int) -> None:
        self._work.copy(self._local, self._remote.memory, self._remote.generations, not self.inward, begin, end)

    def stop(self) -> None:
        self._work.stop()

    def completion(self) -> Completion:
        return native_completion(self._work, self._batch, self._remote.granule)


def native_batch(batch: Sequence[Slice], local_bytes: int, remote_bytes: int, granule: int) -> _native.Batch:
    """Raises InvalidSlice naming the slice."""
    try:
        return _native.Batch(batch, local_bytes, remote_bytes, granule)
    except (ValueError, OverflowError):
        make_plan(batch, local_bytes, remote_bytes, granule, granule)  # finds the same, and says which slice and why
        raise


def native_completion(work: _native.Batch, batch: Sequence[Slice], granule: int) -> Completion:
    failed = {}
    for index, verdict in work.failed():
        failed[index] = slice_error(batch[index].remote_offset // granule, batch[index].generation, verdict)
    return Completion(work.num_bytes - sum(batch[index].length for index in failed), failed)
