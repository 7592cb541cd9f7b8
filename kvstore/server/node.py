"""What the parts of a store process share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore import metrics
from kvstore.core.pool import Pool
from kvstore.core.results import Stored
from kvstore.server.peers import Peers
from kvstore.server.watchers import Watchers
from springtide.ids import Incarnation, NodeId
from springtide.kvspec import KVSpec


@dataclass(frozen=True, slots=True)
class StoreOptions:
    node_id: NodeId
    spec: KVSpec
    num_slots: int
    bind_host: str
    """Serves, and is reached, here."""
    store_socket: Path
    arena_socket: Path
    transports: Sequence[str] = ("shm", "tcp")
    """Best first."""
    lease_s: float = 30.0
    layer_group_bytes: int = 4 << 20
    """A unit of a layer stream has at least so many."""


class Node:
    """Everything runs in one event loop, so whoever changes the pool changes it at once and calls `changed`."""

    def __init__(self, options: StoreOptions, incarnation: Incarnation, pool: Pool, peers: Peers) -> None:
        self.options = options
        self.incarnation = incarnation
        self.pool = pool
        self.peers = peers
        self.watchers = Watchers(pool)
        self.address = ""
        """gRPC host:port, once it is served."""
        self.bytes_read = 0
        """From peers, since the start."""
        self.bytes_written = 0
        """To peers, since the start."""
        self._publishing: asyncio.Handle | None = None

    def changed(self) -> None:
        """Publishes the pool's events, those of one turn of the loop together."""
        if self._publishing is None:
            self._publishing = asyncio.get_running_loop().call_soon(self.publish)

    def publish(self) -> None:
        self._publishing = None
        events = self.pool.take_events()
        for event in events:
            metric = metrics.STORED if isinstance(event, Stored) else metrics.REMOVED
            metric.labels("dram").inc(len(event.keys))
        self.watchers.publish(events)
