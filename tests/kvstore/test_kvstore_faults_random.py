"""Random requests over real stores while transfers, control connections, engines and stores fail at random."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
from kvstore_cluster import EngineSide, Inbox, Shadow, Site, audit, random_labels
from kvstore_support import SPEC, WAIT_S

from springtide.errors import PeerLost
from springtide.ids import AttemptId
from springtide.rpc import channels
from springtide.rpc import store_pb2 as pb
from springtide.rpc.store_pb2_grpc import StoreStub
from tests.support.inproc_transport import InprocHub
from tests.support.tally import Ended, Tally
from tests.support.transport_faults import FaultPlan, TransferFault

REQUESTS, AT_ONCE, NUM_SITES, NUM_SLOTS = 84, 12, 4, 40
TRANSPORTS = (("inproc",), ("tcp",), ("shm",), ("shm", "tcp"))
FAULTS = (
    TransferFault("fail", probability=0.02),
    TransferFault("partial", probability=0.04),
    TransferFault("drop", probability=0.03),
    TransferFault("stale", probability=0.03),
    TransferFault("delay", probability=0.1, delay_s=0.05),
    TransferFault("slow", probability=0.05, bytes_per_s=1 << 20),
    TransferFault("hang", probability=0.01),
    TransferFault("notify_twice", probability=0.1),
    TransferFault("notify_late", probability=0.05, delay_s=0.2),
    TransferFault("notify_lost", probability=0.02),
    TransferFault("refuse", probability=0.05),
)


class World:
    def __init__(self, seed: int, directory: Path, tally: Tally) -> None:
        self.rng = random.Random(seed)
        self.tally = tally
        self.shadow = Shadow()
        hub, transports = InprocHub(), TRANSPORTS[seed % len(TRANSPORTS)]
        self.sites = [Site(f"node-{i}", directory, transports, hub, FaultPlan(FAULTS, seed + i), NUM_SLOTS) for i in range(NUM_SITES)]
        self.numbers = itertools.count(1)

    async def dawdle(self) -> None:
        """Lets others go first, for a moment that differs each time."""
        await asyncio.sleep(self.rng.choice((0.0, 0.0, 0.001, 0.01)))

    async def spoil(self, over: asyncio.Event) -> None:
        """Takes away an engine, a store or control connections, again and again."""
        while not over.is_set():
            await asyncio.sleep(self.rng.uniform(0.05, 0.3))
            for site in self.sites:
                site.store.pool.validate()
            site = self.rng.choice(self.sites)
            kind = self.rng.choice(("cut control", "cut control", "freeze control", "engine lost", "engine replaced", "store lost"))
            self.tally.injected[kind] += 1
            match kind:
                case "cut control":
                    site.proxy.cut()
                case "freeze control":
                    await site.proxy.freeze(self.rng.uniform(0.1, 2.5))
                case "engine lost" | "engine replaced":
                    await site.lose_engine(replaced=kind == "engine replaced")
                case _:
                    await site.lose_store()


@pytest.fixture
async def world(fault_seed: int, tmp_path: Path, tally: Tally) -> AsyncIterator[World]:
    print(f"seed {fault_seed}")
    made = World(fault_seed, tmp_path, tally)
    await asyncio.gather(*(site.start() for site in made.sites))
    yield made
    await asyncio.gather(*(site.close() for site in made.sites))


class Request:
    """One prompt through a prefill site and a decode site. Either side may give up at any moment; then the other is told, sooner or later,
    as the gateway would."""

    def __init__(self, world: World) -> None:
        self.world, self.rng, self.tally = world, world.rng, world.tally
        self.attempt_id = f"attempt-{next(world.numbers)}"
        self.labels = random_labels(self.rng)
        self.keys = world.shadow.chain(self.labels)
        self.num_blocks = len(self.keys) + 1
        self.prefill_site, self.decode_site = self.rng.choice(world.sites), self.rng.choice(world.sites)
        self.sources = [site.as_source(self.keys) for site in self.rng.sample(world.sites, 2)]
        self.aborted = asyncio.Event()

    def wanted(self, block: int) -> np.ndarray:
        """uint8 [layers, bytes_per_slab]; the last block is partial: no key, this attempt's own bytes."""
        return self.world.shadow.of(self.keys[block] if block < len(self.keys) else self.attempt_id.encode())

    async def run(self) -> None:
        if self.prefill_site is self.decode_site:
            await self.prefill()
            return
        await asyncio.gather(self.prefill(), self.decode())

    # ---- prefill side ----

    async def prefill(self) -> None:
        engine = self.prefill_site.engine
        inbox = engine.inbox(self.attempt_id)
        try:
            with self.tally.operation("prefill"):
                acquired = await self._acquire(engine, inbox)
                hands_over = self.prefill_site is not self.decode_site and self.rng.random() < 0.95
                if hands_over:
                    address = self.decode_site.proxy.address
                    engine.send(open_hand_over=pb.OpenHandOver(attempt_id=self.attempt_id, address=address))
                await self._compute(engine, inbox, acquired)
                if not hands_over:
                    raise Ended("given up")
                await self._finish(engine, inbox)
        except Ended:
            await self.world.dawdle()
            self.aborted.set()
        finally:
            if engine.gone is None:
                engine.send(release=pb.Release(attempt_id=self.attempt_id))

    async def _acquire(self, engine: EngineSide, inbox: Inbox) -> pb.Acquired:
        command = pb.Acquire(
            attempt_id=self.attempt_id,
            keys=self.keys,
            num_blocks=self.num_blocks,
            max_reused_blocks=len(self.keys),
            sources=self.sources,
        )
        engine.send(acquire=command)
        acquired = await inbox.next("acquired")
        self._compare(engine, acquired.slots[: acquired.local_blocks])
        return acquired

    async def _compute(self, engine: EngineSide, inbox: Inbox, acquired: pb.Acquired) -> None:
        reused = acquired.local_blocks + acquired.remote_blocks
        layer = 0
        while layer < SPEC.layers:
            if acquired.remote_blocks:
                valid = await self._wait_layer(engine, layer)
                if valid is not None and valid < reused:
                    self.tally.failed["fetch truncated"] += 1
                    self.tally.tried["fetch"] += 1
                    reused, layer = valid, 0
            self._give_up_at_times(inbox)
            for block in range(reused):
                self._compare_layer(engine, acquired.slots[block], block, layer)
            for block in range(reused, self.num_blocks):
                engine.slot(acquired.slots[block])[layer] = self.wanted(block)[layer]
            unit = pb.Push(attempt_id=self.attempt_id, layer_begin=layer, layer_end=layer + 1, block_end=self.num_blocks)
            engine.send(push=unit)
            layer += 1
            await self.world.dawdle()
        self._compare(engine, acquired.slots)
        engine.send(commit=pb.Commit(attempt_id=self.attempt_id, first_block=reused, keys=self.keys[reused:]))
        await self.world.dawdle()
        self._compare(engine, acquired.slots)

    async def _wait_layer(self, engine: EngineSide, layer: int) -> int | None:
        try:
            return await asyncio.to_thread(engine.link.wait_layer, AttemptId(self.attempt_id), layer, WAIT_S)
        except PeerLost as error:
            raise engine.gone or Ended("store lost") from error

    async def _finish(self, engine: EngineSide, inbox: Inbox) -> None:
        engine.send(seal=pb.Seal(attempt_id=self.attempt_id, first_token=len(self.keys)))
        engine.send(release=pb.Release(attempt_id=self.attempt_id, finish_hand_over=True))
        with self.tally.operation("hand over"):
            await inbox.next("handed_over")

    # ---- decode side ----

    async def decode(self) -> None:
        await self.world.dawdle()
        engine = self.decode_site.engine
        inbox = engine.inbox(self.attempt_id)
        try:
            with self.tally.operation("decode"):
                engine.send(reserve=pb.Reserve(attempt_id=self.attempt_id, keys=self.keys, num_blocks=self.num_blocks))
                slots = list((await inbox.next("reserved")).slots)
                ingested = await self._ingested(inbox)
                assert ingested.first_token == len(self.keys)
                self._compare(engine, slots)
                await self.world.dawdle()
                self._commit_output(engine, slots)
                await self.world.dawdle()
                self._compare(engine, slots)
        except Ended:
            if self.rng.random() < 0.5:
                self.aborted.set()
        finally:
            if engine.gone is None:
                engine.send(release=pb.Release(attempt_id=self.attempt_id))

    async def _ingested(self, inbox: Inbox) -> pb.Ingested:
        """Raises Ended when the gateway aborts; sometimes this side does so by itself, soon."""
        patience_s = self.rng.choice((None, None, None, 0.0, 0.05))
        arriving, aborted = asyncio.ensure_future(inbox.next("ingested")), asyncio.ensure_future(self.aborted.wait())
        try:
            await asyncio.wait((arriving, aborted), timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if arriving.done():
                return arriving.result()
            raise Ended("aborted")
        finally:
            for future in (arriving, aborted):
                future.cancel()
            await asyncio.gather(arriving, aborted, return_exceptions=True)

    def _commit_output(self, engine: EngineSide, slots: list[int]) -> None:
        """The partial block becomes a full one: what was generated is this attempt's own."""
        label = int(self.attempt_id.rpartition("-")[2]) + 1000
        key = self.world.shadow.output(self.keys, [*self.labels, label], self.wanted(len(self.keys)))
        self._compare(engine, slots)
        engine.send(commit=pb.Commit(attempt_id=self.attempt_id, first_block=len(self.keys), keys=[key]))

    # ---- both ----

    def _give_up_at_times(self, inbox: Inbox) -> None:
        inbox.check()
        if self.aborted.is_set() or self.rng.random() < 0.02:
            raise Ended("aborted")

    def _compare(self, engine: EngineSide, slots: list[int]) -> None:
        for block, slot in enumerate(slots[: self.num_blocks]):
            self.tally.wrong_bytes += int((engine.slot(slot) != self.wanted(block)).sum())

    def _compare_layer(self, engine: EngineSide, slot: int, block: int, layer: int) -> None:
        self.tally.wrong_bytes += int((engine.slot(slot)[layer] != self.wanted(block)[layer]).sum())


async def ask_at_times(world: World) -> None:
    """Leases that nobody gives back, and orders to replicate."""
    site, keys, chance = world.rng.choice(world.sites), world.rng.choice(world.shadow.chains), world.rng.random()
    channel = channels.connect(site.store.address)
    stub = StoreStub(channel)
    with contextlib.suppress(Ended):
        if chance < 0.1:
            with world.tally.operation("lease"):
                await answer(stub.Lease(pb.LeaseRequest(reader="careless", keys=keys), timeout=WAIT_S))
        elif chance < 0.4:
            with world.tally.operation("replicate"):
                sources = [each.as_source(keys) for each in world.rng.sample(world.sites, 2)]
                await answer(stub.Replicate(pb.ReplicateRequest(keys=keys, sources=sources), timeout=WAIT_S))
    await channel.close(None)


async def answer(call: Awaitable[object]) -> None:
    """Raises Ended with the status, when it is one that the store means: also that a deadline of its own was missed."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        own = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and error.details() == "Deadline Exceeded"
        if own or error.code() in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL):
            raise
        raise Ended(error.code().name.lower()) from error


async def test_nothing_is_corrupted_lost_or_left_hanging(world: World, tally: Tally) -> None:
    async def client() -> None:
        for _ in range(REQUESTS // AT_ONCE):
            await Request(world).run()
            await ask_at_times(world)

    over = asyncio.Event()
    spoiling = asyncio.create_task(world.spoil(over))
    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    over.set()
    await spoiling
    for site in world.sites:
        tally.injected.update(site.plan.struck)
        site.plan.armed = False
    await asyncio.gather(*(audit(site, world.shadow, tally) for site in world.sites))
    tally.check()
