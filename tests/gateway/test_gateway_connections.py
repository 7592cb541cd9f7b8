"""Connections: who keeps one without using it keeps nobody else out, and nothing that is sent over one is taken without end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from gateway import http_server
from gateway.http_server import MAX_HEADERS, MOST_S, ConnectionPhase, ConnectionTable, HttpServer, bind
from springtide.process import raise_file_limit
from tests.support.waiting import until

# ---- the table ----

PHASES: list[ConnectionPhase] = ["idle", "draining", "head", "stalled", "receiving", "busy"]


def test_the_oldest_idle_connection_of_who_has_most_of_them_makes_room() -> None:
    table: ConnectionTable[str] = ConnectionTable(4)
    for at, (key, address) in enumerate([("a", "one"), ("b", "many"), ("c", "many"), ("d", "many")]):
        assert table.opened(key, address, float(at)) is None
    table.moved("b", "busy", 5.0)
    assert table.opened("e", "one", 6.0) == "c"
    assert len(table) == 4


def test_whoever_is_served_keeps_the_connection() -> None:
    table: ConnectionTable[str] = ConnectionTable(2)
    for key in "ab":
        table.opened(key, "", 0.0)
        table.moved(key, "busy", 0.0)
    assert table.opened("c", "", 1.0) == "c" and len(table) == 2
    table.moved("a", "head", 2.0)
    assert table.opened("c", "", 3.0) == "a"
    table.moved("a", "busy", 4.0)
    table.closed("a")
    assert len(table) == 2


def test_who_sends_bodies_over_most_connections_makes_room_before_who_sends_one() -> None:
    table: ConnectionTable[str] = ConnectionTable(4)
    for at, (key, address) in enumerate([("a", "one"), ("b", "many"), ("c", "many"), ("d", "many")]):
        table.opened(key, address, float(at))
        table.moved(key, "receiving", float(at))
    table.moved("b", "busy", 5.0)
    assert table.opened("e", "one", 6.0) == "c"
    table.moved("e", "busy", 7.0)
    table.moved("a", "busy", 7.0)
    assert table.opened("f", "two", 8.0) == "d"
    table.moved("f", "busy", 9.0)
    assert table.opened("g", "many", 10.0) == "g"


@pytest.mark.parametrize("phase", MOST_S)
def test_each_phase_has_its_time(phase: ConnectionPhase) -> None:
    table: ConnectionTable[str] = ConnectionTable(2)
    table.opened("a", "", 0.0)
    table.moved("a", "busy", 50.0)
    assert table.overdue(1e6) == []
    table.moved("a", phase, 100.0)
    table.moved("a", phase, 105.0)
    assert table.overdue(100.0 + MOST_S[phase]) == []
    assert table.overdue(100.5 + MOST_S[phase]) == ["a"]


@given(st.lists(st.tuples(st.sampled_from([*PHASES, "open", "close"]), st.integers(0, 9), st.integers(0, 2))))
def test_there_are_never_more_than_allowed(steps: list[tuple[str, int, int]]) -> None:
    table: ConnectionTable[int] = ConnectionTable(3)
    known: set[int] = set()
    for now, (step, key, address) in enumerate(steps):
        if step == "open" and key not in known:
            victim = table.opened(key, str(address), float(now))
            known = (known | {key}) - {victim}
        elif step == "close":
            table.closed(key)
            known.discard(key)
        elif step != "open":
            table.moved(key, step, float(now))  # type: ignore[arg-type]
        assert len(table) == len(known) <= 3
    assert set(table.overdue(1e9)) <= known


# ---- the server ----

CONNECTIONS = 8
Address = tuple[str, int]


@pytest.fixture
def answering() -> asyncio.Event:
    """Until it is set, nothing sent to `/waits` is answered."""
    return asyncio.Event()


@pytest.fixture
async def address(answering: asyncio.Event) -> AsyncIterator[Address]:
    """Of a server that echoes bodies."""
    app = FastAPI()

    @app.get("/health")
    async def health() -> Response:
        return PlainTextResponse("ok")

    @app.post("/refused")
    async def refused() -> Response:
        return PlainTextResponse("no", 403)

    @app.post("/echo")
    async def echo(request: Request) -> Response:
        return Response(await request.body())

    @app.post("/waits")
    async def waits(request: Request) -> Response:
        body = await request.body()
        await answering.wait()
        return Response(body)

    listening = bind("127.0.0.1", 0, "port")
    server = HttpServer(app, CONNECTIONS)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    await until(lambda: server.started)
    yield listening.getsockname()
    server.should_exit = True
    await serving


async def connected(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*address)


async def ended(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server closes the connection."""
    received = b""
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                received += data
    return received


async def assert_served(address: Address) -> None:
    async with httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}", timeout=10) as client:
        assert (await client.get("/health")).text == "ok"
        assert (await client.post("/echo", content=b"x" * 300_000)).content == b"x" * 300_000


async def test_idle_connections_and_half_heads_give_way(address: Address) -> None:
    held = [await connected(address) for _ in range(4 * CONNECTIONS)]
    for _, writer in held[::2]:
        writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\n")
    await assert_served(address)
    for _, writer in held:
        writer.close()


async def test_bodies_that_come_slowly_give_way_and_those_that_are_answered_do_not(address: Address, answering: asyncio.Event) -> None:
    answered = [await connected(address) for _ in range(CONNECTIONS // 2)]
    for _, writer in answered:
        writer.write(b"POST /waits HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello")
    slow = [await connected(address) for _ in range(2 * CONNECTIONS)]
    for _, writer in slow:
        writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\nexpect: 100-continue\r\n\r\n")
    for reader, _ in slow[-CONNECTIONS // 2 :]:
        assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
    await assert_served(address)
    assert b"200" not in await ended(slow[-CONNECTIONS // 2][0])
    slow[-1][1].write(b"hello")
    assert (await slow[-1][0].readuntil(b"hello")).startswith(b"HTTP/1.1 200")
    answering.set()
    for reader, _ in answered:
        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")


async def test_when_all_are_being_answered_a_new_one_is_told_so(address: Address, answering: asyncio.Event) -> None:
    busy = [await connected(address) for _ in range(CONNECTIONS)]
    for _, writer in busy:
        writer.write(b"POST /waits HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\nexpect: 100-continue\r\n\r\n")
    for reader, writer in busy:
        assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"hello")
    # What comes behind a request that is being answered changes nothing.
    busy[0][1].write(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhe")
    await asyncio.sleep(0.2)
    reader, _ = await connected(address)
    refusal = await ended(reader)
    assert refusal.startswith(b"HTTP/1.1 503") and b"retry-after: 1\r\n" in refusal and b'"type": "service_unavailable"' in refusal
    answering.set()
    for reader, _ in busy:
        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
    await assert_served(address)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /echo HTTP/1.1\r\nhost",
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nPOST /echo HT",
        b"POST /refused HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\nabc",
    ],
)
async def test_who_stops_in_the_middle_is_not_waited_for(address: Address, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(http_server, "MOST_S", dict.fromkeys(MOST_S, 0.2))
    reader, writer = await connected(address)
    writer.write(sent)
    received = await ended(reader)
    assert received.startswith(b"HTTP/1.1") == (b"\r\n\r\n" in sent)


async def test_an_answer_that_nobody_takes_ends(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MOST_S", {**MOST_S, "stalled": 0.2})
    reader, writer = await connected(address)
    size = 32 << 20
    writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
    await writer.drain()
    await asyncio.sleep(2.0)
    assert len(await ended(reader)) < size


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n", b"431"),
        (b"GET /health HTTP/1.1\r\na: " + b"b" * (1 << 20), b"431"),
        (b"GET /" + b"a" * (1 << 20), b"431"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xff" * 500, b"400"),
        (b"GET /health HTTP/1.1\r\nhost x\r\n\r\n", b"400"),
        (b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (b"POST /echo HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\ntransfer-encoding: zip\r\n\r\n", b"400"),
    ],
)
async def test_what_is_no_request_is_refused_and_its_connection_closed(address: Address, sent: bytes, status: bytes) -> None:
    reader, writer = await connected(address)
    writer.write(sent)
    received = await ended(reader)
    assert received[9:12] == status
    await assert_served(address)


@pytest.mark.parametrize("behind", [b"{}", b"\x16\x03\x01", b"GET /" + b"a" * (1 << 20), b"GET / HTTP/1.1\r\nhost x\r\n\r\n"])
@pytest.mark.parametrize("ends", [b"", b"connection: close\r\n"])
async def test_what_came_whole_is_answered_whatever_comes_behind_it(
    address: Address, answering: asyncio.Event, behind: bytes, ends: bytes
) -> None:
    reader, writer = await connected(address)
    writer.write(b"POST /waits HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nfirst")
    writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\n%scontent-length: 6\r\n\r\nsecond" % ends + behind)
    await asyncio.sleep(0.1)
    writer.write(b"more of it")
    answering.set()
    for body in (b"first", b"second"):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await reader.readexactly(len(body)) == body
    assert await ended(reader) == b""
    await assert_served(address)


@pytest.mark.parametrize("step", [1, 60, 1 << 20])
async def test_who_would_rather_speak_another_protocol_is_answered_in_this_one(address: Address, step: int) -> None:
    """As Java's client asks with its first request, body and all, and as browsers ask for a WebSocket."""
    upgrade = b"host: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    sent = b"POST /echo HTTP/1.1\r\n" + upgrade + b"content-length: 5\r\n\r\nhello"
    sent += b"POST /echo HTTP/1.1\r\n" + upgrade + b"transfer-encoding: chunked\r\n\r\n3\r\nhow\r\n4\r\n are\r\n0\r\n\r\n"
    sent += b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    sent += b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    reader, writer = await connected(address)
    for begin in range(0, len(sent), step):
        writer.write(sent[begin : begin + step])
        await writer.drain()
    for body in (b"hello", b"how are", b"ok", b"ok"):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await reader.readexactly(len(body)) == body
    writer.close()


async def test_a_body_in_crumbs_is_not_put_together(address: Address) -> None:
    reader, writer = await connected(address)
    writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 20_000 + b"0\r\n\r\n")
    assert not (await ended(reader)).startswith(b"HTTP/1.1 200")
    reader, writer = await connected(address)
    writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 500 + b"0\r\n\r\n")
    assert (await reader.readuntil(b"a" * 500)).startswith(b"HTTP/1.1 200")


async def test_only_so_many_requests_wait_on_one_connection(address: Address) -> None:
    reader, writer = await connected(address)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 4)
    for _ in range(4):
        await reader.readuntil(b"\r\n\r\nok")
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 10_000)
    assert (await ended(reader)).count(b"HTTP/1.1 200") < 100
    await assert_served(address)


async def test_nonsense_of_all_kinds_leaves_the_server_as_it_was(address: Address) -> None:
    """Half heads, wrong lengths, bad chunks, pipelining, resets: a request that makes sense is served all the while, and nothing stays."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    statuses = set()
    for round_number in range(300):
        reader, writer = await connected(address)
        with contextlib.suppress(OSError):
            for _ in range(dice.randint(1, 3)):
                writer.write(nonsense(dice))
                await writer.drain()
                await asyncio.sleep(0)
            match dice.randrange(3):
                case 0:
                    writer.transport.abort()
                case 1:
                    writer.write_eof()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    statuses.add((await reader.read(12))[9:12])
        writer.close()
        if round_number % 50 == 0:
            await assert_served(address)
    await assert_served(address)
    assert b"500" not in statuses and len(statuses) > 2, statuses


def nonsense(dice: random.Random) -> bytes:
    good = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"
    chunked = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    begin, end = sorted(dice.sample(range(len(good)), 2))
    return dice.choice(
        [
            good,
            good * dice.randint(1, 40),
            good[:end],
            good[:begin] + dice.randbytes(dice.randint(1, 20)) + good[end:],
            good.replace(b"5", str(dice.randint(-5, 10**20)).encode()),
            chunked + b"%x\r\n" % dice.randrange(1 << 40) + dice.randbytes(9),
            chunked + b"5;" + b"x" * dice.randrange(5000) + b"\r\nhello\r\n0\r\na: b\r\n\r\n",
            chunked + b"1\r\na\r\n" * dice.randrange(3000) + b"0\r\n\r\n",
            b"GET /" + dice.randbytes(dice.randint(1, 2000)),
            b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * dice.randrange(1000),
            b"GET /health HTTP/9.9\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
            dice.randbytes(dice.randint(1, 3000)),
            b"\r\n" * dice.randrange(2000),
        ]
    )


# ---- files ----


def test_a_process_may_open_as_many_files_as_it_is_allowed_to() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        allowed = raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (allowed, hard) and allowed == min(hard, 1 << 20)
        assert raise_file_limit() == allowed
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
