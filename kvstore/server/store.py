"""A store: arena, pool, Messenger and gRPC service put together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kvstore import metrics
from kvstore.core.eviction import new_policy
from kvstore.core.pool import Pool
from kvstore.core.results import PoolCounts
from kvstore.core.tenants import EVERY_OTHER
from kvstore.server.service.engine_session import EngineSession, LocalStoreService
from kvstore.server.service.fencing import EngineFencing
from kvstore.server.service.store_service import StoreService
from kvstore.server.shared.arena import MakeTransport, StoreArena
from kvstore.server.shared.bundle import Bundle
from kvstore.server.shared.context import StoreContext, StoreOptions
from kvstore.server.shared.peers import Peers
from kvstore.server.shared.routes import MessengerMover
from kvstore.server.shared.ssd import Ssd, SsdOptions
from kvstore.server.shared.stripe_ssd import OwnSsd, agree
from kvstore.server.transfer.attempt_transfers import AttemptTransfers
from kvstore.server.transfer.demotion import Demotion
from kvstore.server.transfer.ingests import Ingests
from kvstore.server.transfer.promotion import Promotion
from kvstore.server.transfer.replication import Replicator
from kvstore.ssd.disk import Disk
from kvstore.ssd.tier import SsdTier
from messenger.arena_memory import KERNEL_MAKES_HUGE, kernel_makes_huge_pages
from messenger.base import Endpoint, Identity
from springtide.clock import MonotonicClock
from springtide.ids import AttemptId, Incarnation, Slot, new_incarnation
from springtide.protocol.storage import Notice, StoreLoad
from springtide.rpc import channels
from springtide.rpc.store_pb2_grpc import add_LocalStoreServicer_to_server, add_StoreServicer_to_server
from springtide.supervision import end

logger = logging.getLogger(__name__)

TICK_S = 0.1
TICKS_A_SIGN = 5
"""The number of ticks after which the engine is told of the load though it is as before: silence means that the store hangs."""
STOP_GRACE_S = 0.5


class Store:
    """The store of a node. It owns everything that it makes; `close` leaves neither process, socket nor memory behind."""

    def __init__(
        self,
        options: StoreOptions,
        make_transport: MakeTransport | None = None,
        disk: Disk | None = None,
        bundle: Bundle | None = None,
        incarnation: Incarnation | None = None,
    ) -> None:
        """Takes the arena's memory, as StoreArena does. Raises NoMemory when it cannot be had.
        `make_transport` makes what `options.transports` names, and `disk` is the SSD's, where
        it is to be something else than usual. `bundle`: of which this is the first store, by this `incarnation`; it closes it."""
        self.options = options
        self._disk = disk
        self._bundle = bundle
        self.incarnation = incarnation or new_incarnation()
        self._clock = MonotonicClock()
        self._arena = StoreArena(options, self.incarnation, self._on_notify, make_transport)
        self._messenger = self._arena.messenger
        ssd_slots = None if options.ssd is None else self._ssd_slots(options.ssd)
        self.pool = Pool(
            self._arena.memory.region.generations,
            options.spec.layers,
            node_id=options.node_id,
            incarnation=self.incarnation,
            lease_s=options.lease_s,
            policy=new_policy(options.eviction, options.num_slots),
            quotas=options.tenant_quotas,
            hard_pins=int(options.hard_pin_share * options.num_slots),
            settle=self._settle,
            ssd_capacity=ssd_slots,
            ssd_policy=None if ssd_slots is None else new_policy(options.eviction, ssd_slots),
        )
        movers = () if bundle is None else bundle.movers(MessengerMover(self._messenger))
        peers = Peers(self._messenger, options.credentials, self._clock, options.spec, movers)
        self.shared = StoreContext(options, self.incarnation, self.pool, peers, () if bundle is None else bundle.stores)
        self._transfers = AttemptTransfers()
        self._replicator = Replicator(self.shared)
        self._promotion = Promotion(self.shared)
        self._ingests = Ingests(self.shared, self._notify_engine)
        self._fencing = EngineFencing(self.shared, self._is_fenced)
        self._demotion: Demotion | None = None
        self._session: EngineSession | None = None
        self._server = channels.new_server(options.credentials)
        self._local_server = channels.new_server()
        self._tasks: list[asyncio.Task[None]] = []
        self._last_load: StoreLoad | None = None

    @property
    def address(self) -> str:
        """gRPC host:port."""
        return self.shared.address

    async def start(self) -> Endpoint:
        """Serves peers and the engine once it has passed a transfer to itself. Raises OSError, ValueError or SpringtideError."""
        endpoint = await self._arena.start()
        metrics.SLOT_BYTES.labels("dram").set(self._arena.bytes_per_slot)
        await self._self_test(endpoint)
        if self.options.ssd is not None:
            await self._open_ssd(self.options.ssd)
        layers = () if self._bundle is None else self._bundle.layers_at(endpoint)
        service = StoreService(
            self.shared, self._transfers, self._ingests, self._replicator, self._promotion, endpoint, self._clock, layers
        )
        add_StoreServicer_to_server(service, self._server)
        local = LocalStoreService(self.shared, self._transfers, self._ingests, self._fencing, self._set_session)
        add_LocalStoreServicer_to_server(local, self._local_server)
        # Whoever reaches the Unix socket is of this user, and may do there what peers and operators may.
        add_StoreServicer_to_server(service, self._local_server)
        self.shared.address = self._listen()
        await self._server.start()
        await self._local_server.start()
        self._tasks += [
            asyncio.create_task(self._ingests.watch_writers(self._messenger), name="watch writers"),
            asyncio.create_task(self._tick(), name="store tick"),
            asyncio.create_task(self.shared.peers.observe(), name="observe pauses"),
        ]
        logger.info("store serves %d slots of %d bytes at %s", self.options.num_slots, self._arena.bytes_per_slot, self.address)
        if not self.options.hugepages and not kernel_makes_huge_pages():
            logger.info("the arena has small pages, which are slower: set kv.hugepages, or write `advise` into %s", KERNEL_MAKES_HUGE)
        return endpoint

    async def run(self) -> None:
        """Goes on until it is cancelled. What breaks of what a store does all the time (leases and pins that end, writers that are watched)
        is raised: a store without it would leak slots. What is cancelled is the watching of it, which ends at once; the work itself goes on
        until `close`, which waits for a disk that takes its time."""
        await asyncio.gather(*map(asyncio.shield, self._tasks))

    async def close(self) -> None:
        if self._session is not None:
            self._session.close()
        await end(*self._tasks)
        await self._fencing.close()
        await self._transfers.close()
        await self._replicator.close()
        await self._promotion.close()
        await asyncio.gather(self._server.stop(STOP_GRACE_S), self._local_server.stop(STOP_GRACE_S))
        await self.shared.peers.close()
        await self._arena.stop()
        if self._demotion is not None:
            await self._demotion.flush()
        if self.shared.ssd is not None:
            await self.shared.ssd.close()
        if self._bundle is not None:
            await self._bundle.close()
        self._arena.close()
        self.options.store_socket.unlink(missing_ok=True)

    def _listen(self) -> str:
        address = channels.listen(self._server, f"{self.options.bind_host}:0", self.options.credentials)
        self.options.store_socket.unlink(missing_ok=True)  # of a process that was killed
        self._local_server.add_insecure_port(f"unix:{self.options.store_socket}")
        return address

    async def _open_ssd(self, options: SsdOptions) -> None:
        """Raises SsdUnavailable."""
        assert self.pool.ssd is not None, "a store with SSD options has a pool that knows of it"
        region, size = self._arena.memory.region, self._arena.bytes_per_slot
        metrics.SLOT_BYTES.labels("ssd").set(size)
        tier = await SsdTier.open(options.directory, options.capacity_bytes, size, options.fingerprint, self._disk)
        own = OwnSsd(tier, region.memory, size)
        others = () if self._bundle is None else self._bundle.ssds
        assert self._bundle is None or self._bundle.has_ssd, "a bundle has an SSD where each of its stores has one"
        await agree([own, *others])
        self.shared.ssd = Ssd(own, self.pool.ssd, others, region.generations)
        self._demotion = Demotion(self.shared, self.shared.ssd, options)
        self._tasks.append(asyncio.create_task(self._demotion.run(), name="demotion"))

    def _ssd_slots(self, options: SsdOptions) -> int:
        """How many blocks the SSD can hold, that with the least room for its layers if there are several."""
        own = max(1, options.capacity_bytes // self.options.own_spec.bytes_per_slot)
        return own if self._bundle is None else min(own, *(ssd.counts().capacity for ssd in self._bundle.ssds))

    def _settle(self, slots: Sequence[Slot]) -> None:
        """These slots have other generations now."""
        self._messenger.settle()
        if self._bundle is not None and slots:
            self._bundle.set_generations(slots, [self._arena.memory.region.generations[slot] for slot in slots])

    def _on_notify(self, peer: str, payload: bytes) -> None:
        self._ingests.on_notify(peer, payload)

    def _notify_engine(self, notice: Notice) -> None:
        if self._session is not None:
            self._session.notify(notice)

    async def _is_fenced(self, engine: Identity) -> bool:
        return await self._arena.has_let_go(engine) and (self._bundle is None or await self._bundle.have_let_go(engine))

    def _set_session(self, session: EngineSession | None) -> None:
        self._session = session
        self._last_load = None
        self._ingests.engine_changed(session is not None)

    async def _self_test(self, endpoint: Endpoint) -> None:
        """Raises SpringtideError when a transfer to itself does not work."""
        attempt = AttemptId("self-test")
        (slot,) = self.pool.acquire(attempt, [], 1, 0).slots
        try:
            await self._arena.self_test(endpoint, slot)
        finally:
            self.pool.release(attempt)

    async def _tick(self) -> None:
        """Does what is due, for ever: ends leases whose time is over, hangs up peers that are no longer asked, and shows how full the pool
        is."""
        ticks = looked_up = hit = missed = 0
        while True:
            metrics.LEASES_EXPIRED.inc(self.pool.expire_leases(self._clock.now()))
            self.pool.pins.expire(self._clock.now())
            await self.shared.peers.hang_up_idle()
            counts = self.pool.counts()
            self._show(counts)
            self._count_lookups(self.pool.looked_up_blocks - looked_up, self.pool.hit_blocks - hit)
            looked_up, hit = self.pool.looked_up_blocks, self.pool.hit_blocks
            if self.pool.ssd is not None:
                metrics.SSD_MISSED.inc(self.pool.ssd.missed - missed)
                missed = self.pool.ssd.missed
            load = StoreLoad(
                slots_free=counts.free,
                slots_available=counts.available,
                ssd_read_us_per_block=0 if self.shared.ssd is None else self.shared.ssd.read_us_per_block,
            )
            ticks += 1
            if load != self._last_load or ticks % TICKS_A_SIGN == 0:
                self._last_load = load
                self._notify_engine(load)
            await asyncio.sleep(TICK_S)

    def _show(self, counts: PoolCounts) -> None:
        for state in ("free", "cached", "in_use", "quarantined"):
            metrics.SLOTS.labels("dram", state).set(getattr(counts, state))
        metrics.LEASES.set(counts.leases)
        metrics.INGESTS.set(counts.ingests)
        metrics.PINS.set(len(self.pool.pins))
        metrics.PINNED_BLOCKS.labels("hard").set(self.pool.pins.num_hard)
        metrics.PINNED_BLOCKS.labels("soft").set(self.pool.pins.num_soft)
        for name in self.options.tenant_quotas.keys() - {EVERY_OTHER}:
            metrics.TENANT_SLOTS.labels(name).set(self.pool.tenants.slots_of(name))

    def _count_lookups(self, looked_up: int, hit: int) -> None:
        metrics.LOOKUPS.inc(looked_up)
        metrics.HITS.inc(hit)
        metrics.LOOKUP_TOKENS.inc(looked_up * self.options.spec.block_tokens)
        metrics.HIT_TOKENS.inc(hit * self.options.spec.block_tokens)
