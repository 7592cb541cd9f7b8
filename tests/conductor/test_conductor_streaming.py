"""`follow` against gRPC's own server, and against servers that break HTTP/2's rules."""

from __future__ import annotations

import asyncio
import logging
import re
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any

import grpc
import grpc.aio
import pytest

from conductor.server.streaming import CallFailed, Reading, follow
from springtide.credentials import Credentials
from springtide.rpc.authentication import TOKEN_KEY
from springtide.rpc.channels import new_server

METHOD = "/test.Source/Watch"
Answer = Callable[[bytes, Any], AsyncIterator[bytes]]
SECRET = Credentials(b"a secret of sixteen", "springtide")


@asynccontextmanager
async def serving(answer: Answer, credentials: Credentials | None = None) -> AsyncIterator[tuple[str, grpc.aio.Server]]:
    server = new_server(credentials) if credentials is not None else new_server()
    handlers = {"Watch": grpc.unary_stream_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Source", handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield address, server
    finally:
        await server.stop(None)


@asynccontextmanager
async def sending(*parts: bytes) -> AsyncIterator[str]:
    """A server that sends these bytes, whatever it is sent, and closes the connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def message(payload: bytes) -> bytes:
    return struct.pack(">?I", False, len(payload)) + payload


async def take_all(address: str, took: list[bytes], request: bytes = b"", metadata: tuple[tuple[str, str], ...] = ()) -> None:
    async with asyncio.timeout(10):
        await follow(address, METHOD, request, metadata, took.extend)


async def test_every_message_is_taken() -> None:
    async def answer(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for number in range(5):
            yield request + bytes([number])
            await asyncio.sleep(0.05)

    took: list[bytes] = []
    async with serving(answer) as (address, _):
        await take_all(address, took, b"asked ")
    assert took == [b"asked " + bytes([number]) for number in range(5)]


async def test_what_has_come_together_is_taken_together() -> None:
    head = frame(4, 0, 0) + frame(1, 4, 1, b"\x88")
    together = b"".join(frame(0, 0, 1, message(b"%d" % number)) for number in range(100))
    took: list[Sequence[bytes]] = []
    async with sending(head, together, frame(0, 0, 1, message(b"last")[:3]), frame(0, 0, 1, message(b"last")[3:])) as address:
        with pytest.raises(ConnectionResetError, match="the server closed the connection"):
            async with asyncio.timeout(10):
                await follow(address, METHOD, b"", (), took.append)
    assert took == [[b"%d" % number for number in range(100)], [b"last"]]


async def test_what_comes_while_nothing_is_read_is_taken_together_later() -> None:
    first_taken, all_said = asyncio.Event(), asyncio.Event()

    async def answer(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield bytes([0])
        await first_taken.wait()
        for number in range(1, 10):
            yield bytes([number])
        all_said.set()
        await asyncio.sleep(600)

    reading = Reading()
    reading.resume()  # of no connection yet: nothing happens
    took: list[list[bytes]] = []

    def take(messages: Sequence[bytes]) -> None:
        took.append(list(messages))
        reading.pause()
        first_taken.set()

    async with serving(answer) as (address, _), asyncio.timeout(30):
        following = asyncio.create_task(follow(address, METHOD, b"", (), take, reading))
        await all_said.wait()
        await asyncio.sleep(0.5)  # in which all of it could have been read
        assert len(took) == 1 and len(took[0]) < 10
        reading.resume()
        while len(took) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert list(chain(*took)) == [bytes([number]) for number in range(10)]
        assert len(took) == 2, "all that had come in between at once"
        following.cancel()
        await asyncio.wait([following])
        reading.resume()
        reading.pause()


async def test_who_takes_slowly_is_not_behind() -> None:
    said = 0

    async def answer(request: bytes, context: Any) -> AsyncIterator[bytes]:
        nonlocal said
        while True:
            said += 1
            yield said.to_bytes(4, "big") + bytes(1000)
            await asyncio.sleep(0)

    took: list[int] = []
    behind: list[int] = []

    def take(messages: Sequence[bytes]) -> None:
        took.extend(int.from_bytes(message[:4], "big") for message in messages)
        behind.append(said - took[-1])

    async with serving(answer) as (address, _):
        following = asyncio.create_task(follow(address, METHOD, b"", (), take))
        async with asyncio.timeout(30):
            while said <= 1000 or len(behind) <= 20:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        following.cancel()
        await asyncio.wait([following])
    assert said > 1000, "far more than the windows hold"
    assert took == list(range(1, len(took) + 1))
    assert len(behind) > 20 and max(behind) < 500, "no more than what is on its way and what the server's own buffers hold"


async def test_messages_larger_than_the_window_come_whole() -> None:
    large = bytes(range(256)) * 4096

    async def answer(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for number in range(3):
            yield large[number:]
            await asyncio.sleep(0.2)

    took: list[bytes] = []
    async with serving(answer) as (address, _):
        await take_all(address, took)
    assert took == [large, large[1:], large[2:]]


async def test_a_call_that_fails_says_why() -> None:
    async def answer(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"one"
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many, 100 %, who watch")

    took: list[bytes] = []
    async with serving(answer) as (address, _):
        with pytest.raises(ConnectionError, match="RESOURCE_EXHAUSTED too many, 100 %, who watch") as failed:
            await take_all(address, took)
        assert isinstance(failed.value, CallFailed) and failed.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert took == [b"one"]


async def test_the_credentials_are_shown() -> None:
    async def answer(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"for friends"

    assert SECRET.token is not None
    took: list[bytes] = []
    async with serving(answer, SECRET) as (address, _):
        with pytest.raises(ConnectionError, match="UNAUTHENTICATED "):
            await take_all(address, took)
        assert took == []
        await take_all(address, took, metadata=((TOKEN_KEY, SECRET.token),))
    assert took == [b"for friends"]


async def test_no_log_has_the_credentials(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"for friends"

    caplog.set_level(logging.DEBUG)
    assert SECRET.token is not None
    async with serving(answer, SECRET) as (address, _):
        await take_all(address, [], metadata=((TOKEN_KEY, SECRET.token),))
    assert SECRET.token not in caplog.text and "Encoded header block" not in caplog.text


async def test_an_unknown_method_and_nobody_there_are_errors() -> None:
    async def answer(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b""

    async with serving(answer) as (address, _):
        with pytest.raises(ConnectionError, match="UNIMPLEMENTED"):
            await follow(address, "/test.Source/Other", b"", (), print)
    with pytest.raises(OSError):
        await take_all(address, [])
    with pytest.raises(OSError, match=re.escape("there is no address '127.0.0.1:70000'")):
        await take_all("127.0.0.1:70000", [])


async def test_a_server_that_stops_ends_it() -> None:
    async def answer(request: bytes, context: Any) -> AsyncIterator[bytes]:
        while True:
            yield b"still here"
            await asyncio.sleep(0.02)

    begun = asyncio.Event()

    async with serving(answer) as (address, server), asyncio.timeout(10):
        following = asyncio.create_task(follow(address, METHOD, b"", (), lambda _: begun.set()))
        await begun.wait()
        await server.stop(None)
        with pytest.raises(ConnectionError):
            await following


async def test_what_taking_raises_ends_it() -> None:
    async def answer(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"nonsense"
        await asyncio.sleep(10)

    def take(_: Sequence[bytes]) -> None:
        raise ValueError("this makes no sense")

    async with serving(answer) as (address, _):
        with pytest.raises(ValueError, match="this makes no sense"):
            async with asyncio.timeout(10):
                await follow(address, METHOD, b"", (), take)


@pytest.mark.parametrize(
    ("nonsense", "what"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "a frame of"),
        (frame(0, 0, 1, struct.pack(">?I", True, 0)), "compressed"),
        (frame(0, 0, 1, struct.pack(">?I", False, 1 << 31)), "of 2147483648 bytes"),
        (frame(0, 1, 1, message(b"end")), "without a status"),
        (frame(1, 4, 1, b"\xff\xff\xff\xff\xff\xff"), "cannot be read"),
        (frame(1, 4, 1, b"\x8d"), "HTTP status 404"),
        (frame(1, 5, 1, b"\x8d"), "HTTP status 404"),
        (
            frame(7, 0, 0, bytes(4) + (11).to_bytes(4, "big") + b"too_many_pings"),
            "closed the connection with HTTP/2's error 11: too_many_pings",
        ),
        (frame(3, 0, 1, (11).to_bytes(4, "big")), "HTTP/2's error 11"),
        (frame(1, 0, 1, b"\x88") + 5 * frame(9, 0, 1, bytes(16_000)), "headers of more than"),
    ],
)
async def test_nonsense_ends_it(nonsense: bytes, what: str) -> None:
    async with sending(nonsense) as address:
        with pytest.raises(ConnectionError, match=what):
            await take_all(address, [])


async def test_headers_in_parts_and_padding_are_understood() -> None:
    padded = bytes([3]) + message(b"padded") + bytes(3)
    with_priority = bytes([2]) + bytes(5) + b"\x88" + bytes(2)
    head = frame(1, 0x8 | 0x20, 1, with_priority) + frame(9, 4, 1, b"\x0f\x10\x10application/grpc")
    end = frame(1, 5, 1, b"\x00\x0bgrpc-status\x010")
    took: list[bytes] = []
    async with sending(head, frame(0, 8, 1, padded), end) as address:
        await take_all(address, took)
    assert took == [b"padded"]
