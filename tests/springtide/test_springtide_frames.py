"""Messages over a plain connection: whole, in order, for who is of the cluster alone; and nobody has more of the server than his share."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from deploy.ca.authority import Authority
from deploy.ca.identity import Identity, issue_to
from springtide.credentials import OPEN, Credentials
from springtide.rpc import frames
from springtide.rpc.authentication import REFUSAL
from springtide.rpc.channels import MAX_MESSAGE_BYTES
from springtide.rpc.frames import Frames, FrameServer, connect
from springtide.tls import Tls, TlsFiles
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_factories=("asyncio", "uvloop"))

SPEAKS = b"test/1"
CREDENTIALS = Credentials(b"a secret of sixteen", "springtide")
SOON_S = 10.0


def echo(connection: Frames, message: bytes) -> None:
    connection.send(message[::-1])


@asynccontextmanager
async def serving(take: Callable[[Frames, bytes], None] = echo, credentials: Credentials = CREDENTIALS) -> AsyncIterator[str]:
    server = FrameServer(SPEAKS, credentials, take)
    try:
        yield await server.start("127.0.0.1")
    finally:
        await server.close()


class Client:
    """What came, and why nothing comes any more."""

    def __init__(self) -> None:
        self.came: list[bytes] = []
        self.gone: list[str] = []
        self.connection: Frames

    async def connect(self, address: str, speaks: bytes = SPEAKS, credentials: Credentials = CREDENTIALS) -> Client:
        self.connection = await connect(address, speaks, credentials, lambda _, message: self.came.append(message), self._went)
        return self

    def _went(self, connection: Frames, why: str) -> None:
        self.gone.append(why)


def framed(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


def greeting(credentials: Credentials = CREDENTIALS) -> bytes:
    return framed(SPEAKS + b"\n" + (credentials.token or "").encode())


async def opened(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def read(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(SOON_S):
        (length,) = struct.unpack("<I", await reader.readexactly(4))
        return await reader.readexactly(length)


async def is_hung_up_on(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(SOON_S):
        with suppress(ConnectionError):
            return await reader.read() == b""
        return True


async def test_messages_of_any_length_are_answered_in_order() -> None:
    messages = [bytes([number]) * length for number, length in enumerate((0, 1, 3, 65_536, 5 << 20, 2, 300_000, 0, 7))]
    async with serving() as address:
        client = await Client().connect(address)
        for message in messages:
            client.connection.send(message)
        await until(lambda: len(client.came) == len(messages))
    assert client.came == [message[::-1] for message in messages]
    await until(lambda: client.gone)


async def test_messages_that_come_byte_by_byte_are_put_together() -> None:
    async with serving() as address:
        reader, writer = await opened(address)
        for byte in greeting() + framed(b"abc") + framed(b"") + framed(b"de"):
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert [await read(reader) for _ in range(4)] == [SPEAKS, b"cba", b"", b"ed"]
        writer.close()


async def test_others_have_their_turn_between_the_messages_of_one() -> None:
    took: list[bytes] = []
    async with serving(lambda _, message: took.append(message)) as address:
        first, second = await Client().connect(address), await Client().connect(address)
        for _ in range(5000):
            first.connection.send(b"a")
        second.connection.send(b"b")
        await until(lambda: len(took) == 5001)
        assert took.index(b"b") < 5000


@pytest.mark.parametrize("secret", [b"another secret of it", None])
async def test_a_stranger_is_told_that_he_is_one(secret: bytes | None) -> None:
    stranger = OPEN if secret is None else Credentials(secret, "springtide")
    took: list[bytes] = []
    async with serving(lambda _, message: took.append(message)) as address:
        with pytest.raises(ConnectionError, match="does not carry"):
            await Client().connect(address, credentials=stranger)
        reader, writer = await opened(address)
        writer.write(greeting(stranger) + framed(b"a question"))
        assert (await read(reader)).decode() == REFUSAL and await is_hung_up_on(reader)
        writer.close()
    assert not took


async def test_who_speaks_something_else_is_told_what_is_spoken() -> None:
    async with serving() as address:
        with pytest.raises(ConnectionError, match="speaks test/1"):
            await Client().connect(address, speaks=b"test/2")


@pytest.mark.parametrize(
    "sent", [struct.pack("<I", 1 << 20), b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\xff" * 1000]
)
async def test_who_does_not_greet_is_hung_up_on(sent: bytes) -> None:
    async with serving() as address:
        reader, writer = await opened(address)
        writer.write(sent)
        assert await is_hung_up_on(reader)
        writer.close()


async def test_a_message_that_is_too_long_ends_the_connection_before_it_is_read() -> None:
    async with serving() as address:
        reader, writer = await opened(address)
        writer.write(greeting() + struct.pack("<I", MAX_MESSAGE_BYTES + 1))
        assert await read(reader) == SPEAKS and await is_hung_up_on(reader)
        writer.close()


async def test_who_is_silent_is_given_up_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "GREETING_S", 0.2)
    async with serving() as address:
        client = await Client().connect(address)
        reader, writer = await opened(address)
        assert await is_hung_up_on(reader)
        writer.close()
        client.connection.send(b"abc")
        await until(lambda: client.came)


async def test_those_who_are_silent_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MOST_STRANGERS", 4)
    async with serving() as address:
        silent = [await opened(address) for _ in range(20)]
        client = await Client().connect(address)
        client.connection.send(b"abc")
        await until(lambda: client.came)
        for reader, _ in silent[:15]:
            assert await is_hung_up_on(reader)
        for _, writer in silent:
            writer.close()


async def test_who_does_not_read_is_not_listened_to() -> None:
    took = 0

    def answer(connection: Frames, message: bytes) -> None:
        nonlocal took
        took += 1
        connection.send(bytes(100_000))

    async with serving(answer) as address:
        reader, writer = await opened(address)
        writer.transport.pause_reading()
        writer.write(greeting() + 1000 * framed(b"a question"))
        await until(lambda: took > 1)
        while True:
            before = took
            await asyncio.sleep(0.3)
            if took == before:
                break
        assert took < 200, "what the kernel buffers is full"
        writer.transport.resume_reading()
        assert await read(reader) == SPEAKS
        for _ in range(1000):
            assert len(await read(reader)) == 100_000
        writer.close()


def certified(authority: Authority, identity: Identity, name: str) -> Credentials:
    issue_to(identity, authority, name, ("127.0.0.1",))
    files = TlsFiles(identity.certificate, identity.key, identity.authorities, ("tls.certificate", "tls.key", "tls.ca"))
    return Credentials(b"a secret of sixteen", "springtide", Tls(files))


async def test_a_mistake_while_a_connection_is_taken_costs_that_one_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = certified(Authority.create(tmp_path / "ca", "springtide"), Identity(tmp_path / "machine"), "machine")
    assert credentials.tls is not None
    async with serving(credentials=credentials) as address:
        with monkeypatch.context() as broken:
            broken.delattr(Tls, "server_context")
            with pytest.raises(OSError):
                async with asyncio.timeout(SOON_S):
                    await Client().connect(address, credentials=credentials)
        client = await Client().connect(address, credentials=credentials)
        client.connection.send(b"abc")
        await until(lambda: client.came)


async def test_over_tls_only_who_has_a_certificate_of_the_cluster_is_answered(tmp_path: Path) -> None:
    def of(authority: Authority, name: str) -> Credentials:
        return certified(authority, Identity(tmp_path / name), name)

    ours, others = Authority.create(tmp_path / "ours", "springtide"), Authority.create(tmp_path / "others", "springtide")
    async with serving(credentials=of(ours, "server")) as address:
        client = await Client().connect(address, credentials=of(ours, "client"))
        messages = [bytes([number % 256]) * 3000 for number in range(1000)]
        for message in messages:
            client.connection.send(message)
        await until(lambda: len(client.came) == 1000)
        assert client.came == messages
        for stranger in (of(others, "stranger"), CREDENTIALS):
            with pytest.raises(OSError):
                async with asyncio.timeout(SOON_S):
                    await Client().connect(address, credentials=stranger)
        client.connection.transport.close()
        await until(lambda: client.gone)
