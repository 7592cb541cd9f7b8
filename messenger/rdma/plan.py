"""A batch as arrays: checked, neighbours merged, long runs cut into pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from messenger.base import Completion, Slice
from messenger.batch import SliceVerdict, invalid_slice, slice_error
from springtide.errors import SpringtideError


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What to move, piece by piece. A run is a maximal row of slices that are neighbours on both sides, in one granule; a run longer
    than `max_piece` is cut into several pieces."""

    local: np.ndarray
    """Byte offsets in the own region, int64 [pieces]."""
    remote: np.ndarray
    """Byte offsets in the peer's region, int64 [pieces]."""
    length: np.ndarray
    """Lengths in bytes, int64 [pieces], each in [1, max_piece]."""
    granule: np.ndarray
    """Remote granules, int64 [pieces]."""
    generation: np.ndarray
    """Generations that the granules must have, uint64 [pieces]."""
    run: np.ndarray
    """Runs that the pieces belong to, int64 [pieces]."""
    run_start: np.ndarray
    """The first slice of every run, then the number of slices: int64 [runs + 1]."""
    slice_length: np.ndarray
    """Bytes of every slice as it was given, int64 [slices]."""

    @property
    def num_pieces(self) -> int:
        return len(self.local)

    @property
    def num_bytes(self) -> int:
        return int(self.slice_length.sum())

    def stripes(self, max_bytes: int, max_pieces: int) -> Iterator[slice]:
        """Ranges of pieces that cover the plan in order, each of at most `max_pieces` pieces and some `max_bytes` (below twice that)."""
        if 0 < self.num_pieces <= max_pieces and self.num_bytes <= max_bytes:
            yield slice(0, self.num_pieces)
            return
        starts = np.cumsum(self.length) - self.length
        begin = 0
        while begin < self.num_pieces:
            end = int(np.searchsorted(starts, starts[begin] + max_bytes))
            end = min(end, begin + max_pieces)
            yield slice(begin, end)
            begin = end

    def completion(self, verdicts: np.ndarray) -> Completion:
        """The completion, from `verdicts` (bool or uint8 [pieces], SliceVerdict): a slice failed when any piece of its run did, for they
        share one granule and one fate."""
        if not verdicts.any():
            return Completion(self.num_bytes)
        failed: dict[int, SpringtideError] = {}
        for run in np.unique(self.run[verdicts != SliceVerdict.DONE]):
            piece = int(np.searchsorted(self.run, run))
            verdict = int(verdicts[self.run == run].max())
            error = slice_error(int(self.granule[piece]), int(self.generation[piece]), verdict)
            failed.update(dict.fromkeys(range(int(self.run_start[run]), int(self.run_start[run + 1])), error))
        return Completion(self.num_bytes - int(self.slice_length[list(failed)].sum()), failed)


def make_plan(batch: Sequence[Slice], local_bytes: int, remote_bytes: int, granule: int, max_piece: int) -> TransferPlan:
    """The plan of `batch`, checked for regions of `local_bytes` here and `remote_bytes` in granules of `granule` there. Raises InvalidSlice
    that names the slice."""
    try:
        fields = np.array([(s.local_offset, s.remote_offset, s.length) for s in batch], dtype=np.int64).reshape(-1, 3)
        generation = np.array([s.generation for s in batch], dtype=np.uint64)
    except OverflowError as error:
        raise invalid_slice(batch, local_bytes, remote_bytes, granule) from error
    local, remote, length = fields[:, 0], fields[:, 1], fields[:, 2]
    granules = remote // granule
    good = (length > 0) & (local >= 0) & (local <= local_bytes - length) & (remote >= 0) & (remote <= remote_bytes - length)
    good &= (remote + length - 1) // granule == granules
    if not good.all():
        raise invalid_slice(batch, local_bytes, remote_bytes, granule)
    return _pieces(local, remote, length, granules, generation, max_piece)


def _pieces(
    local: np.ndarray, remote: np.ndarray, length: np.ndarray, granule: np.ndarray, generation: np.ndarray, max_piece: int
) -> TransferPlan:
    joins = (
        (local[1:] == local[:-1] + length[:-1])
        & (remote[1:] == remote[:-1] + length[:-1])
        & (granule[1:] == granule[:-1])
        & (generation[1:] == generation[:-1])
    )
    if not joins.any() and length.max(initial=0) <= max_piece:
        run_start = np.arange(len(local) + 1)
        return TransferPlan(local, remote, length, granule, generation, run_start[:-1], run_start, length)
    heads = np.flatnonzero(np.concatenate(([True], ~joins)))
    run_length = np.add.reduceat(length, heads)
    pieces_in_run = -(-run_length // max_piece)
    run = np.repeat(np.arange(len(heads)), pieces_in_run)
    within = (np.arange(len(run)) - np.repeat(np.cumsum(pieces_in_run) - pieces_in_run, pieces_in_run)) * max_piece
    source = heads[run]
    return TransferPlan(
        local=local[source] + within,
        remote=remote[source] + within,
        length=np.minimum(run_length[run] - within, max_piece),
        granule=granule[source],
        generation=generation[source],
        run=run,
        run_start=np.append(heads, len(local)),
        slice_length=length,
    )
