"""What the parts of a store process share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore import metrics
from kvstore.core.eviction import PolicyName
from kvstore.core.pool import Pool
from kvstore.core.results import Stored
from kvstore.server.lateness import Lateness
from kvstore.server.peers import Peers
from kvstore.server.ssd import Ssd, SsdOptions
from kvstore.server.watchers import Watchers
from messenger.registry import TransportOptions
from springtide.credentials import OPEN, Credentials
from springtide.ids import Incarnation, NodeId
from springtide.modelinfo import KVSpec


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
    optional_transports: Sequence[str] = ()
    """Those of them that it goes on without, if this machine turns out not to have them."""
    transport_options: TransportOptions = field(default_factory=TransportOptions)
    credentials: Credentials = OPEN
    """Of the cluster: other stores, Conductors and operators are asked for them, and this store shows them."""
    eviction: PolicyName = "hit-density"
    lease_s: float = 30.0
    batch_timeout_s: float = 15.0
    """For one batch of a transfer; what is slow is moved in smaller ones."""
    layer_group_bytes: int = 4 << 20
    """A unit of a layer stream has at least so many."""
    replication_bytes_per_s: int = 256 << 20
    """What replicas may take of the network."""
    hard_pin_share: float = 0.5
    """Of the slots, how many may be under hard pins."""
    tenant_quotas: Mapping[str, int] = field(default_factory=dict)
    """Slots by tenant (kvstore.core.tenants.Tenants)."""
    ssd: SsdOptions | None = None
    """None: there is no SSD tier."""


class Node:
    """Everything runs in one event loop, so whoever changes the pool changes it at once and calls `changed`."""

    def __init__(self, options: StoreOptions, incarnation: Incarnation, pool: Pool, peers: Peers) -> None:
        self.options = options
        self.incarnation = incarnation
        self.pool = pool
        self.peers = peers
        self.ssd: Ssd | None = None
        """Once it is open, if there is one."""
        self.watchers = Watchers(pool)
        self.lateness = Lateness()
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
            metric.labels(event.tier.value).inc(len(event.keys))
        self.watchers.publish(events)
