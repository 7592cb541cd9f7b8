"""A prefix read from several stores, of which some fail, hang, are slow or hold too little. Real stores and sockets in one process."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from kvstore_cluster import ControlProxy
from kvstore_support import SPEC, WAIT_S, contents, keys_of

from kvstore.server.shared.context import StoreOptions
from kvstore.server.shared.hedging import Hedging
from kvstore.server.store import Store
from kvstore.server.transfer.prefix_read import PrefixRead
from messenger.arena_memory import SharedMemory
from messenger.base import Completion, Connection, Endpoint, Identity, NotifyHandler, Region, Slice, Transport
from messenger.tcp.transport import TcpTransport
from springtide.errors import PeerLost
from springtide.ids import AttemptId, BlockKey, NodeId, new_id
from springtide.protocol.scheduling import PrefixSource
from tests.support.faulty_transport import FaultyConnection
from tests.support.transport_faults import FaultPlan, TransferFault
from tests.support.waiting import until

NUM_SLOTS = 700
NUM_BLOCKS = 600
KEYS = keys_of(*range(NUM_BLOCKS))


class ReadersAsserted(Connection):
    """Fails when two reads that are in flight at the same time share a byte of own memory."""

    def __init__(self, inner: Connection, in_flight: set[tuple[int, int]]) -> None:
        self._inner = inner
        self._in_flight = in_flight
        self.num_bytes = 0

    @property
    def is_open(self) -> bool:
        return self._inner.is_open

    async def read(self, batch: Sequence[Slice], timeout_s: float) -> Completion:
        ranges = {(piece.local_offset, piece.length) for piece in batch}
        assert self._in_flight.isdisjoint(ranges), "two readers write one slot"
        self._in_flight |= ranges
        try:
            completion = await self._inner.read(batch, timeout_s)
        finally:
            self._in_flight -= ranges
        self.num_bytes += completion.num_bytes
        return completion

    async def write(self, batch: Sequence[Slice], timeout_s: float, notify: bytes | None = None) -> Completion:
        return await self._inner.write(batch, timeout_s, notify)

    async def close(self) -> None:
        await self._inner.close()


class PeerByPeer(Transport):
    """Each peer has faults of its own, by its address."""

    name = "tcp"

    def __init__(self, plans: dict[str, FaultPlan]) -> None:
        self._inner = TcpTransport("127.0.0.1")
        self._plans = plans
        self._in_flight: set[tuple[int, int]] = set()
        self.connections: dict[str, ReadersAsserted] = {}

    async def listen(self, region: Region, identity: Identity, on_notify: NotifyHandler) -> str:
        return await self._inner.listen(region, identity, on_notify)

    async def connect(self, endpoint: Endpoint, region: Region, identity: Identity) -> Connection:
        address = endpoint.addresses[self.name]
        connection = await self._inner.connect(endpoint, region, identity)
        faulty = FaultyConnection(connection, self._plans.get(address, FaultPlan()), address)
        self.connections[address] = ReadersAsserted(faulty, self._in_flight)
        return self.connections[address]

    async def fence(self, peer: Identity) -> bool:
        return await self._inner.fence(peer)

    async def close(self) -> None:
        await self._inner.close()


@dataclass
class Holder:
    store: Store
    endpoint: Endpoint

    @property
    def source(self) -> PrefixSource:
        return PrefixSource(store_address=self.store.address, node_id=self.store.options.node_id, num_blocks=NUM_BLOCKS)


class World:
    """One reading store and some that hold prefixes."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._stores: list[Store] = []
        self._plans: dict[str, FaultPlan] = {}
        self.transport = PeerByPeer(self._plans)
        self.reader: Store

    async def start(self) -> None:
        self.reader = Store(self._options("reader"), lambda name, arena: self.transport)
        self._stores.append(self.reader)
        await self.reader.start()
        for _ in range(32):  # what is late is known
            self.reader.shared.hedging.observe(1 << 20, 0.001)

    async def holder(self, num_blocks: int = NUM_BLOCKS, *faults: TransferFault, tenant: str = "") -> Holder:
        """A store that holds the prompt's first blocks; `faults` befall the reader's reads from it."""
        store = Store(self._options(f"holder-{len(self._stores)}"))
        self._stores.append(store)
        endpoint = await store.start()
        fill(store, KEYS[:num_blocks], tenant)
        self._plans[endpoint.addresses["tcp"]] = FaultPlan(faults)
        return Holder(store, endpoint)

    def bytes_from(self, holder: Holder) -> int:
        connection = self.transport.connections.get(holder.endpoint.addresses["tcp"])
        return connection.num_bytes if connection is not None else 0

    async def fetch(self, *sources: PrefixSource, local: int = 0, tenant: str | None = "") -> tuple[int, int, list[int]]:
        """As a fetch does it: how many blocks could be had, how many are valid, and which layers were told. What is valid is right."""
        pool, attempt = self.reader.pool, AttemptId(new_id("attempt"))
        slots = pool.acquire(attempt, KEYS, NUM_BLOCKS, local).slots
        read = PrefixRead(self.reader.shared, KEYS, sources, tenant)
        told: list[int] = []
        valid = local
        try:
            available = await read.open(local)
            if available > local:
                own = pool.begin_fetch(attempt, range(local, available))
                valid = await read.run(local, own, told.append)
                for block in range(local, valid):
                    assert np.array_equal(slot_of(self.reader, slots[block]), contents(KEYS[block])), f"block {block}"
                pool.end_fetch(attempt, valid)
        finally:
            await read.close()
            pool.end_fetch(attempt, 0)
            pool.release(attempt)
        pool.validate()
        assert pool.evict(None).kept == 0
        return available, valid, told

    async def at_rest(self) -> None:
        """Nothing is leased and no slot in use anywhere."""
        for store in self._stores:
            await until(lambda store=store: store.pool.counts().leases == 0 and store.pool.counts().in_use == 0)
            store.pool.validate()

    async def close(self) -> None:
        for store in self._stores:
            await store.close()

    def _options(self, node_id: str) -> StoreOptions:
        return StoreOptions(
            node_id=NodeId(node_id),
            spec=SPEC,
            num_slots=NUM_SLOTS,
            bind_host="127.0.0.1",
            store_socket=self._run_dir / f"{node_id}.store.sock",
            arena_socket=self._run_dir / f"{node_id}.arena.sock",
            transports=("tcp",),
            layer_group_bytes=1,
        )


def slot_of(store: Store, slot: int) -> np.ndarray:
    """uint8 [layers, bytes_per_slab]"""
    arena: SharedMemory = store._arena.memory
    return arena.region.memory[slot * SPEC.bytes_per_slot : (slot + 1) * SPEC.bytes_per_slot].reshape(SPEC.layers, -1)


def fill(store: Store, keys: Sequence[BlockKey], tenant: str) -> None:
    attempt = AttemptId("fill")
    slots = store.pool.acquire(attempt, keys, len(keys), 0, tenant).slots
    for slot, key in zip(slots, keys, strict=True):
        slot_of(store, slot)[:] = contents(key)
    store.pool.commit(attempt, 0, keys)
    store.pool.release(attempt)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    await world.start()
    yield world
    await world.at_rest()
    await world.close()


LAYERS_TOLD = list(range(1, SPEC.layers + 1))


class NeverLate(Hedging):
    def delay_s(self, num_bytes: int) -> float:
        return WAIT_S


async def test_one_source_that_works_gives_everything_layer_by_layer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.reader.shared.hedging = NeverLate()  # a busy machine's pauses are not the source's
    monkeypatch.setattr("kvstore.server.transfer.prefix_read.OPEN_PATIENCE_S", WAIT_S)
    only, unused = await world.holder(), await world.holder()
    assert await world.fetch(only.source, unused.source) == (NUM_BLOCKS, NUM_BLOCKS, LAYERS_TOLD)
    assert world.bytes_from(unused) == 0


@pytest.mark.parametrize("kind", ["fail", "drop", "stale"])
async def test_when_a_source_fails_the_next_goes_on_where_it_broke(world: World, kind: str) -> None:
    first = await world.holder(NUM_BLOCKS, TransferFault(kind, "read", after=2))  # type: ignore[arg-type]
    second = await world.holder()
    assert await world.fetch(first.source, second.source) == (NUM_BLOCKS, NUM_BLOCKS, LAYERS_TOLD)
    moved = world.bytes_from(first) + world.bytes_from(second)
    assert moved <= (NUM_BLOCKS + 1) * SPEC.bytes_per_slot, "what had arrived is not read again"


async def test_a_second_source_with_less_saves_as_much_as_it_has(world: World) -> None:
    first, second = await world.holder(NUM_BLOCKS, TransferFault("drop", "read", after=2)), await world.holder(100)
    available, valid, told = await world.fetch(first.source, second.source)
    assert (available, valid) == (NUM_BLOCKS, 100)
    assert told in ([], [1], [1, 2]), "a layer is told when all of its blocks are here"


async def test_what_no_source_can_give_truncates(world: World) -> None:
    sources = [(await world.holder(NUM_BLOCKS, TransferFault("fail", "read", after=after))).source for after in (1, 0)]
    available, valid, _ = await world.fetch(*sources)
    assert available == NUM_BLOCKS and valid < NUM_BLOCKS


async def test_a_slow_source_is_helped_and_the_slow_read_taken_over(world: World) -> None:
    slow, quick = await world.holder(NUM_BLOCKS, TransferFault("slow", "read", bytes_per_s=1e6)), await world.holder()
    assert await world.fetch(slow.source, quick.source) == (NUM_BLOCKS, NUM_BLOCKS, LAYERS_TOLD)
    assert world.bytes_from(quick) > world.bytes_from(slow)


async def test_a_source_that_hangs_is_left_once_its_reads_are_at_rest(world: World) -> None:
    hung = await world.holder(NUM_BLOCKS, TransferFault("hang", "read", after=1))
    # So slow that not all has come from it before the other one hangs.
    other = await world.holder(NUM_BLOCKS, TransferFault("delay", "read", delay_s=0.05))
    assert await world.fetch(hung.source, other.source) == (NUM_BLOCKS, NUM_BLOCKS, LAYERS_TOLD)
    assert not world.transport.connections[hung.endpoint.addresses["tcp"]].is_open, "a cancelled read that does not end closes it"


async def test_a_source_that_hangs_altogether_is_given_up_though_there_is_no_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.server.shared.peers.LATE_S", 0.1)
    hung = await world.holder(NUM_BLOCKS, TransferFault("hang", "read", after=1))
    control = ControlProxy(hung.store.address)
    await control.start()
    source = PrefixSource(store_address=control.address, node_id="hung", num_blocks=NUM_BLOCKS)
    fetching = asyncio.create_task(world.fetch(source))
    await until(lambda: world.bytes_from(hung))
    began = asyncio.get_running_loop().time()
    freezing = asyncio.create_task(control.freeze(WAIT_S))
    available, valid, _ = await fetching
    assert available == NUM_BLOCKS and valid < NUM_BLOCKS
    assert asyncio.get_running_loop().time() - began < world.reader.options.batch_timeout_s / 2, "its read was waited for"
    freezing.cancel()
    await control.close()
    hung.store.pool.expire_leases(float("inf"))  # that could not be given back


async def test_a_source_that_is_only_slow_is_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.server.shared.peers.LATE_S", 0.01)
    slow = await world.holder(NUM_BLOCKS, TransferFault("slow", "read", bytes_per_s=1e6))
    assert (await world.fetch(slow.source))[1] == NUM_BLOCKS


async def test_a_store_that_does_not_answer_is_not_waited_for_alone(world: World) -> None:
    quick = await world.holder()
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        source = PrefixSource(store_address=f"127.0.0.1:{deaf.getsockname()[1]}", node_id="deaf", num_blocks=NUM_BLOCKS)
        async with asyncio.timeout(WAIT_S):
            assert await world.fetch(source, quick.source) == (NUM_BLOCKS, NUM_BLOCKS, LAYERS_TOLD)


async def test_a_source_that_has_no_more_than_is_here_is_passed_over(world: World) -> None:
    fill(world.reader, KEYS[:50], "")
    short, longer = await world.holder(50), await world.holder(80)
    assert await world.fetch(short.source, longer.source, local=50) == (80, 80, LAYERS_TOLD)


async def test_a_source_that_holds_it_for_another_tenant_is_left_out(world: World) -> None:
    theirs = await world.holder(tenant="them")
    assert await world.fetch(theirs.source, tenant="us") == (0, 0, [])
    assert (await world.fetch(theirs.source, tenant=None))[1] == NUM_BLOCKS


async def test_without_any_source_there_is_a_reason(world: World) -> None:
    away = PrefixSource(store_address="127.0.0.1:1", node_id="away", num_blocks=5)
    read = PrefixRead(world.reader.shared, KEYS, [away])
    assert await read.open(0) == 0
    assert isinstance(read.failure, PeerLost)
    await read.close()


async def test_a_read_that_nobody_wants_any_more_ends_soon_and_at_rest(world: World) -> None:
    slow = await world.holder(NUM_BLOCKS, TransferFault("slow", "read", bytes_per_s=2e6))
    pool, attempt = world.reader.pool, AttemptId("a")
    pool.acquire(attempt, KEYS, NUM_BLOCKS, 0)
    read = PrefixRead(world.reader.shared, KEYS, [slow.source], "")
    assert await read.open(0) == NUM_BLOCKS
    slots = pool.begin_fetch(attempt, range(NUM_BLOCKS))
    running = asyncio.create_task(read.run(0, slots, lambda layers: None))
    await until(lambda: world.transport.connections)
    read.cancel()
    async with asyncio.timeout(WAIT_S):
        await running
    await read.close()
    pool.end_fetch(attempt, 0)
    pool.release(attempt)


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_befalls_the_sources_no_byte_is_wrong_and_nothing_leaks(world: World, seed: int) -> None:
    chance = random.Random(seed)
    print(f"seed {seed}")
    holders = []
    for _ in range(3):
        kind = chance.choice(["fail", "drop", "stale", "partial", "slow", "delay", "hang", None])
        fault = TransferFault(
            kind or "fail",
            "read",
            probability=chance.choice([0.1, 0.5, 1.0]) if kind else 0.0,
            after=chance.randrange(4),
            delay_s=0.05 if kind == "delay" else 0.0,
            bytes_per_s=3e6 if kind == "slow" else 0.0,
        )
        holders.append(await world.holder(chance.choice([20, 300, NUM_BLOCKS]), fault))
    print([(plan._faults, holder.store.pool.num_blocks) for holder, plan in zip(holders, world._plans.values(), strict=True)])
    for _ in range(2):
        available, valid, told = await world.fetch(*(holder.source for holder in holders), local=0)
        assert 0 <= valid <= available
        assert told == LAYERS_TOLD[: len(told)]
        assert (valid == available) == (len(told) == SPEC.layers)
