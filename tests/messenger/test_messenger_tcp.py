"""What comes in at a tcp port is not trusted."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from messenger_support import GRANULE, NUM_GRANULES, TIMEOUT_S, Node, Workshop, fill, whole

from messenger.base import Identity, Region
from messenger.stream import Vector
from messenger.tcp_protocol import MAGIC, TABLE, WELCOME_BYTES, Header, Hello, Op, Verdict, Welcome
from messenger.tcp_server import ServedSlices

STRANGER = Identity("stranger", 12345)


@pytest.fixture
async def workshop(tmp_path: Path) -> AsyncIterator[Workshop]:
    made = Workshop("tcp", tmp_path)
    yield made
    await made.close()


@pytest.fixture
async def there(workshop: Workshop) -> Node:
    return await workshop.node("there")


async def say(node: Node, *messages: bytes, greet: bool = True) -> bytes:
    """Sends the messages to the node's port as a stranger; returns all that it answers until it closes."""
    host, _, port = node.endpoint.addresses["tcp"].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(TIMEOUT_S):
        if greet:
            writer.write(Hello.pack(node.endpoint.incarnation, STRANGER))
            welcome = Welcome.unpack(await reader.readexactly(WELCOME_BYTES))
            assert (welcome.verdict, welcome.region_bytes, welcome.granule) == (Verdict.WELCOME, node.bytes.nbytes, GRANULE)
        for message in messages:
            writer.write(message)
        try:
            answer = await reader.read()
        except ConnectionResetError:
            answer = b""
    writer.close()
    return answer


def request(op: int, entries: list[tuple[int, int, int]], payload: int = 0) -> bytes:
    return struct.pack("<B3xIQ", op, len(entries), payload) + np.array(entries, TABLE).tobytes()


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([request(99, [])], "unknown operation 99"),
        ([b"\x00" * 64], "unknown operation 0"),
        ([struct.pack("<B3xIQ", Op.READ, 1_000_000, 0)], "1000000 slices"),
        ([struct.pack("<B3xIQ", Op.NOTIFY, 0, 1 << 40)], str(1 << 40)),
        ([request(Op.READ, [(NUM_GRANULES * GRANULE, 1, 1)])], f"offset {NUM_GRANULES * GRANULE}, length 1: outside"),
        ([request(Op.READ, [(0, 0, 1)])], "length 0"),
        ([request(Op.READ, [(2**64 - 1, 2**64 - 1, 1)])], f"offset {2**64 - 1}"),
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
    assert await say(there, *messages) == b""
    assert complaint in caplog.text
    assert "stranger" in caplog.text
    assert np.array_equal(there.bytes, before)
    assert (await connection.read([whole(there, 2)], TIMEOUT_S)).num_bytes == GRANULE


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n", bytes(range(256)) * 40])
async def test_what_is_no_messenger_gets_no_welcome(there: Node, caplog: pytest.LogCaptureFixture, garbage: bytes) -> None:
    assert await say(there, garbage, greet=False) == b""
    assert "handshake" in caplog.text


async def test_another_version_is_told_so(there: Node) -> None:
    hello = bytearray(Hello.pack(there.endpoint.incarnation, STRANGER))
    hello[len(MAGIC) : len(MAGIC) + 2] = struct.pack("<H", 999)
    assert Welcome.unpack(await say(there, bytes(hello), greet=False)).verdict is Verdict.OTHER_VERSION


async def test_a_write_that_breaks_off_leaves_the_rest_untouched(there: Node) -> None:
    host, _, port = there.endpoint.addresses["tcp"].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(Hello.pack(there.endpoint.incarnation, STRANGER) + request(Op.WRITE, [(0, 1000, 1)], 1000) + b"\x05" * 400)
    await reader.readexactly(WELCOME_BYTES)
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    assert (there.bytes[:400] == 5).all()
    assert not there.bytes[400:].any()


async def test_a_server_that_is_no_messenger_is_lost(workshop: Workshop, there: Node) -> None:
    from dataclasses import replace

    from springtide.errors import PeerLost

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2p1 Debian-2 and so on, well beyond a welcome\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(PeerLost, match="no Messenger"):
        await there.connect(replace(there.endpoint, addresses={"tcp": address}))
    server.close()


def test_what_turns_stale_half_way_is_diverted_from_there_on() -> None:
    memory = np.zeros(64, np.uint8)
    region = Region(memory, np.array([1, 2], np.uint64), 32)
    table = np.array([(0, 32, 1), (32, 32, 2)], TABLE)
    slices = ServedSlices(table, region)
    vector = Vector(slices.views)
    check = slices.refuse_stale(vector, np.arange(2))

    def arrive(num_bytes: int) -> None:
        check()
        window = vector.window()
        taken = 0
        for buffer in window:
            part = buffer[: num_bytes - taken]
            part[:] = b"\x09" * len(part)
            taken += len(part)
        vector.advance(num_bytes)

    arrive(40)
    region.generations[1] = 7
    arrive(24)
    check()
    assert vector.done
    assert memory.tolist() == [9] * 40 + [0] * 24
    assert slices.refused.tolist() == [False, True]


def test_headers_survive_the_wire() -> None:
    header = Header(Op.WRITE, 17, 1 << 33)
    assert Header.unpack(header.pack()) == header
