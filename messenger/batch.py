"""A batch as the C part takes it, and as every transport checks it: which slice is wrong, and what became of those that are not."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from messenger import _native
from messenger.base import Completion, CorruptBytes, InvalidSlice, Slice
from springtide.errors import SpringtideError, StaleHandle


class SliceVerdict(IntEnum):
    """What became of a slice, or of a part of one. Later ones outweigh earlier ones. The numbers travel to peers (docs/wire.md)."""

    DONE = 0
    STALE = 1
    CORRUPT = 2


def slice_error(granule: int, generation: int, verdict: int) -> SpringtideError:
    """The error of a slice of that remote granule which was refused."""
    if verdict == SliceVerdict.CORRUPT:
        return CorruptBytes(f"bytes of granule {granule} of the peer do not have the checksum that they were sent with")
    return StaleHandle(f"granule {granule} of the peer is no longer of generation {generation}")


def invalid_slice(batch: Sequence[Slice], local_bytes: int, remote_bytes: int, granule: int) -> InvalidSlice:
    """The error that names the first wrong slice of `batch`, in which there is one, for regions of `local_bytes` here and `remote_bytes` in
    granules of `granule` there."""
    for index, piece in enumerate(batch):
        fault = _fault(piece, local_bytes, remote_bytes, granule)
        if fault is not None:
            return InvalidSlice(f"slice {index}: {fault}: {piece}")
    raise AssertionError("no slice of this batch is wrong")


def native_batch(batch: Sequence[Slice], local_bytes: int, remote_bytes: int, granule: int) -> _native.SliceBatch:
    """`batch` for the C part, checked as in `invalid_slice`. Raises InvalidSlice."""
    try:
        return _native.SliceBatch(batch, local_bytes, remote_bytes, granule)
    except (ValueError, OverflowError) as error:
        raise invalid_slice(batch, local_bytes, remote_bytes, granule) from error


def completion_of(work: _native.SliceBatch, batch: Sequence[Slice], granule: int) -> Completion:
    """The completion of `batch`, which `native_batch` made `work` of and which has ended."""
    failed = {}
    for index, verdict in work.failed():
        failed[index] = slice_error(batch[index].remote_offset // granule, batch[index].generation, verdict)
    return Completion(work.num_bytes - sum(batch[index].length for index in failed), failed)


def _fault(piece: Slice, local_bytes: int, remote_bytes: int, granule: int) -> str | None:
    numbers = (piece.local_offset, piece.remote_offset, piece.length)
    if not all(-(1 << 63) <= int(number) < 1 << 63 for number in numbers) or not 0 <= int(piece.generation) < 1 << 64:
        return "an offset, the length or the generation does not fit 64 bits"
    if piece.length < 1:
        return "length must be at least 1"
    if not 0 <= piece.local_offset <= local_bytes - piece.length:
        return f"local_offset is outside the own region of {local_bytes} bytes"
    if not 0 <= piece.remote_offset <= remote_bytes - piece.length:
        return f"remote_offset is outside the peer's region of {remote_bytes} bytes"
    if piece.remote_offset % granule > granule - piece.length:
        return f"the slice crosses the end of a granule of {granule} bytes"
    return None
