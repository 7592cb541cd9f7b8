"""Messenger: one region served by every transport there is, and to each peer the best connection that can be had."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Collection, Sequence
from pathlib import Path

from messenger import metrics
from messenger.base import (
    Connection,
    Endpoint,
    Identity,
    NotifyHandler,
    Region,
    Traffic,
    Transport,
)
from messenger.metered import MeteredConnection
from springtide.errors import PeerLost, SpringtideError
from springtide.supervision import end

logger = logging.getLogger(__name__)


def host_id() -> str:
    """An id that all processes have in common which see the same kernel and the same files, so that they can pass memory to each other."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/mnt')}"
    except OSError:
        return socket.gethostname()


class Messenger:
    """Serves one region and reaches those of others. Everything runs in the event loop that `start` was called in."""

    def __init__(
        self,
        transports: Sequence[Transport],
        region: Region,
        name: str,
        incarnation: int,
        on_notify: NotifyHandler,
        optional: Collection[str] = (),
    ) -> None:
        """`transports`: best first. `name` is told to peers and handed to their `on_notify`, as theirs is to this one's. Without the
        transports that `optional` names it starts too."""
        names = [transport.name for transport in transports]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"transports must be at least one, each once, not {names}")
        self._transports = tuple(transports)
        self._region = region
        self._identity = Identity(name, incarnation)
        self._on_notify = on_notify
        self._optional = frozenset(optional)
        self._connections: dict[int, asyncio.Task[MeteredConnection]] = {}
        self._closed = False

    async def start(self) -> Endpoint:
        """Listens on every transport. Raises OSError, ValueError or SpringtideError when one cannot; then none does."""
        addresses = {}
        try:
            for transport in self._transports:
                try:
                    addresses[transport.name] = await transport.listen(self._region, self._identity, self._on_notify)
                except (OSError, SpringtideError) as error:
                    if transport.name not in self._optional:
                        raise
                    logger.warning("going on without %s: %s", transport.name, error)
                    await transport.close()
        except BaseException:
            await self.close()
            raise
        self._transports = tuple(transport for transport in self._transports if transport.name in addresses)
        return Endpoint(host_id(), self._identity.incarnation, addresses)

    async def connect(self, endpoint: Endpoint) -> Connection:
        """The open connection to that incarnation, or a new one over the best transport that works. It stays the Messenger's: others may
        share it, and only `close` of the Messenger needs to close it. Raises PeerLost when no transport reaches the peer."""
        if self._closed:
            raise PeerLost("this Messenger is closed")
        connecting = self._connections.get(endpoint.incarnation)
        if connecting is None or (connecting.done() and not _usable(connecting)):
            self.forget_broken()
            connecting = asyncio.create_task(self._connect(endpoint), name=f"connect {endpoint.incarnation}")
            connecting.add_done_callback(_usable)  # retrieves the error, should every caller have gone
            self._connections[endpoint.incarnation] = connecting
        return await asyncio.shield(connecting)

    def forget_broken(self) -> None:
        """Keeps nothing of connections whose peers are gone."""
        self._connections = {peer: task for peer, task in self._connections.items() if not task.done() or _usable(task)}

    def settle(self) -> None:
        """Waits for writers on every transport. To be called after generations were changed; see `Region`."""
        for transport in self._transports:
            transport.settle()

    def traffic(self, incarnation: int) -> Traffic:
        """That with the peer of this incarnation, on all transports that count it."""
        return sum((transport.traffic(incarnation) for transport in self._transports), Traffic())

    async def fence(self, name: str, incarnation: int) -> bool:
        """Cuts off whatever that peer opened to here. True: none of its earlier writes can land any more. False: it may still write
        through shared memory, for its process lives; ask again, or have it killed."""
        peer = Identity(name, incarnation)
        return all([await transport.fence(peer) for transport in self._transports])

    async def close(self) -> None:
        """Ends the connections of both directions; no byte of an earlier batch moves afterwards. Idempotent."""
        self._closed = True
        connecting = list(self._connections.values())
        self._connections.clear()
        await end(*connecting)
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
        return [t for t in self._transports if t.name in endpoint.addresses and (same_host or not t.one_host_only)]


def _usable(connecting: asyncio.Task[MeteredConnection]) -> bool:
    return not connecting.cancelled() and connecting.exception() is None and connecting.result().is_open
