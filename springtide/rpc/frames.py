"""Messages over a connection of the event loop's own: for what is asked so often that gRPC's threads would cost more than the answers do.

Each is a length (u32, little-endian) and so many bytes. The client's first is a greeting, which names what it speaks and carries the
cluster's token. The server's first is the same name; or says why not, and is its last (docs/wire.md).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import struct
from collections.abc import Callable
from typing import cast

from springtide.config import in_url
from springtide.credentials import Credentials
from springtide.rpc.authentication import REFUSAL
from springtide.rpc.channels import KEEPALIVE_MS, MAX_MESSAGE_BYTES, PING_TIMEOUT_MS
from springtide.supervision import supervised
from springtide.telemetry import FewWarnings
from springtide.tls import accept

logger = logging.getLogger(__name__)

SCHEDULE = b"springtide.v1.Schedule"
"""What is spoken where a Conductor is asked: ScheduleQuestion, ScheduleAnswer. Another version has another name."""
GREETING_S = 10.0
"""A server waits for a greeting for so long."""
MOST_STRANGERS = 256
"""Connections that have not greeted: when another one comes, the oldest is given up. As many handshakes of TLS beside them."""
_LONGEST_GREETING_BYTES = 1 << 10
_BACKLOG = 1024
_LENGTH = struct.Struct("<I")


class Frames(asyncio.Protocol):
    """A connection. Its messages are taken one by one, others having their turn in between. Who does not read is not listened to."""

    def __init__(
        self, take: Callable[[Frames, bytes], None], came: Callable[[Frames], None], went: Callable[[Frames, str], None], longest: int
    ) -> None:
        """`take` is given each message; a ConnectionError that it raises ends the connection. `came` and `went`, which is told why: once
        each, unless there never is a connection. `longest`: bytes of a message."""
        self.take, self.longest = take, longest
        self._came, self._went = came, went
        self.transport: asyncio.Transport
        self._received = bytearray()
        self._waits = False
        """There is more that has come, whose turn comes yet."""
        self._unread = False
        """The other side does not read what is sent."""
        self._why = "it has hung up"

    @property
    def peer(self) -> str:
        return str(self.transport.get_extra_info("peername"))

    def send(self, message: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(_LENGTH.pack(len(message)) + message)

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if transport.get_extra_info("sslcontext") is None:
            # What is sent goes out at once, and not with what uvloop has to write by the end of its round. Over TLS, where only what is
            # beneath it knows when a buffer is empty, nothing would be read again.
            self.transport.set_write_buffer_limits(high=0)
        self._came(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._went(self, self._why if error is None else str(error))

    def pause_writing(self) -> None:
        self._unread = True
        self._listen(False)

    def resume_writing(self) -> None:
        self._unread = False
        if not self._waits:
            self._go_on()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._waits and not self._unread:
            self._go_on()

    def _go_on(self) -> None:
        self._waits = False
        if self._unread or self.transport.is_closing():
            return
        try:
            message = self._next()
            if message is not None:
                self.take(self, message)
        except ConnectionError as error:
            self._why = str(error)
            logger.warning("hangs up on %s: %s", self.peer, error)
            self.transport.abort()
            return
        self._waits = message is not None and bool(self._received)
        self._listen(not self._waits and not self._unread)
        if self._waits:
            asyncio.get_running_loop().call_soon(self._go_on)

    def _next(self) -> bytes | None:
        received = self._received
        if len(received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(received)
        if length > self.longest:
            raise ConnectionError(f"a message of {length} bytes, more than {self.longest}")
        end = _LENGTH.size + length
        if len(received) < end:
            return None
        with memoryview(received) as whole:
            message = bytes(whole[_LENGTH.size : end])
        del received[:end]
        return message

    def _listen(self, on: bool) -> None:
        if not self.transport.is_closing() and self.transport.is_reading() is not on:
            (self.transport.resume_reading if on else self.transport.pause_reading)()


class FrameServer:
    """Serves who greets it as of its cluster. Lives in one event loop."""

    def __init__(self, speaks: bytes, credentials: Credentials, take: Callable[[Frames, bytes], None]) -> None:
        """`speaks`: a name with a version. `take` is given each message, and never raises."""
        self._speaks = speaks
        self._credentials = credentials
        self._take = take
        self._warnings = FewWarnings(logger)
        self._connections: set[Frames] = set()
        self._strangers: dict[Frames, None] = {}
        self._accepting: asyncio.AbstractServer | asyncio.Task[None] | None = None

    async def start(self, host: str) -> str:
        """Listens there; returns host:port, as `springtide.rpc.channels.listen`. Raises ConfigError as that, and OSError."""
        self._credentials.check_host(host)
        listening = _listening(host.strip("[]"))
        if (tls := self._credentials.tls) is None:
            self._accepting = await asyncio.get_running_loop().create_server(self._new, sock=listening, backlog=_BACKLOG)
        else:
            self._accepting = supervised(functools.partial(accept, listening, tls, self._new, MOST_STRANGERS), "accept connections")
            self._accepting.add_done_callback(lambda _: listening.close())
        return f"{in_url(host)}:{listening.getsockname()[1]}"

    async def close(self) -> None:
        """Hangs up, once what was sent is on its way. Idempotent."""
        if isinstance(self._accepting, asyncio.Task):
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        elif self._accepting is not None:
            self._accepting.close()
        for connection in self._connections:
            connection.transport.close()

    def _new(self) -> Frames:
        return Frames(self._greet, self._came, self._went, _LONGEST_GREETING_BYTES)

    def _came(self, connection: Frames) -> None:
        if len(self._strangers) >= MOST_STRANGERS:
            self._tire_of(next(iter(self._strangers)))
        self._strangers[connection] = None
        self._connections.add(connection)
        asyncio.get_running_loop().call_later(GREETING_S, self._tire_of, connection)

    def _tire_of(self, connection: Frames) -> None:
        if connection in self._strangers:
            del self._strangers[connection]
            connection.transport.abort()

    def _went(self, connection: Frames, why: str) -> None:
        self._strangers.pop(connection, None)
        self._connections.discard(connection)

    def _greet(self, connection: Frames, greeting: bytes) -> None:
        speaks, _, token = greeting.partition(b"\n")
        if self._credentials.admits(token) and speaks == self._speaks:
            del self._strangers[connection]
            connection.take, connection.longest = self._take, MAX_MESSAGE_BYTES
            connection.send(self._speaks)
            return
        self._warnings.warn("refused a connection of a stranger at %s, who speaks %.100r", connection.peer, speaks)
        connection.send(b"this port speaks " + self._speaks if speaks != self._speaks else REFUSAL.encode())
        connection.transport.close()


async def connect(
    address: str, speaks: bytes, credentials: Credentials, take: Callable[[Frames, bytes], None], went: Callable[[Frames, str], None]
) -> Frames:
    """A connection to the server at host:port, which has welcomed it. Raises OSError."""
    loop = asyncio.get_running_loop()
    welcomed: asyncio.Future[None] = loop.create_future()

    def greet(connection: Frames) -> None:
        connection.send(speaks + b"\n" + (credentials.token or "").encode())

    def welcome(connection: Frames, message: bytes) -> None:
        if message != speaks:
            raise ConnectionError(message.decode(errors="replace"))
        connection.take = take
        if not welcomed.done():
            welcomed.set_result(None)

    def gone(connection: Frames, why: str) -> None:
        if not welcomed.done():
            welcomed.set_exception(ConnectionResetError(why))
        went(connection, why)

    host, _, port = address.rpartition(":")
    tls = None if credentials.tls is None else credentials.tls.client_context()
    transport, connection = await loop.create_connection(
        lambda: Frames(welcome, greet, gone, MAX_MESSAGE_BYTES), host.strip("[]"), int(port), ssl=tls
    )
    try:
        await welcomed
    except BaseException:
        transport.abort()
        raise
    return connection


def _listening(host: str) -> socket.socket:
    """At a free port."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    listening = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    # Connections inherit these: a client whose machine is gone is noticed as soon as gRPC's server would.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_MS // 1000)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_MS // 1000)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PING_TIMEOUT_MS)
    return listening
