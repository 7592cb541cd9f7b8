"""The C part by itself: lanes whose other ends are sockets in the hands of the test."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from messenger_support import TIMEOUT_S, until
from plain_lane import HEADER_BYTES, TABLE, Op, header

from messenger import _native
from messenger.base import Slice
from messenger.batch import SliceVerdict

GRANULE = 1 << 20
NUM_GRANULES = 4
MEDIUM = 100 << 10
"""Bytes: one part, and too many for the express lane."""


class Owner:
    """The other ends of one express lane and `num_bulk` others."""

    def __init__(self, num_bulk: int) -> None:
        self.memory = np.zeros(NUM_GRANULES * GRANULE, np.uint8)
        self.lanes = _native.Lanes(self.memory, TIMEOUT_S, False)
        pairs = [socket.socketpair() for _ in range(1 + num_bulk)]
        self.express, *self.bulk = [there for _, there in pairs]
        self._here = [here for here, _ in pairs]
        for number, here in enumerate(self._here):
            here.setblocking(False)
            self.lanes.attach(here.fileno(), number == 0)

    def submit(self, granule: int, num_bytes: int) -> _native.SliceBatch:
        piece, size = Slice(granule * GRANULE, granule * GRANULE, num_bytes, 1), self.memory.nbytes
        batch = _native.SliceBatch([piece], size, size, GRANULE)
        assert not self.lanes.submit(batch, False)
        return batch

    def asked(self, lane: socket.socket) -> bool:
        """Whether a request has come on it."""
        with contextlib.suppress(BlockingIOError):
            return len(lane.recv(HEADER_BYTES + TABLE.itemsize, socket.MSG_PEEK | socket.MSG_DONTWAIT)) == HEADER_BYTES + TABLE.itemsize
        return False

    def answer(self, lane: socket.socket, verdict: int) -> None:
        """A read of one slice."""
        num_bytes = struct.unpack_from("<Q", lane.recv(HEADER_BYTES + TABLE.itemsize), HEADER_BYTES + 8)[0]
        lane.sendall(header(Op.READ, 1, num_bytes) + b"\x05" * num_bytes + bytes([verdict]))

    def close(self) -> None:
        self.lanes.close()
        for sock in (self.express, *self.bulk, *self._here):
            sock.close()


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner(3)
    yield made
    made.close()


async def test_batches_that_come_together_go_over_lanes_of_their_own(owner: Owner) -> None:
    for _ in range(20):
        batches = [owner.submit(granule, MEDIUM) for granule in range(3)]
        await until(lambda: all(owner.asked(lane) for lane in owner.bulk))
        assert not owner.asked(owner.express)
        for lane in owner.bulk:
            await asyncio.to_thread(owner.answer, lane, 0)
        ended: list[_native.SliceBatch] = []
        await until(lambda ended=ended: len(ended) == 3 or bool(ended.extend(owner.lanes.reap()[0])))  # type: ignore[misc]
        assert {id(batch) for batch in ended} == {id(batch) for batch in batches}
        assert [batch.outcome for batch in batches] == [0, 0, 0]


async def test_a_verdict_that_there_is_not_breaks_the_lanes(owner: Owner) -> None:
    batch = owner.submit(0, MEDIUM)
    await until(lambda: any(owner.asked(lane) for lane in owner.bulk))
    (lane,) = [lane for lane in owner.bulk if owner.asked(lane)]
    await asyncio.to_thread(owner.answer, lane, 77)
    reasons: list[str | None] = [None]
    await until(lambda: reasons[-1] is not None or bool(reasons.append(owner.lanes.reap()[2])))
    assert reasons[-1] == "unknown verdict 77 on a slice"
    assert batch.outcome == 1


@pytest.mark.parametrize(("op", "count", "payload"), [(Op.WRITE, 1, MEDIUM), (Op.READ, 2, MEDIUM), (Op.READ, 1, MEDIUM - 1)])
async def test_an_answer_to_something_else_breaks_the_lanes(owner: Owner, op: int, count: int, payload: int) -> None:
    batch = owner.submit(0, MEDIUM)
    await until(lambda: any(owner.asked(lane) for lane in owner.bulk))
    (lane,) = [lane for lane in owner.bulk if owner.asked(lane)]
    await asyncio.to_thread(lane.sendall, header(op, count, payload) + bytes(MEDIUM + 2))
    reasons: list[str | None] = [None]
    await until(lambda: reasons[-1] is not None or bool(reasons.append(owner.lanes.reap()[2])))
    assert reasons[-1] == f"it answered operation 1 of 1 slices with operation {op} of {count} slices and {payload} bytes"
    assert batch.outcome == 1


# ---- copies between two mapped regions

SMALL_GRANULE, NUM_SMALL = 64, 16


@st.composite
def small_batches(draw: st.DrawFn) -> list[Slice]:
    """Slices of small granules, many of them neighbours of the one before, some of them of another generation than 1."""
    batch: list[Slice] = []
    for _ in range(draw(st.integers(0, 30))):
        last = batch[-1] if batch else None
        if last is not None and draw(st.booleans()) and (last.remote_offset + last.length) % SMALL_GRANULE:
            remote, local = last.remote_offset + last.length, last.local_offset + last.length
        else:
            remote, local = draw(st.integers(0, NUM_SMALL * SMALL_GRANULE - 1)), draw(st.integers(0, 2000))
        length = draw(st.integers(1, SMALL_GRANULE - remote % SMALL_GRANULE))
        batch.append(Slice(local, remote, length, draw(st.sampled_from((1, 1, 1, 2)))))
    return batch


@given(small_batches(), st.booleans(), st.lists(st.floats(0, 1), max_size=4))
def test_a_copy_in_shares_is_that_of_its_slices_one_by_one(batch: list[Slice], write: bool, cuts: list[float]) -> None:
    rng = np.random.default_rng(1)
    local, remote = rng.integers(0, 256, 4096, np.uint8), rng.integers(0, 256, NUM_SMALL * SMALL_GRANULE, np.uint8)
    generations = np.ones(NUM_SMALL, np.uint64)
    here, there = local.copy(), remote.copy()
    for piece in batch:
        if piece.generation == 1:
            mine = here[piece.local_offset : piece.local_offset + piece.length]
            theirs = there[piece.remote_offset : piece.remote_offset + piece.length]
            np.copyto(*((theirs, mine) if write else (mine, theirs)))
    work = _native.SliceBatch(batch, local.nbytes, remote.nbytes, SMALL_GRANULE)
    ends = [0, *sorted(int(cut * work.num_bytes) for cut in cuts), work.num_bytes]
    for begin, end in itertools.pairwise(ends):
        work.copy(local, remote, generations, write, begin, end)
    assert np.array_equal(local, here) and np.array_equal(remote, there)
    assert work.num_bytes == sum(piece.length for piece in batch)
    assert work.failed() == [(index, SliceVerdict.STALE) for index, piece in enumerate(batch) if piece.generation != 1]


def test_a_copy_that_is_stopped_copies_nothing_more() -> None:
    local, remote, generations = np.zeros(GRANULE, np.uint8), np.ones(GRANULE, np.uint8), np.ones(1, np.uint64)
    work = _native.SliceBatch([Slice(0, 0, GRANULE, 1)], GRANULE, GRANULE, GRANULE)
    work.copy(local, remote, generations, False, 0, 1000)
    work.stop()
    work.copy(local, remote, generations, False, 1000, GRANULE)
    assert local.tolist() == [1] * 1000 + [0] * (GRANULE - 1000)


# ---- what is passed in

REGION = {"local": np.zeros(GRANULE, np.uint8), "remote": np.zeros(GRANULE, np.uint8), "generations": np.ones(1, np.uint64)}


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, array in REGION.items() for dtype in ("u1", "i8", "f8", "f4", "u8") if array.dtype != dtype]
)
def test_memory_is_taken_by_the_type_of_its_items_not_by_its_size(name: str, dtype: str) -> None:
    def copy(**others: np.ndarray) -> None:
        batch = _native.SliceBatch([Slice(0, 0, 4, 1)], GRANULE, GRANULE, GRANULE)
        batch.copy(*{**REGION, **others}.values(), False, 0, 4)

    copy()
    wrong = np.zeros(REGION[name].nbytes, np.uint8)[: REGION[name].nbytes].view(dtype)
    with pytest.raises(TypeError, match=f"^{name} must be an array of"):
        copy(**{name: wrong})
    if name == "generations":
        ours, theirs = socket.socketpair()
        with ours, theirs, pytest.raises(TypeError, match=r"^generations must be an array of uint64"):
            _native.LaneSession(ours.fileno(), REGION["local"], wrong, GRANULE, ours.fileno(), False)
    else:
        with pytest.raises(TypeError, match=r"^memory must be an array of bytes"):
            _native.Lanes(wrong, TIMEOUT_S, False)


def test_memory_that_is_written_to_must_be_writable() -> None:
    memory = np.zeros(GRANULE, np.uint8)
    memory.flags.writeable = False
    with pytest.raises(ValueError, match=r"^memory must be writable"):
        _native.Lanes(memory, TIMEOUT_S, False)


@pytest.mark.parametrize("generation", [np.uint64(2**64 - 1), np.int64(7), np.uint8(3)])
def test_generations_may_be_integers_of_numpy(generation: int) -> None:
    assert _native.SliceBatch([Slice(0, 0, 4, generation)], GRANULE, GRANULE, GRANULE).num_bytes == 4
    with pytest.raises(TypeError):
        _native.SliceBatch([Slice(0, 0, 4, 1.0)], GRANULE, GRANULE, GRANULE)  # type: ignore[arg-type]
