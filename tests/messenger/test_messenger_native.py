"""The C part by itself: lanes whose other ends are sockets in the hands of the test."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from messenger_support import TIMEOUT_S, until

from messenger import native
from messenger.base import Slice
from messenger.tcp_protocol import HEADER_BYTES, TABLE, Header, Op

if native.AVAILABLE:
    from messenger import _native
else:
    pytest.skip("messenger._native has not been built", allow_module_level=True)

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

    def submit(self, granule: int, num_bytes: int) -> _native.Batch:
        batch = _native.Batch([Slice(granule * GRANULE, granule * GRANULE, num_bytes, 1)], self.memory.nbytes, self.memory.nbytes, GRANULE)
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
        lane.sendall(Header(Op.READ, 1, num_bytes).pack() + b"\x05" * num_bytes + bytes([verdict]))

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
        ended: list[_native.Batch] = []
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


REGION = {"local": np.zeros(GRANULE, np.uint8), "remote": np.zeros(GRANULE, np.uint8), "generations": np.ones(1, np.uint64)}


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, array in REGION.items() for dtype in ("u1", "i8", "f8", "f4", "u8") if array.dtype != dtype]
)
def test_memory_is_taken_by_the_type_of_its_items_not_by_its_size(name: str, dtype: str) -> None:
    def copy(**others: np.ndarray) -> None:
        batch = _native.Batch([Slice(0, 0, 4, 1)], GRANULE, GRANULE, GRANULE)
        batch.copy(*{**REGION, **others}.values(), False, 0, 4)

    copy()
    wrong = np.zeros(REGION[name].nbytes, np.uint8)[: REGION[name].nbytes].view(dtype)
    with pytest.raises(TypeError, match=f"^{name} must be an array of"):
        copy(**{name: wrong})
    if name == "generations":
        ours, theirs = socket.socketpair()
        with ours, theirs, pytest.raises(TypeError, match=r"^generations must be an array of uint64"):
            _native.Session(ours.fileno(), REGION["local"], wrong, GRANULE, ours.fileno(), False)
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
    assert _native.Batch([Slice(0, 0, 4, generation)], GRANULE, GRANULE, GRANULE).num_bytes == 4
    with pytest.raises(TypeError):
        _native.Batch([Slice(0, 0, 4, 1.0)], GRANULE, GRANULE, GRANULE)  # type: ignore[arg-type]
