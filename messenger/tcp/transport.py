"""The tcp transport: listening, connecting, and who is served by which lane."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from functools import partial

from messenger.base import Connection, Endpoint, Identity, NotifyHandler, Region, Traffic, Transport
from messenger.listener import Listener
from messenger.notices import serve_notices
from messenger.options import TcpOptions, check_host
from messenger.stream import PeerClosed, SocketStream
from messenger.tcp.connection import TcpConnection
from messenger.tcp.handshake import HANDSHAKE_ROUND_TRIPS, LaneRole, ProtocolError, Welcome, WelcomedCaller, answer, call
from messenger.tcp.pending_handshakes import PendingHandshakes
from messenger.tcp.served_lane import ServedLane, settle
from messenger.tcp.traffic import traffic_of
from springtide.clock import patience_s
from springtide.config import host_of
from springtide.errors import PeerLost

logger = logging.getLogger(__name__)

_TCP_THIN_LINEAR_TIMEOUTS, _TCP_RTO_MAX_MS = 16, 44
"""Of linux/tcp.h; the socket module has no names for them."""
_LONGEST_RETRY_MS = 2000
_UNTAKEN_S = 30.0
"""A thread that serves a data lane waits so long for a peer that takes nothing. Nobody waits for that thread; and a machine that stands
still, whose kernel finds the time gone by when it goes on, does not do so for as long."""


class TcpTransport(Transport):
    name = "tcp"

    def __init__(self, host: str = "127.0.0.1", port: int = 0, options: TcpOptions | None = None) -> None:
        """`host` is where to serve and where peers reach it; port 0 takes a free one."""
        self._host = host
        self._port = port
        self._options = options or TcpOptions()
        self._listener: Listener | None = None
        self._pending = PendingHandshakes()
        self._closed = False
        self._sessions: dict[ServedLane | SocketStream, Identity] = {}
        """The data lanes, and the streams of control lanes, that peers opened to here, and whose they are."""
        self._connections: list[TcpConnection] = []

    async def listen(self, region: Region, identity: Identity, on_notify: NotifyHandler) -> str:
        """Serves `region`. Raises ConfigError where other hosts could come in without a secret, OSError when the port is taken."""
        self._check_host(self._host)
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = socket.create_server((self._host, self._port), family=family, backlog=128)
        _prepare(sock)  # what it accepts inherits the options
        port = sock.getsockname()[1]
        serve = partial(self._serve, region, identity.incarnation, on_notify)
        self._listener = Listener(sock, serve, f"Messenger on tcp port {port}")
        return f"[{self._host}]:{port}" if family == socket.AF_INET6 else f"{self._host}:{port}"

    async def connect(self, endpoint: Endpoint, region: Region, identity: Identity) -> Connection:
        address = endpoint.addresses[self.name]
        timeout_s, secret = self._options.connect_timeout_s, self._options.secret

        async def open_lane(role: LaneRole) -> tuple[SocketStream, Welcome]:
            async with asyncio.timeout(timeout_s):
                stream = await self._open(address)
            try:
                async with asyncio.timeout(patience_s(timeout_s, HANDSHAKE_ROUND_TRIPS * traffic_of(stream.sock).round_trip_s)):
                    return stream, await call(stream, endpoint.incarnation, identity, role, self._options.checksums, secret)
            except BaseException:
                stream.close()
                raise

        async def open_data_lane() -> SocketStream:
            return (await open_lane(LaneRole.DATA))[0]

        with _connecting_to(address, timeout_s):
            self._check_host(host_of(address))
            control, welcome = await open_lane(LaneRole.CONTROL)

        try:
            connection = TcpConnection(address, endpoint.incarnation, control, welcome, region, open_data_lane, self._options)
        except BaseException:
            control.close()
            raise
        try:
            with _connecting_to(address, timeout_s):
                await connection.open()
        except BaseException:
            await connection.close()
            raise
        self._connections = [other for other in self._connections if other.is_open] + [connection]
        return connection

    def settle(self) -> None:
        settle()

    def traffic(self, incarnation: int) -> Traffic:
        opened = [traffic_of(session.sock) for session, caller in self._sessions.items() if caller.incarnation == incarnation]
        called = [connection.traffic() for connection in self._connections if connection.incarnation == incarnation and connection.is_open]
        return sum((*opened, *called), Traffic())

    async def fence(self, peer: Identity) -> bool:
        for session, caller in self._sessions.items():
            if caller == peer:
                session.close()
        return True

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(connection.close() for connection in self._connections))
        self._connections.clear()
        for session in self._sessions:
            session.close()
        if self._listener is not None:
            await self._listener.close()

    async def _serve(self, region: Region, incarnation: int, on_notify: NotifyHandler, stream: SocketStream) -> None:
        try:
            async with self._pending.begun(stream):
                caller = await answer(stream, region, incarnation, self._options.secret)
        except (ProtocolError, OSError) as error:
            if not isinstance(error, PeerClosed) and not self._closed:
                self._pending.warn(error)
            return
        if caller is None or self._closed:
            return
        try:
            await self._serve_lane(caller, stream, region, on_notify)
        except PeerClosed:
            return
        except ProtocolError as error:
            logger.error("closing a connection of %s: %s", caller.identity.name, error)

    async def _serve_lane(self, caller: WelcomedCaller, stream: SocketStream, region: Region, on_notify: NotifyHandler) -> None:
        if caller.role is LaneRole.CONTROL:
            with self._session(stream, caller):
                await serve_notices(stream, caller.identity.name, on_notify)
            return
        stream.lose_if_untaken(_UNTAKEN_S)
        lane = ServedLane(stream, region, caller.checksums)
        with self._session(lane, caller):
            await lane.run()

    @contextlib.contextmanager
    def _session(self, session: ServedLane | SocketStream, caller: WelcomedCaller) -> Iterator[None]:
        self._sessions[session] = caller.identity
        try:
            yield
        finally:
            del self._sessions[session]

    def _check_host(self, host: str) -> None:
        check_host(self.name, host, self._options)

    async def _open(self, address: str) -> SocketStream:
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        family, kind, protocol, _, target = (await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM))[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            _prepare(sock)
            await loop.sock_connect(sock, target)
            return SocketStream(sock)
        except BaseException:
            sock.close()
            raise


def _prepare(sock: socket.socket) -> None:
    """Sets the options of a lane's socket: small messages go at once; a host that vanished is noticed in some seconds, if idle; and what is
    lost on a full network is sent again and again at short intervals, where TCP would wait longer each time, up to minutes."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_THIN_LINEAR_TIMEOUTS, 1)
    with contextlib.suppress(OSError):  # kernels before 6.15
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _LONGEST_RETRY_MS)


@contextlib.contextmanager
def _connecting_to(address: str, timeout_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise PeerLost(f"{address} did not answer within {timeout_s:g} s") from error
    except (OSError, ValueError) as error:
        raise PeerLost(f"cannot connect to {address}: {error}") from error
