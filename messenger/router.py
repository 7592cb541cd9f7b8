"""Messenger: one region served by every transport there is, and to each peer the best connection that can be had."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from messenger import metrics
from messenger.base import (
    Completion,
    Connection,
    DeadlineExceeded,
    Endpoint,
    Identity,
    InvalidSlice,
    NotifyHandler,
    Region,
    Slice,
    Transport,
)
from springtide.errors import PeerLost

logger = logging.getLogger(__name__)

_ONE_HOST_ONLY = frozenset(("shm",))
_FAILURE_KINDS: dict[type[BaseException], str] = {
    PeerLost: "peer_lost",
    DeadlineExceeded: "deadline",
    InvalidSlice: "invalid",
    asyncio.CancelledError: "cancelled",
}


def host_id() -> str:
    """Same in all processes that see the same kernel and the same files, so that they can pass memory to each other."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/mnt')}"
    except OSError:
        return socket.gethostname()


class MeteredConnection(Connection):
    """Counts what goes through another connection."""

    def __init__(self, inner: Connection, transport: str) -> None:
        self._inner = inner
        self.transport = transport
        self._read = _Direction(transport, "read")
        self._write = _Direction(transport, "write")

    @property
    def is_open(self) -> bool:
        return self._inner.is_open

    async def read(self, batch: Sequence[Slice], timeout_s: float) -> Completion:
        with self._read.batch():
            return self._read.moved(await self._inner.read(batch, timeout_s))

    async def write(self, batch: Sequence[Slice], timeout_s: float, notify: bytes | None = None) -> Completion:
        with self._write.batch():
            return self._write.moved(await self._inner.write(batch, timeout_s, notify))

    async def close(self) -> None:
        await self._inner.close()


class _Direction:
    """The metrics of one transport and direction."""

    def __init__(self, transport: str, direction: str) -> None:
        self._transport = transport
        self._bytes = metrics.BYTES.labels(transport, direction)
        self._batches = metrics.BATCHES.labels(transport, direction)
        self._seconds = metrics.SECONDS.labels(transport, direction)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        except BaseException as error:
            self._failures(_FAILURE_KINDS.get(type(error), "other"), 1)
            raise
        finally:
            self._batches.inc()
            self._seconds.observe(time.perf_counter() - start)

    def moved(self, completion: Completion) -> Completion:
        self._bytes.inc(completion.num_bytes)
        if completion.failed:
            self._failures("stale_slice", len(completion.failed))
        return completion

    def _failures(self, kind: str, count: int) -> None:
        metrics.FAILURES.labels(self._transport, kind).inc(count)


class Messenger:
    """Serves one region and reaches others'. Everything runs in the event loop that `start` was called in."""

    def __init__(self, transports: Sequence[Transport], region: Region, name: str, incarnation: int, on_notify: NotifyHandler) -> None:
        """`transports`: best first. `name` is told to peers and handed to their `on_notify`, as theirs is to this one's."""
        names = [transport.name for transport in transports]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"transports must be at least one, each once, not {names}")
        self._transports = tuple(transports)
        self._region = region
        self._identity = Identity(name, incarnation)
        self._on_notify = on_notify
        self._connections: dict[int, asyncio.Task[MeteredConnection]] = {}
        self._closed = False

    async def start(self) -> Endpoint:
        """Listens on every transport. Raises OSError or ValueError when one cannot; then none does."""
        addresses = {}
        try:
            for transport in self._transports:
                addresses[transport.name] = await transport.listen(self._region, self._identity, self._on_notify)
        except BaseException:
            await self.close()
            raise
        return Endpoint(host_id(), self._identity.incarnation, addresses)

    async def connect(self, endpoint: Endpoint) -> Connection:
        """The open connection to that incarnation, or a new one over the best transport that works. It stays the Messenger's: others may
        share it, and only `close` of the Messenger needs to close it. Raises PeerLost when no transport reaches the peer."""
        if self._closed:
            raise PeerLost("this Messenger is closed")
        connecting = self._connections.get(endpoint.incarnation)
        if connecting is None or (connecting.done() and not _usable(connecting)):
            self._forget_broken()
            connecting = asyncio.create_task(self._connect(endpoint), name=f"connect {endpoint.incarnation}")
            connecting.add_done_callback(_usable)  # retrieves the error, should every caller have gone
            self._connections[endpoint.incarnation] = connecting
        return await asyncio.shield(connecting)

    async def fence(self, name: str, incarnation: int) -> bool:
        """Cuts off whatever that peer opened to here. True: none of its earlier writes can land any more. False: it may still write
        through shared memory, for its process lives; ask again, or have it killed."""
        peer = Identity(name, incarnation)
        return all([await transport.fence(peer) for transport in self._transports])

    async def close(self) -> None:
        """Idempotent. Connections of both directions end; no byte of an earlier batch moves afterwards."""
        self._closed = True
        connecting = list(self._connections.values())
        self._connections.clear()
        for task in connecting:
            task.cancel()
        await asyncio.gather(*connecting, return_exceptions=True)
        await asyncio.gather(*(transport.close() for transport in self._transports))

    async def _connect(self, endpoint: Endpoint) -> MeteredConnection:
        reasons = []
        for transport in self._common_transports(endpoint):
            try:
                connection = await transport.connect(endpoint, self._region, self._identity)
            except (PeerLost, OSError) as error:
                metrics.FAILURES.labels(transport.name, "connect").inc()
                logger.warning("cannot connect by %s to %s: %s", transport.name, endpoint.addresses[transport.name], error)
                reasons.append(f"{transport.name}: {error}")
                continue
            logger.info("connected by %s to %s", transport.name, endpoint.addresses[transport.name])
            return MeteredConnection(connection, transport.name)
        raise PeerLost("; ".join(reasons) or f"no transport in common with {dict(endpoint.addresses)}")

    def _common_transports(self, endpoint: Endpoint) -> list[Transport]:
        same_host = endpoint.host_id == host_id()
        return [t for t in self._transports if t.name in endpoint.addresses and (same_host or t.name not in _ONE_HOST_ONLY)]

    def _forget_broken(self) -> None:
        self._connections = {peer: task for peer, task in self._connections.items() if not task.done() or _usable(task)}


def _usable(connecting: asyncio.Task[MeteredConnection]) -> bool:
    return not connecting.cancelled() and connecting.exception() is None and connecting.result().is_open
