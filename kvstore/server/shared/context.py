"""What the parts of a store process share, and the options that it was started with."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvstore import metrics
from kvstore.core.pool import Pool
from kvstore.server.shared.hedging import Hedging
from kvstore.server.shared.peers import Peers
from kvstore.server.shared.ssd import Ssd, SsdOptions
from kvstore.server.shared.watchers import Watchers
from messenger.registry import TransportOptions
from springtide.choices import EvictionName
from springtide.credentials import OPEN, Credentials
from springtide.ids import Incarnation, NodeId
from springtide.modelinfo import KVSpec
from springtide.protocol.storage import BlocksStored, StoreIncarnation


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The options of a node's store."""

    node_id: NodeId
    spec: KVSpec
    num_slots: int
    bind_host: str
    """The host where it serves, and is reached."""
    store_socket: Path
    arena_socket: Path
    hugepages: int = 0
    """The bytes of a page of the arena; 0: of the usual ones."""
    transports: Sequence[str] = ("shm", "tcp")
    """Names, best first."""
    optional_transports: Sequence[str] = ()
    """The transports that it goes on without, if this machine turns out not to have them."""
    transport_options: TransportOptions = field(default_factory=TransportOptions)
    credentials: Credentials = OPEN
    """The cluster's: other stores, Conductors and operators are asked for them, and this store shows them."""
    eviction: EvictionName = "hit-density"
    lease_s: float = 30.0
    batch_timeout_s: float = 15.0
    """A batch of a transfer has failed when nothing has come through for so long."""
    layer_group_bytes: int = 4 << 20
    """The least that a unit of a layer stream has."""
    replication_bytes_per_s: int = 256 << 20
    """What replicas may take of the network."""
    hard_pin_share: float = 0.5
    """The share of the slots that may be under hard pins."""
    tenant_quotas: Mapping[str, int] = field(default_factory=dict)
    """Slots by tenant (kvstore.core.tenants.TenantAccounts)."""
    ssd: SsdOptions | None = None
    """None: there is no SSD tier."""
    layers: range | None = None
    """Whose slabs are in the memory of this store, which is of a bundle; None: those of all."""

    @property
    def own_layers(self) -> range:
        return range(self.spec.layers) if self.layers is None else self.layers

    @property
    def own_spec(self) -> KVSpec:
        """The geometry of what of each slot is in the memory of this store."""
        return replace(self.spec, layers=len(self.own_layers))


class StoreContext:
    """The shared parts. Everything runs in one event loop, so whoever changes the pool changes it at once and calls `changed`."""

    def __init__(
        self, options: StoreOptions, incarnation: Incarnation, pool: Pool, peers: Peers, beside: tuple[StoreIncarnation, ...] = ()
    ) -> None:
        self.options = options
        self.incarnation = incarnation
        self.pool = pool
        self.peers = peers
        self.beside = beside
        """The other stores of the bundle, where this is the first of one."""
        self.ssd: Ssd | None = None
        """None until it is open, and where there is none."""
        self.watchers = Watchers(pool)
        self.hedging = Hedging()
        self.address = ""
        """gRPC host:port; empty until it is served."""
        self.bytes_read = 0
        """The bytes read from peers since the start."""
        self.bytes_written = 0
        """The bytes written to peers since the start."""
        self._publishing: asyncio.Handle | None = None
        self._published = asyncio.Event()
        """Of the next time."""

    def changed(self) -> None:
        """Publishes the pool's events, those of one turn of the loop together."""
        if self._publishing is None:
            self._publishing = asyncio.get_running_loop().call_soon(self.publish)

    async def next_change(self) -> None:
        """Returns when there were events to publish, or might have been."""
        await self._published.wait()

    def publish(self) -> None:
        """Publishes them now."""
        self._publishing = None
        self._published.set()
        self._published = asyncio.Event()
        events = self.pool.take_events()
        for event in events:
            metric = metrics.STORED if isinstance(event, BlocksStored) else metrics.REMOVED
            metric.labels(event.tier.value).inc(len(event.keys))
        self.watchers.publish(events)
