"""The C part against both ends of a data lane in plain Python: they mean the same bytes by the same batch."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from messenger_support import GRANULE, NUM_GRANULES, TIMEOUT_S, Node, Workshop, fill, random_batch, whole
from plain_lane import MOST_SLICES, Answered, PlainCaller, PlainOwner

from messenger.base import Connection, Endpoint, Identity
from messenger.options import TcpOptions
from messenger.stream import SocketStream
from messenger.tcp.handshake import LaneRole, call
from messenger.tcp.transport import TcpTransport
from springtide.errors import StaleHandle

CHECKSUMS = pytest.mark.parametrize("checksums", [False, True], ids=["without checksums", "with checksums"])


@pytest.fixture
async def workshop(tmp_path: Path) -> AsyncIterator[Workshop]:
    made = Workshop("tcp", tmp_path)
    yield made
    await made.close()


# ---- a plain owner


class Plainly:
    """A connection of `here` to memory that a plain owner serves in the name of `there`."""

    def __init__(self, here: Node, there: Node, owner: PlainOwner, connection: Connection) -> None:
        self.here, self.there, self.owner, self.connection = here, there, owner, connection


@pytest.fixture
async def plainly(workshop: Workshop, checksums: bool) -> AsyncIterator[Plainly]:
    there = await workshop.node("there")
    here = await workshop.node("here", transport=TcpTransport(options=TcpOptions(lanes=3, checksums=checksums)))
    owner = PlainOwner(there.memory.region, there.identity)
    connection = await here.connect(owner.endpoint)
    yield Plainly(here, there, owner, connection)
    await connection.close()
    await owner.close()


@CHECKSUMS
@pytest.mark.parametrize(("count", "longest"), [(1, 1), (1, GRANULE), (24, GRANULE), (2000, 5000)])
async def test_a_plain_owner_understands_what_our_lanes_ask_for(plainly: Plainly, count: int, longest: int) -> None:
    here, there = plainly.here, plainly.there
    mine, theirs = fill(here, 1), fill(there, 2)
    batch = random_batch(np.random.default_rng(3), here, there, count, longest)
    num_bytes = sum(piece.length for piece in batch)
    assert (await plainly.connection.read(batch, TIMEOUT_S)).num_bytes == num_bytes
    for piece in batch:
        mine[piece.local_offset :][: piece.length] = theirs[piece.remote_offset :][: piece.length]
    assert np.array_equal(here.bytes, mine)
    mine = fill(here, 4)
    assert (await plainly.connection.write(batch, TIMEOUT_S, notify=b"written")).num_bytes == num_bytes
    for piece in batch:
        theirs[piece.remote_offset :][: piece.length] = mine[piece.local_offset :][: piece.length]
    assert np.array_equal(there.bytes, theirs)
    assert plainly.owner.notes == [b"written"]
    assert plainly.owner.num_requests >= 2 * count / MOST_SLICES


@CHECKSUMS
@pytest.mark.parametrize("operation", ["read", "write"])
async def test_a_plain_owners_refusals_reach_the_slices_that_they_are_of(plainly: Plainly, operation: str) -> None:
    fill(plainly.here, 1)
    batch = [whole(plainly.there, granule) for granule in range(NUM_GRANULES)]
    plainly.there.generations[[2, 3, 17]] += 1
    move = plainly.connection.read if operation == "read" else plainly.connection.write
    completion = await move(batch, TIMEOUT_S)
    assert sorted(completion.failed) == [2, 3, 17]
    assert all(isinstance(error, StaleHandle) for error in completion.failed.values())
    assert completion.num_bytes == (NUM_GRANULES - 3) * GRANULE
    good = np.delete(np.arange(NUM_GRANULES), [2, 3, 17])
    assert np.array_equal(plainly.here.bytes.reshape(-1, GRANULE)[good], plainly.there.bytes.reshape(-1, GRANULE)[good])


@CHECKSUMS
async def test_an_empty_write_with_a_notification_is_one_to_a_plain_owner_too(plainly: Plainly) -> None:
    await asyncio.gather(*(plainly.connection.write([], TIMEOUT_S, notify=b"%d" % number) for number in range(5)))
    assert plainly.owner.notes == [b"%d" % number for number in range(5)]


# ---- a plain caller


@pytest.fixture
async def caller(workshop: Workshop, checksums: bool) -> AsyncIterator[tuple[PlainCaller, Node]]:
    there = await workshop.node("there")
    lane = await plain_call(there.endpoint, checksums)
    yield lane, there
    lane.close()


async def plain_call(endpoint: Endpoint, checksums: bool) -> PlainCaller:
    host, _, port = endpoint.addresses["tcp"].rpartition(":")
    stream = SocketStream(socket.create_connection((host, int(port))))
    await call(stream, endpoint.incarnation, Identity("plain", 1), LaneRole.DATA, checksums, None)
    return PlainCaller(*await asyncio.open_connection(sock=stream.detach()), checksums)


@CHECKSUMS
@pytest.mark.parametrize("seed", range(4))
async def test_our_sessions_serve_a_plain_caller(caller: tuple[PlainCaller, Node], seed: int) -> None:
    """Reads and writes of few and of many slices, small and large, some of them stale."""
    lane, there = caller
    expected = fill(there, seed)
    rng = np.random.default_rng(seed)
    for _ in range(60):
        count = int(rng.choice([0, 1, 2, 7, 200, 1024]))
        longest = int(rng.choice([1, 100, 3000, 40_000]))
        entries, stale = random_entries(rng, there, count, longest)
        verdicts = [int(old) for old in stale]
        if rng.random() < 0.5:
            held = [expected[start : start + length].tobytes() for start, length, _ in entries]
            told = [bytes(len(piece)) if old else piece for piece, old in zip(held, stale, strict=True)]
            assert await lane.read(entries) == Answered(told, verdicts)
        else:
            slices = [rng.bytes(length) for _, length, _ in entries]
            assert await lane.write(entries, slices) == Answered([], verdicts)
            for (start, length, _), old, piece in zip(entries, stale, slices, strict=True):
                if not old:
                    expected[start : start + length] = np.frombuffer(piece, np.uint8)
            assert np.array_equal(there.bytes, expected)


def random_entries(rng: np.random.Generator, there: Node, count: int, longest: int) -> tuple[list[tuple[int, int, int]], list[bool]]:
    """Offsets, lengths and generations of slices that do not overlap; and which of them are stale."""
    if not count:
        return [], []
    cell = there.bytes.nbytes // count
    entries, stale = [], []
    for index in rng.permutation(count).tolist():
        start = index * cell
        granule = start // GRANULE
        length = int(rng.integers(1, min(longest, cell, (granule + 1) * GRANULE - start) + 1))
        stale.append(bool(rng.random() < 0.1))
        entries.append((start, length, int(there.generations[granule]) + stale[-1]))
    return entries, stale
