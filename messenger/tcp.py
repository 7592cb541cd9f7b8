"""The tcp transport: several connections a peer, bytes straight from and to registered memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from messenger.base import Completion, Connection, Endpoint, Identity, InvalidSlice, NotifyHandler, Region, Slice, Transport
from messenger.listener import Listener
from messenger.ordering import Turns, run_to_rest
from messenger.plan import Plan, make_plan
from messenger.stream import Stream
from messenger.tcp_lane import Lane, shake_hands
from messenger.tcp_protocol import MAX_NOTIFY_BYTES, TABLE, Op, Welcome
from messenger.tcp_server import TcpSession
from springtide.errors import PeerLost

CLOSE_GRACE_S = 1.0
_STRIPE_BYTES = 2 << 20
_STRIPE_PIECES = 512
_STRIPES_IN_FLIGHT = 2
"""A batch and lane: one on the wire while the next is being asked for, yet others' stripes come in between."""


@dataclass(frozen=True, slots=True)
class TcpOptions:
    lanes: int = 4
    """Connections to one peer."""
    connect_timeout_s: float = 2.0
    peer_timeout_s: float = 2.0
    """A peer whose kernel is silent, or which takes in nothing, for so long is lost."""

    def __post_init__(self) -> None:
        if self.lanes < 1:
            raise ValueError(f"TcpOptions.lanes must be at least 1, not {self.lanes}")


class TcpConnection(Connection):
    """A set of lanes; one broken lane breaks the set."""

    def __init__(self, peer: str, streams: Sequence[Stream], welcome: Welcome, region: Region) -> None:
        self._peer = peer
        self._welcome = welcome
        self._region = region
        self._memory = region.memory.data
        self._lost: PeerLost | None = None
        self._closing: asyncio.Task[None] | None = None
        self._turns = Turns()
        self._lanes = [Lane(stream, peer, self._fail) for stream in streams]

    @property
    def is_open(self) -> bool:
        return self._lost is None

    async def read(self, batch: Sequence[Slice], timeout_s: float) -> Completion:
        plan = self._plan(batch)
        return await run_to_rest(self._move(Op.READ, plan), timeout_s, self._expire, f"reading {plan.num_bytes} bytes of {self._peer}")

    async def write(self, batch: Sequence[Slice], timeout_s: float, notify: bytes | None = None) -> Completion:
        plan = self._plan(batch)
        if notify is not None and len(notify) > MAX_NOTIFY_BYTES:
            raise InvalidSlice(f"a notification of {len(notify)} bytes, more than {MAX_NOTIFY_BYTES}")
        work = self._move(Op.WRITE, plan) if notify is None else self._write_and_notify(plan, notify)
        return await run_to_rest(work, timeout_s, self._expire, f"writing {plan.num_bytes} bytes to {self._peer}")

    async def close(self) -> None:
        self._fail(PeerLost(f"the connection to {self._peer} was closed here"))
        assert self._closing is not None
        await asyncio.shield(self._closing)

    def _plan(self, batch: Sequence[Slice]) -> Plan:
        if self._lost is not None:
            raise self._lost
        return make_plan(batch, len(self._memory), self._welcome.region_bytes, self._welcome.granule, _STRIPE_BYTES)

    async def _write_and_notify(self, plan: Plan, notify: bytes) -> Completion:
        async with self._turns.take() as come:
            completion = await self._move(Op.WRITE, plan)
            await come()
            if not completion.failed:
                await self._lanes[0].request(Op.NOTIFY, np.zeros(0, TABLE), data=(memoryview(notify),))
            return completion

    async def _move(self, op: Op, plan: Plan) -> Completion:
        """Lanes pull the stripes of the plan from one iterator: who is faster moves more."""
        stale = np.zeros(plan.num_pieces, np.bool_)
        stripes = list(plan.stripes(_STRIPE_BYTES, _STRIPE_PIECES))
        if len(stripes) == 1:
            least_busy = min(self._lanes, key=lambda lane: lane.num_pending)
            await self._pull(least_busy, op, plan, iter(stripes), stale)
        elif stripes:
            lanes = sorted(self._lanes, key=lambda lane: lane.num_pending)
            workers = (lanes * _STRIPES_IN_FLIGHT)[: len(stripes)]
            remaining = iter(stripes)
            results = await asyncio.gather(*(self._pull(lane, op, plan, remaining, stale) for lane in workers), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
        return plan.completion(stale)

    async def _pull(self, lane: Lane, op: Op, plan: Plan, stripes: Iterator[slice], stale: np.ndarray) -> None:
        for stripe in stripes:
            table = np.empty(stripe.stop - stripe.start, TABLE)
            table["offset"], table["length"], table["generation"] = plan.remote[stripe], plan.length[stripe], plan.generation[stripe]
            starts, ends = plan.local[stripe], plan.local[stripe] + plan.length[stripe]
            views = [self._memory[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
            if op is Op.READ:
                stale[stripe] = await lane.request(op, table, into=views)
            else:
                stale[stripe] = await lane.request(op, table, data=views)

    def _expire(self) -> None:
        self._fail(PeerLost(f"the connection to {self._peer} was closed when a batch missed its deadline"))

    def _fail(self, error: PeerLost) -> None:
        if self._lost is not None:
            return
        self._lost = error
        for lane in self._lanes:
            lane.fail(error)
        self._closing = asyncio.create_task(self._close_lanes(), name=f"close lanes to {self._peer}")

    async def _close_lanes(self) -> None:
        await asyncio.gather(*(lane.close(CLOSE_GRACE_S) for lane in self._lanes))


class TcpTransport(Transport):
    name = "tcp"

    def __init__(self, host: str = "127.0.0.1", port: int = 0, options: TcpOptions | None = None) -> None:
        """`host` is where to serve and where peers reach it; port 0 takes a free one."""
        self._host = host
        self._port = port
        self._options = options or TcpOptions()
        self._listener: Listener | None = None
        self._sessions: set[TcpSession] = set()
        self._connections: list[TcpConnection] = []

    async def listen(self, region: Region, identity: Identity, on_notify: NotifyHandler) -> str:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = socket.create_server((self._host, self._port), family=family, backlog=128)
        self._prepare(sock)  # what it accepts inherits the options
        port = sock.getsockname()[1]

        async def serve(stream: Stream) -> None:
            session = TcpSession(stream, region, identity.incarnation, on_notify)
            self._sessions.add(session)
            try:
                await session.run()
            finally:
                self._sessions.remove(session)

        self._listener = Listener(sock, serve, f"Messenger on tcp port {port}")
        return f"[{self._host}]:{port}" if family == socket.AF_INET6 else f"{self._host}:{port}"

    async def connect(self, endpoint: Endpoint, region: Region, identity: Identity) -> Connection:
        address = endpoint.addresses[self.name]
        streams: list[Stream] = []
        try:
            async with asyncio.timeout(self._options.connect_timeout_s):
                for _ in range(self._options.lanes):
                    streams.append(await self._open(address))
                    welcome = await shake_hands(streams[-1], endpoint.incarnation, identity)
        except BaseException as error:
            for stream in streams:
                stream.close()
            if isinstance(error, TimeoutError):
                raise PeerLost(f"{address} did not answer within {self._options.connect_timeout_s:g} s") from error
            if isinstance(error, OSError | ValueError):
                raise PeerLost(f"cannot connect to {address}: {error}") from error
            raise
        connection = TcpConnection(address, streams, welcome, region)
        self._connections = [other for other in self._connections if other.is_open] + [connection]
        return connection

    async def fence(self, peer: Identity) -> bool:
        for session in self._sessions:
            if session.peer == peer:
                session.close()
        return True

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self._connections))
        self._connections.clear()
        if self._listener is not None:
            await self._listener.close()

    async def _open(self, address: str) -> Stream:
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        family, kind, protocol, _, target = (await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM))[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            self._prepare(sock)
            await loop.sock_connect(sock, target)
            return Stream(sock)
        except BaseException:
            sock.close()
            raise

    def _prepare(self, sock: socket.socket) -> None:
        """Small messages go at once, and a host that vanished is noticed in `peer_timeout_s`, idle or not."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._options.peer_timeout_s * 1000))
