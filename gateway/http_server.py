"""uvicorn, run inside a process that minds its own signals, with bounds on what a connection may do, how many there may be, and for how
long each may be in which phase (`ConnectionTable`, pure)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import math
import socket
import time
from collections.abc import Generator, Hashable
from typing import Any, Generic, Literal, TypeVar

import httptools
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from springtide.errors import ConfigError, InvalidRequest, Overloaded, SpringtideError
from springtide.supervision import end, supervised
from springtide.tls import Tls, accept

logger = logging.getLogger(__name__)
# That a stranger sends what is no request is no trouble of ours, and must not fill the disk.
logger.setLevel(logging.ERROR)

STOP_TIMEOUT_S = 1
MAX_HEAD_BYTES = 64 << 10
"""Of a request's line and headers, and of the trailers behind its body."""
MAX_HEADERS = 128
SPARE_CHUNKS, BYTES_A_CHUNK = 1024, 64
"""A body may come in so many pieces, and one more for so many bytes of it."""
MAX_PIPELINED = 4
"""Requests that wait behind the one that is being answered on their connection."""
_TICKS_A_SWEEP = 10

ConnectionPhase = Literal["idle", "draining", "head", "stalled", "receiving", "busy"]
"""Between requests; the rest of a body that nobody wants is coming; a request's head is coming; an answer is not being taken; a request's
body is coming; a request is being answered."""

Key = TypeVar("Key", bound=Hashable)
MOST_S: dict[ConnectionPhase, float] = {"idle": 75.0, "draining": 10.0, "head": 10.0, "stalled": 60.0}
"""For how long a connection may be in a phase; bodies have their own time (`bodies.py`)."""
_YIELDING: tuple[ConnectionPhase, ...] = ("idle", "draining", "head", "stalled", "receiving")
"""The phases in which a connection makes room for a new one, in this order."""


class TooManyConnections(Overloaded):
    """There is no room for one more: all are being answered."""

    http_status = 503
    openai_type = "service_unavailable"


class HeadTooLarge(InvalidRequest):
    http_status = 431


class ConnectionTable(Generic[Key]):
    """The connections that there are, each in its phase, and which of them may stay. Free of I/O and clock."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._places: dict[Key, tuple[ConnectionPhase, str]] = {}
        self._since: dict[tuple[ConnectionPhase, str], dict[Key, float]] = {}
        """Phase and address -> its connections, by the time since which they have been in it."""

    def __len__(self) -> int:
        return len(self._places)

    def opened(self, key: Key, address: str, now: float) -> Key | None:
        """Takes a new one in, and returns which one is to be closed for it, if any: of those that nothing is done for yet, the oldest of
        the address that has the most of them; the new one itself when all are being answered."""
        victim = None
        if len(self._places) >= self._max_connections:
            victim = self._yielding()
            if victim is None:
                return key
            self.closed(victim)
        self._put(key, "idle", address, now)
        return victim

    def moved(self, key: Key, phase: ConnectionPhase, now: float) -> None:
        """Notes the phase of a connection. Of one that was closed for another, nothing is known any more."""
        place = self._places.get(key)
        if place is not None and place[0] != phase:
            self.closed(key)
            self._put(key, phase, place[1], now)

    def closed(self, key: Key) -> None:
        place = self._places.pop(key, None)
        if place is not None:
            del self._since[place][key]
            if not self._since[place]:
                del self._since[place]

    def overdue(self, now: float) -> list[Key]:
        """The connections that have been in their phase for too long."""
        return [
            key
            for (phase, _), since in self._since.items()
            if phase in MOST_S
            for key, entered_at in since.items()
            if now - entered_at > MOST_S[phase]
        ]

    def _put(self, key: Key, phase: ConnectionPhase, address: str, now: float) -> None:
        self._places[key] = (phase, address)
        self._since.setdefault((phase, address), {})[key] = now

    def _yielding(self) -> Key | None:
        for phase in _YIELDING:
            most: dict[Key, float] = {}
            for (at, _), since in self._since.items():
                if at == phase and len(since) > len(most):
                    most = since
            if most:
                return next(iter(most))
        return None


class HttpServer(uvicorn.Server):
    """The HTTP server of one app, with at most `max_connections`, and with TLS `max_handshakes` more that have not ended."""

    def __init__(self, app: FastAPI, max_connections: int, tls: Tls | None = None, max_handshakes: int = 256) -> None:
        self.table: ConnectionTable[_Connection] = ConnectionTable(max_connections)
        self._tls = tls
        self._max_handshakes = max_handshakes
        self._accepting: list[asyncio.Task[None]] = []
        self.leaving = False
        """Connections end with the next answer, which says so: whoever comes again comes to another gateway, behind a balancer."""
        settings = uvicorn.Config(
            app,
            http=functools.partial(_Connection, self),  # type: ignore[arg-type]  # whatever makes a protocol will do
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=int(MOST_S["idle"]),
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
        )
        settings.load()
        super().__init__(settings)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().serve(sockets)
        finally:
            await self._stop_accepting()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """With TLS not uvicorn's, which has any number of handshakes at a time."""
        if self._tls is None:
            await super().startup(sockets)
            return
        new = functools.partial(_Connection, self, self.config, self.server_state, self.lifespan.state)
        for each in sockets or ():
            taking = functools.partial(accept, each, self._tls, new, self._max_handshakes)
            self._accepting.append(supervised(taking, "accept connections"))
        self.servers = []
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._stop_accepting()
        await super().shutdown(sockets)

    async def _stop_accepting(self) -> None:
        await end(*self._accepting)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves signals alone, where uvicorn would take them over."""
        yield

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_A_SWEEP == 0:
            for connection in self.table.overdue(time.monotonic()):
                connection.drop()
        return await super().on_tick(counter)


class _Connection(HttpToolsProtocol):
    """uvicorn's, which by itself takes heads of any length, waits for them for ever, lets any number of requests wait in a row, and loses
    the body of one that would rather be of another protocol (`Upgrade: h2c`, as Java's client asks first)."""

    def __init__(self, server: HttpServer, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = logger
        self._server = server
        self._table = server.table
        self._is_read = True
        """What comes still counts."""
        self._in_head = False
        self._in_message = False
        self._head_is_known = False
        self._head_bytes = 0
        self._num_headers = 0
        self._num_chunks = 0
        self._body_bytes = 0

    def drop(self) -> None:
        """Ends it at once, whatever was to be sent: whoever does not take it would keep the connection open."""
        self.transport.abort()

    # ---- from the transport ----

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        victim = self._table.opened(self, self.client[0] if self.client else "", time.monotonic())
        if victim is self:
            self._refuse(TooManyConnections("too many connections", retry_after_s=1.0, reason="too_many_connections"))
        elif victim is not None:
            victim.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or not self._is_read:
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        except httptools.HttpParserUpgrade as asked:
            self._stay(data[asked.args[0] :])
        if self._in_head:
            # A header that has not ended yet has not been told of.
            self._head_bytes += len(data)
            if self._head_bytes > 2 * MAX_HEAD_BYTES:
                self.send_400_response("")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._table.moved(self, "stalled", time.monotonic())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._table.moved(self, self._phase(), time.monotonic())

    # ---- from the parser, in the order of a request's parts ----

    def on_message_begin(self) -> None:
        if self._head_is_known:
            return
        super().on_message_begin()
        self._in_head = self._in_message = True
        self._head_bytes = self._num_headers = self._num_chunks = self._body_bytes = 0
        self._note()
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _Excess

    def on_url(self, url: bytes) -> None:
        if self._head_is_known:
            return
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_is_known:
            return
        super().on_header(name, value)
        self._num_headers += 1
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        if self._head_is_known:
            return
        self._in_head = False
        super().on_headers_complete()
        if self._server.leaving:
            # What is under way was not announced to be the last on its connection, and is not: the next request may be on its way.
            self.cycle.keep_alive = False
        self._note()

    def on_body(self, body: bytes) -> None:
        self._num_chunks += 1
        self._body_bytes += len(body)
        if self._num_chunks > SPARE_CHUNKS + self._body_bytes // BYTES_A_CHUNK:
            raise _Excess
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_message = False
        super().on_message_complete()
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def send_400_response(self, msg: str) -> None:
        if self._head_bytes > MAX_HEAD_BYTES or self._num_headers > MAX_HEADERS:
            message = f"a request's head may have {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers"
            self._refuse(HeadTooLarge(message, code="head_too_large"))
        else:
            self._refuse(InvalidRequest("this is not an HTTP request", code="invalid_http"))

    def _stay(self, rest: bytes) -> None:
        """Goes on with a request that has asked for another protocol as if it had not, which is how it is told that there is none. The
        parser has ended with its head: another one is told of how its body comes."""
        framing = [header for header in self.headers if header[0] in (b"content-length", b"transfer-encoding")]
        self.parser = httptools.HttpRequestParser(self)
        self._head_is_known = True
        self.data_received(b"POST / HTTP/1.1\r\n" + b"".join(b"%s: %s\r\n" % header for header in framing) + b"\r\n")
        self._head_is_known = False
        if rest:
            self.data_received(rest)

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES or self._num_headers > MAX_HEADERS:
            raise _Excess

    def _phase(self) -> Any:
        if self.cycle is not None and not self.cycle.response_complete:
            # With one in the pipeline, what comes is that one, and what is answered another.
            comes = self._in_message and not self._in_head and not self.cycle.response_started and not self.pipeline
            return "receiving" if comes else "busy"
        if self._in_message:
            return "head" if self._in_head else "draining"
        return "idle"

    def _note(self) -> None:
        if self.flow.write_paused:
            return
        self._table.moved(self, self._phase(), time.monotonic())

    def _refuse(self, error: SpringtideError) -> None:
        """Of what came last. Requests before it that have come whole are answered, and with the last of them the connection ends."""
        last, body_comes = self.cycle, self._in_message and not self._in_head
        under_way = last is not None and not last.response_complete
        if under_way and not body_comes:
            last.keep_alive = False
            self._is_read = False
            return
        if not under_way or not (last.response_started or self.pipeline):
            told = {"error": {"message": error.message, "type": error.openai_type, "param": error.param, "code": error.code}}
            body = json.dumps(told).encode()
            retry = b"retry-after: %d\r\n" % math.ceil(error.retry_after_s) if isinstance(error, Overloaded) else b""
            head = b"content-type: application/json\r\nconnection: close\r\n%scontent-length: %d\r\n\r\n" % (retry, len(body))
            self.transport.write(STATUS_LINE[error.http_status] + head + body)
        self.transport.close()


class _Excess(Exception):
    """Ends the parsing of what a connection sends."""


def bind(host: str, port: int, name: str) -> socket.socket:
    """A socket for the server to listen on. Raises ConfigError, calling the port by the setting's `name`."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(f"{name}: cannot listen on {host}:{port}: {error.strerror}", param=name) from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        # So that clients are queued, not refused, from here on.
        bound.listen(2048)
    except OSError as error:
        bound.close()
        raise ConfigError(f"{name}: cannot listen on {host}:{port}: {error.strerror}", param=name) from None
    return bound
