"""What comes in at a tcp port is not trusted, and what goes out can be checked."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from messenger_proxy import HoldingProxy
from messenger_support import GRANULE, NUM_GRANULES, TIMEOUT_S, Node, Workshop, fill, open_files, until, whole
from plain_lane import HEADER_BYTES, Op, header, request

from messenger._native import Lanes
from messenger.base import CorruptBytes, Identity, Slice, TransferTimeout, WrongSecret
from messenger.options import TcpOptions
from messenger.stream import SocketStream
from messenger.tcp.handshake import (
    CHALLENGE_BYTES,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    VERSION,
    WELCOME_BYTES,
    Challenge,
    HandshakeVerdict,
    Hello,
    LaneRole,
    Welcome,
)
from messenger.tcp.lanes import LaneKeeper
from messenger.tcp.pending_handshakes import MAX_PENDING_HANDSHAKES
from messenger.tcp.served_lane import ServedLane
from messenger.tcp.transport import TcpTransport
from springtide.errors import ConfigError, PeerLost

STRANGER = Identity("stranger", 12345)
SECRET = b"a secret of the cluster"
STANDSTILL_S = 15.0
"""What docs/packages/messenger.md says."""


@pytest.fixture
async def workshop(tmp_path: Path) -> AsyncIterator[Workshop]:
    made = Workshop("tcp", tmp_path)
    yield made
    await made.close()


@pytest.fixture
async def there(workshop: Workshop) -> Node:
    return await workshop.node("there")


def address_of(node: Node) -> tuple[str, int]:
    host, _, port = node.endpoint.addresses["tcp"].rpartition(":")
    return host, int(port)


def hello_to(node: Node, checksums: bool = False) -> bytes:
    name = STRANGER.name.encode()
    fields = (VERSION, LaneRole.DATA, False, checksums, len(name), node.endpoint.incarnation, STRANGER.incarnation, bytes(NONCE_BYTES))
    return Hello(*fields).pack() + name


async def greet(node: Node, checksums: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A data lane to a node without a secret."""
    reader, writer = await asyncio.open_connection(*address_of(node))
    writer.write(hello_to(node, checksums) + bytes(PROOF_BYTES))
    assert not Challenge.unpack(await reader.readexactly(CHALLENGE_BYTES)).has_secret
    welcome = Welcome.unpack(await reader.readexactly(WELCOME_BYTES))
    assert (welcome.verdict, welcome.region_bytes, welcome.granule) == (HandshakeVerdict.WELCOME, node.bytes.nbytes, GRANULE)
    return reader, writer


async def all_answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *messages: bytes) -> bytes:
    """Sends the messages; returns all that comes until the node closes."""
    async with asyncio.timeout(TIMEOUT_S):
        for message in messages:
            writer.write(message)
        try:
            answer = await reader.read()
        except ConnectionResetError:
            answer = b""
    writer.close()
    return answer


# ---- garbage ----


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([request(99, [])], "unknown operation 99"),
        ([b"\x00" * 64], "unknown operation 0"),
        ([struct.pack("<B3xIQ", Op.READ, 1_000_000, 0)], "1000000 slices"),
        ([request(Op.READ, [(NUM_GRANULES * GRANULE, 1, 1)])], f"offset {NUM_GRANULES * GRANULE}, length 1: outside"),
        ([request(Op.READ, [(0, 0, 1)])], "length 0"),
        ([request(Op.READ, [(2**64 - 1, 2**64 - 1, 1)])], f"offset {2**64 - 1}"),
        ([request(Op.READ, [(0, 2**63, 1)])], f"length {2**63}"),
        ([request(Op.WRITE, [(GRANULE - 4, 8, 1)], 8)], "crosses a granule"),
        ([request(Op.WRITE, [(0, 8, 1)], 9)], "8 bytes announces 9"),
    ],
)
async def test_garbage_ends_its_connection_and_touches_nobody_else(
    workshop: Workshop, there: Node, caplog: pytest.LogCaptureFixture, messages: list[bytes], complaint: str
) -> None:
    before = fill(there, 1)
    here = await workshop.node("here")
    connection = await here.connect(there.endpoint)
    assert await all_answers(*await greet(there), *messages) == b""
    await until(lambda: complaint in caplog.text)
    assert "stranger" in caplog.text
    assert np.array_equal(there.bytes, before)
    assert (await connection.read([whole(there, 2)], TIMEOUT_S)).num_bytes == GRANULE


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: example.org\r\n" + b"X-Filler: 1\r\n" * 9, bytes(range(256)) * 40])
async def test_what_is_no_messenger_gets_no_welcome(there: Node, caplog: pytest.LogCaptureFixture, garbage: bytes) -> None:
    assert await all_answers(*await asyncio.open_connection(*address_of(there)), garbage) == b""
    assert "handshake" in caplog.text


@pytest.mark.parametrize("seed", range(5))
async def test_random_bytes_in_the_middle_of_a_session_change_no_byte_out_of_their_slices(there: Node, seed: int) -> None:
    before = fill(there, 1)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        noise = rng.integers(0, 256, int(rng.integers(1, 4000)), np.uint8).tobytes()
        reader, writer = await greet(there)
        writer.write(request(Op.WRITE, [(5, 100, 1)], 100) + noise)
        writer.write_eof()
        await all_answers(reader, writer)
    assert np.array_equal(np.delete(there.bytes, np.s_[5:105]), np.delete(before, np.s_[5:105]))


async def test_another_version_is_told_so(there: Node) -> None:
    hello = bytearray(hello_to(there))
    hello[len(MAGIC) : len(MAGIC) + 2] = struct.pack("<H", 999)
    answer = await all_answers(*await asyncio.open_connection(*address_of(there)), bytes(hello))
    assert Challenge.unpack(answer).version == VERSION


async def test_a_write_that_breaks_off_leaves_the_rest_untouched(there: Node) -> None:
    reader, writer = await greet(there)
    writer.write(request(Op.WRITE, [(0, 1000, 1)], 1000) + b"\x05" * 400)
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    assert (there.bytes[:400] == 5).all()
    assert not there.bytes[400:].any()


async def test_requests_may_be_sent_ahead_of_the_answers(there: Node) -> None:
    """As no caller of ours does."""
    theirs = fill(there, 3)
    reader, writer = await greet(there)
    writer.write(request(Op.READ, [(10, 5000, 1)]) + request(Op.WRITE, [(0, 3, 1)], 3) + b"abc" + request(Op.READ, [(0, 200_000, 1)]))
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    first = header(Op.READ, 1, 5000) + theirs[10:5010].tobytes() + b"\0"
    second = header(Op.WRITE, 1, 0) + b"\0"
    third = header(Op.READ, 1, 200_000) + b"abc" + theirs[3:200_000].tobytes() + b"\0"
    assert answer == first + second + third


async def test_a_server_that_is_no_messenger_is_lost(there: Node) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2p1 Debian-2 and so on, well beyond a challenge\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(PeerLost, match="no Messenger"):
        await there.connect(replace(there.endpoint, addresses={"tcp": address}))
    server.close()


# ---- handshakes ----


async def node_with(workshop: Workshop, name: str, **options: object) -> Node:
    node = await workshop.node(name)
    await node.transport.close()
    node.transport = TcpTransport(options=TcpOptions(**options))  # type: ignore[arg-type]
    await node.start()
    return node


async def test_who_knows_the_secret_comes_in(workshop: Workshop) -> None:
    here, there = await node_with(workshop, "here", secret=SECRET), await node_with(workshop, "there", secret=SECRET)
    theirs = fill(there, 1)
    connection = await here.connect(there.endpoint)
    await connection.read([whole(there, 3)], TIMEOUT_S)
    assert np.array_equal(here.bytes[3 * GRANULE : 4 * GRANULE], theirs[3 * GRANULE : 4 * GRANULE])
    await connection.write([], TIMEOUT_S, notify=b"mine")
    assert await there.noted(1) == [b"mine"]


@pytest.mark.parametrize(
    ("mine", "theirs", "complaint"),
    [
        (b"another secret of 24 bytes", SECRET, "it has another"),
        (None, SECRET, "the peer wants a cluster_secret"),
        (SECRET, None, "the peer has no cluster_secret"),
    ],
)
async def test_who_does_not_is_kept_out_with_the_reason(
    workshop: Workshop, mine: bytes | None, theirs: bytes | None, complaint: str
) -> None:
    here, there = await node_with(workshop, "here", secret=mine), await node_with(workshop, "there", secret=theirs)
    with pytest.raises(WrongSecret, match=complaint):
        await here.connect(there.endpoint)


async def test_a_stranger_learns_nothing_and_lands_nothing(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    """Neither with no proof, nor with a guess, nor with what an honest caller said on another connection."""
    there = await node_with(workshop, "there", secret=SECRET)
    for proof in (bytes(PROOF_BYTES), os.urandom(PROOF_BYTES)):
        name = STRANGER.name.encode()
        hello = Hello(VERSION, LaneRole.DATA, True, False, len(name), there.endpoint.incarnation, 1, os.urandom(NONCE_BYTES)).pack() + name
        reader, writer = await asyncio.open_connection(*address_of(there))
        writer.write(hello + proof)
        refusal = Welcome.unpack((await reader.readexactly(CHALLENGE_BYTES + WELCOME_BYTES))[CHALLENGE_BYTES:])
        assert await all_answers(reader, writer, request(Op.WRITE, [(0, 4, 1)], 4) + b"evil") == b""
        assert (refusal.verdict, refusal.region_bytes, refusal.proof) == (HandshakeVerdict.WRONG_SECRET, 0, bytes(PROOF_BYTES))
    assert not there.bytes.any()
    assert caplog.text.count("does not know the cluster_secret") == 2
    assert SECRET.decode() not in caplog.text


async def test_a_false_owner_is_not_believed(workshop: Workshop) -> None:
    """It says what a true one says, but cannot prove it; the caller's own proof, sent back, is none."""
    here = await node_with(workshop, "here", secret=SECRET)
    heard = asyncio.Event()

    async def impersonate(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(hello_to(here)) - len(STRANGER.name) + len("here"))
        writer.write(Challenge(VERSION, True, 77, os.urandom(NONCE_BYTES)).pack())
        writer.write(Welcome(HandshakeVerdict.WELCOME, GRANULE, GRANULE, await reader.readexactly(PROOF_BYTES)).pack())
        heard.set()

    server = await asyncio.start_server(impersonate, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(WrongSecret, match="the peer does not know the cluster_secret"):
        await here.connect(replace(here.endpoint, incarnation=77, addresses={"tcp": address}))
    assert heard.is_set()
    server.close()


async def test_without_a_secret_only_this_machine_is_spoken_with(workshop: Workshop, there: Node) -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0.*cluster_secret"):
        await TcpTransport("0.0.0.0").listen(there.memory.region, there.identity, there.on_notify)
    elsewhere = replace(there.endpoint, addresses={"tcp": "192.0.2.7:9"})
    with pytest.raises(ConfigError, match=r"192\.0\.2\.7.*cluster_secret"):
        await there.connect(elsewhere)
    for options in (TcpOptions(open_to_strangers=True), TcpOptions(secret=SECRET)):
        transport = TcpTransport("0.0.0.0", options=options)
        assert await transport.listen(there.memory.region, there.identity, there.on_notify)
        await transport.close()


async def test_handshakes_that_are_left_pending_keep_nobody_out(workshop: Workshop, there: Node, caplog: pytest.LogCaptureFixture) -> None:
    silent = [await asyncio.open_connection(*address_of(there)) for _ in range(3 * MAX_PENDING_HANDSHAKES)]
    here = await workshop.node("here")
    connection = await here.connect(there.endpoint)
    assert (await connection.read([whole(there, 2)], TIMEOUT_S)).num_bytes == GRANULE
    await until(lambda: sum(reader.at_eof() for reader, _ in silent) >= 2 * MAX_PENDING_HANDSHAKES)
    assert 0 < caplog.text.count("closing a connection whose handshake failed") < MAX_PENDING_HANDSHAKES
    for _, writer in silent:
        writer.close()


def test_the_secret_is_not_shown() -> None:
    assert SECRET.decode() not in repr(TcpOptions(secret=SECRET))


# ---- checksums ----


@pytest.mark.parametrize("length", [100, 3000, GRANULE])
async def test_checksums_pass_what_arrives_as_it_was_sent(workshop: Workshop, length: int) -> None:
    here, there = await node_with(workshop, "here", checksums=True), await node_with(workshop, "there")
    mine, theirs = fill(here, 1), fill(there, 2)
    connection = await here.connect(there.endpoint)
    batch = [Slice(granule * GRANULE, granule * GRANULE, length, granule + 1) for granule in range(12)]
    assert (await connection.read(batch, TIMEOUT_S)).num_bytes == 12 * length
    assert np.array_equal(here.bytes[GRANULE : GRANULE + length], theirs[GRANULE : GRANULE + length])
    batch = [Slice(granule * GRANULE, granule * GRANULE, length, granule + 1) for granule in range(12, 24)]
    there.generations[15] += 1
    completion = await connection.write(batch, TIMEOUT_S)
    assert list(completion.failed) == [3]
    assert np.array_equal(there.bytes[20 * GRANULE : 20 * GRANULE + length], mine[20 * GRANULE : 20 * GRANULE + length])


async def test_a_write_with_a_wrong_checksum_is_refused(there: Node) -> None:
    reader, writer = await greet(there, checksums=True)
    writer.write(request(Op.WRITE, [(0, 4, 1), (8, 4, 1)], 8) + b"goodevil" + struct.pack("<II", 0xDEADBEEF, 1))
    writer.write_eof()
    assert await reader.read() == header(Op.WRITE, 2, 0) + bytes([2, 2])
    writer.close()


async def test_a_slice_that_is_corrupted_in_flight_fails_typed_and_alone(workshop: Workshop) -> None:
    """A proxy flips a bit of what the owner answers."""
    here, there = await node_with(workshop, "here", checksums=True, lanes=1), await node_with(workshop, "there")
    there.bytes[:] = 7
    broken = asyncio.Event()

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        on_reader, on_writer = await asyncio.open_connection(*address_of(there))

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, flip: bool) -> None:
            while data := bytearray(await source.read(1 << 16)):
                position = data.find(b"\x07" * 64)
                if flip and position >= 0 and not broken.is_set():
                    data[position + 40] ^= 1
                    broken.set()
                target.write(data)
            target.close()

        await asyncio.gather(pump(reader, on_writer, False), pump(on_reader, writer, True))

    server = await asyncio.start_server(proxy, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    connection = await here.connect(replace(there.endpoint, addresses={"tcp": address}))
    completion = await connection.read([whole(there, granule) for granule in range(4)], TIMEOUT_S)
    assert len(completion.failed) == 1
    assert all(isinstance(error, CorruptBytes) for error in completion.failed.values())
    assert not (await connection.read([whole(there, granule) for granule in range(4)], TIMEOUT_S)).failed
    await connection.close()
    server.close()


# ---- giving up ----


async def test_what_is_refused_of_a_read_is_not_told(workshop: Workshop, there: Node) -> None:
    here = await workshop.node("here")
    connection = await here.connect(there.endpoint)
    there.bytes[:] = 77
    for length in (4096, GRANULE):
        there.generations[3] = 999
        completion = await connection.read([Slice(0, 3 * GRANULE, length, 4), Slice(GRANULE, 0, length, 1)], TIMEOUT_S)
        assert list(completion.failed) == [0]
        assert not (here.bytes[:GRANULE] == 77).any()
        assert (here.bytes[GRANULE : GRANULE + length] == 77).all()


async def test_a_verdict_that_there_is_not_breaks_the_connection(workshop: Workshop) -> None:
    here, there = await node_with(workshop, "here", lanes=1), await workshop.node("there")

    async def meddle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        on_reader, on_writer = await asyncio.open_connection(*address_of(there))

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                target.write(data[:-1] + b"\x4d" if data == header(Op.WRITE, 1, 0) + b"\0" else data)
            target.close()

        await asyncio.gather(pump(reader, on_writer), pump(on_reader, writer))

    server = await asyncio.start_server(meddle, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    connection = await here.connect(replace(there.endpoint, addresses={"tcp": address}))
    with pytest.raises(PeerLost, match="unknown verdict 77"):
        await connection.write([whole(there, 1)], TIMEOUT_S)
    assert not connection.is_open
    await connection.close()
    server.close()


class Exhausted:
    """Lanes of a machine that has room for so many."""

    room = 0

    def __init__(self, *arguments: object) -> None:
        self._lanes = Lanes(*arguments)  # type: ignore[arg-type]

    def attach(self, fd: int, express: bool) -> None:
        if Exhausted.room == 0:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        Exhausted.room -= 1
        self._lanes.attach(fd, express)

    def __getattr__(self, name: str) -> object:
        return getattr(self._lanes, name)


async def test_a_machine_without_room_for_another_lane_does_not_leave_a_batch_waiting_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("messenger.tcp.lanes._native.Lanes", Exhausted)
    workshop = Workshop("tcp", tmp_path)
    here, there = await node_with(workshop, "here", lanes=1), await workshop.node("there")
    monkeypatch.setattr(Exhausted, "room", 1)
    with pytest.raises(PeerLost, match="Resource temporarily unavailable"):
        await here.connect(there.endpoint)
    monkeypatch.setattr(Exhausted, "room", 2)
    connection = await here.connect(there.endpoint)
    with pytest.raises(PeerLost, match="Resource temporarily unavailable"):
        async with asyncio.timeout(TIMEOUT_S):
            while True:  # until one is given up in the middle, and costs its lane
                with contextlib.suppress(TransferTimeout):
                    await connection.read([whole(there, granule) for granule in range(24)], 0.0)
    assert not connection.is_open
    await workshop.close()


async def test_a_session_that_cannot_begin_leaves_nothing_open(there: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*arguments: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("messenger.tcp.served_lane._native.LaneSession", exhausted)
    before = list(open_files().values())
    mine, theirs = socket.socketpair()
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        ServedLane(SocketStream(mine), there.memory.region, False)
    theirs.close()
    assert sorted(open_files().values()) == sorted(before)


@pytest.mark.parametrize("lanes", [0, 33])
def test_as_many_lanes_as_there_is_room_for(lanes: int) -> None:
    with pytest.raises(ValueError, match=f"from 1 to 32, not {lanes}"):
        TcpOptions(lanes=lanes)


async def never() -> SocketStream:
    raise AssertionError("nothing is to be opened")


async def test_who_gives_up_waiting_for_lanes_to_rest_disturbs_nobody() -> None:
    keeper = LaneKeeper(never, "a peer", lambda error: None)
    mine, theirs = socket.socketpair()
    keeper.lay_to_rest(SocketStream(mine))
    impatient, patient = asyncio.create_task(keeper.drain()), asyncio.create_task(keeper.drain())
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.wait((impatient,))
    theirs.close()
    await patient
    await keeper.close()


async def test_what_was_not_taken_when_the_closing_of_a_lane_is_cut_short_is_not_delivered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        mine = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    keeper = LaneKeeper(never, "a peer", lambda error: None)
    stream = SocketStream(mine)
    with contextlib.suppress(BlockingIOError):
        while True:
            mine.send(bytes(1 << 20))
    keeper.lay_to_rest(stream)
    closing = asyncio.create_task(keeper.close())
    await asyncio.sleep(0)  # both have begun
    closing.cancel()
    await asyncio.wait((closing,))
    assert stream.fileno() < 0
    with pytest.raises(ConnectionResetError):
        while await asyncio.to_thread(theirs.recv, 1 << 20):
            pass
    theirs.close()


@pytest.mark.parametrize("operation", ["read", "write"])
async def test_a_batch_that_misses_its_deadline_fails_alone(workshop: Workshop, there: Node, operation: str) -> None:
    here = await workshop.node("here")
    theirs = fill(there, 4)
    connection = await here.connect(there.endpoint)
    batch = [whole(there, granule) for granule in range(24)]
    move = connection.read if operation == "read" else connection.write
    missed = 0
    for _ in range(10):
        other = asyncio.create_task(connection.read(batch, TIMEOUT_S))
        try:
            await move(batch, 0.0)  # it may just be done when that is looked at
        except TransferTimeout:
            missed += 1
        assert (await other).num_bytes == here.bytes.nbytes
    assert missed
    await connection.drain()
    assert connection.is_open
    assert (await connection.read(batch, TIMEOUT_S)).num_bytes == here.bytes.nbytes
    assert np.array_equal(here.bytes, there.bytes)
    if operation == "read":
        assert np.array_equal(there.bytes, theirs)


async def test_after_drain_nothing_of_a_batch_that_was_given_up_lands(workshop: Workshop, there: Node) -> None:
    here = await workshop.node("here")
    connection = await here.connect(there.endpoint)
    for value in range(1, 20):
        here.bytes[:] = value
        with contextlib.suppress(TransferTimeout):
            await connection.write([whole(there, granule) for granule in range(24)], 0.0)
        await connection.drain()
        there.bytes[:] = 0
        assert (await connection.read([whole(there, 23)], TIMEOUT_S)).num_bytes == GRANULE
        assert not there.bytes.any()


async def test_what_the_owner_has_given_away_is_not_written_any_more(workshop: Workshop, there: Node) -> None:
    """Over and over a granule is taken back while writes to it are in flight: from `settle` on its bytes stay as they are."""
    here = await workshop.node("here")
    connection = await here.connect(there.endpoint)
    refused = 0
    for value in range(1, 60):
        here.bytes[:] = value
        there.bytes[:GRANULE] = 0
        writing = asyncio.create_task(connection.write([whole(there, 0, local) for local in range(24)], TIMEOUT_S))
        await until(lambda task=writing: bool(there.bytes[GRANULE // 2]) or task.done())  # type: ignore[misc]
        there.generations[0] += 1
        there.transport.settle()
        snapshot = there.bytes[:GRANULE].copy()
        completion = await writing
        refused += len(completion.failed)
        assert np.array_equal(there.bytes[:GRANULE], snapshot)
    assert refused


@pytest.mark.parametrize("checksums", [False, True])
async def test_what_turns_stale_half_way_is_diverted_from_there_on(there: Node, checksums: bool) -> None:
    """Two slices of a write, of which the second has been begun when its granule is given away: the rest of it goes nowhere."""
    reader, writer = await greet(there, checksums=checksums)
    half = GRANULE // 2
    entries = [(0, GRANULE, 1), (GRANULE, GRANULE, 2)]
    writer.write(request(Op.WRITE, entries, 2 * GRANULE) + b"\x09" * (GRANULE + half))
    await until(lambda: bool(there.bytes[GRANULE + half - 1]))
    there.generations[1] = 7
    there.transport.settle()
    writer.write(b"\x09" * half + (struct.pack("<I", zlib.crc32(b"\x09" * GRANULE)) * 2 if checksums else b""))
    assert await reader.readexactly(HEADER_BYTES + 2) == header(Op.WRITE, 2, 0) + bytes([0, 1])
    assert (there.bytes[: GRANULE + half] == 9).all()
    assert not there.bytes[GRANULE + half :].any()
    writer.write(request(Op.READ, [(GRANULE, 4, 7)]))
    answer = header(Op.READ, 1, 4) + b"\x09" * 4 + (struct.pack("<I", zlib.crc32(b"\x09" * 4)) if checksums else b"") + b"\0"
    assert await reader.readexactly(len(answer)) == answer, "the lane goes on"
    writer.close()


async def test_a_read_that_turns_stale_half_way_is_refused_in_the_end(there: Node) -> None:
    """What is in the kernel's buffers by then is on its way; the verdict, which comes last, says that it is not to be used."""
    there.bytes[:] = 9
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    sock.connect(address_of(there))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 16)
    writer.write(hello_to(there) + bytes(PROOF_BYTES))
    await reader.readexactly(CHALLENGE_BYTES + WELCOME_BYTES)
    writer.write(request(Op.READ, [(granule * GRANULE, GRANULE, granule + 1) for granule in range(NUM_GRANULES)]))
    await reader.readexactly(HEADER_BYTES + GRANULE)  # and no more for now: the session waits in the middle
    there.generations[NUM_GRANULES - 1] = 999
    there.transport.settle()
    rest = await reader.readexactly((NUM_GRANULES - 1) * GRANULE + NUM_GRANULES)
    assert list(rest[-NUM_GRANULES:]) == [0] * (NUM_GRANULES - 1) + [1]
    assert rest[-NUM_GRANULES - 1] == 0, "what is refused is not told"
    writer.close()


@pytest.mark.parametrize(("region_bytes", "granule"), [(GRANULE, 0), (GRANULE, 3)])
async def test_a_region_that_cannot_be_is_not_connected_with(workshop: Workshop, region_bytes: int, granule: int) -> None:
    here = await workshop.node("here")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(hello_to(here)) - len(STRANGER.name) + len("here"))
        writer.write(Challenge(VERSION, False, 77, os.urandom(NONCE_BYTES)).pack())
        writer.write(Welcome(HandshakeVerdict.WELCOME, region_bytes, granule, bytes(PROOF_BYTES)).pack())

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(PeerLost, match=f"no Messenger.*granules of {granule}"):
        await here.connect(replace(here.endpoint, incarnation=77, addresses={"tcp": address}))
    server.close()


@pytest.mark.parametrize("operation", ["read", "write"])
async def test_a_lane_that_stands_still_is_waited_for_while_the_peer_answers_on_another(
    workshop: Workshop, there: Node, operation: str
) -> None:
    """On a network that loses much, one connection may have nothing acknowledged for seconds."""
    here = await workshop.node("here", transport=TcpTransport(options=TcpOptions(lanes=1, peer_timeout_s=0.8)))
    fill(there, 1)
    async with HoldingProxy(there.endpoint.addresses["tcp"], most_bytes=4 * GRANULE) as proxy:
        connection = await here.connect(replace(there.endpoint, addresses={"tcp": proxy.address}))
        move = connection.read if operation == "read" else connection.write
        batch = [whole(there, granule) for granule in range(16)]
        moving = asyncio.create_task(move(batch, TIMEOUT_S))
        await asyncio.wait_for(proxy.holds.wait(), TIMEOUT_S)
        standing_still, _ = await asyncio.wait({moving}, timeout=3 * 0.8)
        assert not standing_still, "it was lost"
        proxy.let_go()
        assert (await moving).num_bytes == 16 * GRANULE
        assert connection.is_open
    assert np.array_equal(here.bytes[: 16 * GRANULE], there.bytes[: 16 * GRANULE])


async def test_a_lane_that_stands_still_for_good_loses_the_peer_though_that_answers_on_another(workshop: Workshop, there: Node) -> None:
    """After 15 s, whatever the deadline."""
    here = await workshop.node("here", transport=TcpTransport(options=TcpOptions(lanes=1, peer_timeout_s=0.8)))

    async def stand_still(operation: str) -> None:
        async with HoldingProxy(there.endpoint.addresses["tcp"], most_bytes=4 * GRANULE) as proxy:
            connection = await here.connect(replace(there.endpoint, addresses={"tcp": proxy.address}))
            move = connection.read if operation == "read" else connection.write
            with pytest.raises(PeerLost, match=r"it was silent for 1[5-9]\.\d s"):
                async with asyncio.timeout(STANDSTILL_S + 2 * TIMEOUT_S):
                    await move([whole(there, granule) for granule in range(16)], 3600.0)
            assert proxy.holds.is_set() and not connection.is_open

    await asyncio.gather(stand_still("read"), stand_still("write"))


async def test_what_comes_through_is_counted_at_both_ends(workshop: Workshop, there: Node) -> None:
    here = await workshop.node("here")
    mine, theirs = here.identity.incarnation, there.identity.incarnation
    assert here.transport.traffic(theirs).num_bytes == there.transport.traffic(mine).num_bytes == 0
    connection = await here.connect(there.endpoint)
    batch = [whole(there, granule) for granule in range(4)]
    for move in (connection.read, connection.write):
        before = [node.transport.traffic(incarnation).num_bytes for node, incarnation in ((here, theirs), (there, mine))]
        await move(batch, TIMEOUT_S)
        await until(lambda: here.transport.traffic(theirs).num_bytes - before[0] >= 4 * GRANULE)  # noqa: B023
        await until(lambda: there.transport.traffic(mine).num_bytes - before[1] >= 4 * GRANULE)  # noqa: B023
    assert 0 < here.transport.traffic(theirs).round_trip_s < TIMEOUT_S
    assert here.transport.traffic(theirs + 1).num_bytes == 0
