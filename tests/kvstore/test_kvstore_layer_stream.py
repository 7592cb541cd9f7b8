"""The layer stream over links that are faster or slower than the model: what waits for what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from kvstore_cluster import Site
from kvstore_support import SPEC

from kvstore.core import turns
from kvstore.server.transfer.hand_over import HandOverWriter
from prefill_node.core.layer_stream import LayerGroups
from prefill_node.server.passes import Pushes
from springtide.ids import AttemptId
from springtide.protocol.outputs import FailureCode
from springtide.rpc import store_pb2 as pb
from tests.support.inproc_transport import InprocHub
from tests.support.transport_faults import FaultPlan, TransferFault
from tests.support.waiting import until

NUM_CHUNKS, CHUNK_BLOCKS = 8, 8
NUM_BLOCKS = NUM_CHUNKS * CHUNK_BLOCKS
COUNTS_WRITES = TransferFault("slow", "write", bytes_per_s=1e12)


class Stream:
    """A prompt on its way from one store to another. `write_chunk` does what a pass over the model does, without computing."""

    def __init__(self, prefill: Site, decode: Site, unit_bytes: int) -> None:
        self.prefill, self.decode = prefill, decode
        self.groups = LayerGroups(SPEC.layers, SPEC.bytes_per_slab, unit_bytes)
        self.num_pushes = 0
        self.want = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, SPEC.layers, SPEC.bytes_per_slab), dtype=np.uint8)

    async def open(self, address: str | None = None) -> None:
        """`address`: another way to the decode side's store than the direct one."""
        prefill, decode = self.prefill.engine, self.decode.engine
        prefill.send(acquire=pb.Acquire(attempt_id="a", num_blocks=NUM_BLOCKS))
        decode.send(reserve=pb.Reserve(attempt_id="a", num_blocks=NUM_BLOCKS))
        self._slots = (await prefill.inbox("a").next("acquired")).slots
        self._targets = (await decode.inbox("a").next("reserved")).slots
        prefill.send(open_hand_over=pb.OpenHandOver(attempt_id="a", address=address or self.decode.store.address))

    def write_chunk(self, chunk: int) -> None:
        """Blocks a thread for as long as the engine's would be."""
        blocks = range(chunk * CHUNK_BLOCKS, (chunk + 1) * CHUNK_BLOCKS)
        units = list(self.groups.units("a", blocks.start, blocks.stop))
        self.num_pushes += len(units)
        pushes = Pushes(units)
        for layer in range(SPEC.layers):
            for block in blocks:
                self.prefill.engine.slot(self._slots[block])[layer] = self.want[block, layer]
            if layer + 1 in pushes.layer_ends:
                pushes.send(self.prefill.engine.link, layer + 1)

    async def chunk_has_arrived(self, chunk: int) -> None:
        blocks = range(chunk * CHUNK_BLOCKS, (chunk + 1) * CHUNK_BLOCKS)
        await until(lambda: np.array_equal(self.received(blocks), self.want[blocks.start : blocks.stop]))

    def received(self, blocks: range) -> np.ndarray:
        return np.stack([self.decode.engine.slot(self._targets[block]) for block in blocks])

    def seal(self) -> None:
        self.prefill.engine.send(seal=pb.Seal(attempt_id="a", first_token=5))
        self.prefill.engine.send(release=pb.Release(attempt_id="a", finish_hand_over=True))

    async def everything_has_arrived(self) -> None:
        assert (await self.decode.engine.inbox("a").next("ingested")).first_token == 5
        assert np.array_equal(self.received(range(NUM_BLOCKS)), self.want)

    @property
    def num_writes(self) -> int:
        """Each is followed by a notice that is written by itself. Without the seal."""
        return (self.prefill.plan.struck["slow"] - 1) // 2


NewSites = Callable[..., Awaitable[tuple[Site, Site]]]


@pytest.fixture
async def new_sites(tmp_path: Path) -> AsyncIterator[NewSites]:
    """A prefill node, whose transfers have the faults that are given, and a decode node."""
    made: list[Site] = []

    async def new_sites(*faults: TransferFault, timeout_s: float = 15.0) -> tuple[Site, Site]:
        hub = InprocHub()
        made.extend(Site(name, tmp_path, ["tcp"], hub, FaultPlan(faults), NUM_BLOCKS + 2, timeout_s) for name in ("prefill", "decode"))
        await asyncio.gather(*(site.start() for site in made))
        return made[0], made[1]

    yield new_sites
    await asyncio.gather(*(site.close() for site in made))


async def test_over_a_fast_link_every_group_of_layers_goes_as_soon_as_it_is_there(new_sites: NewSites) -> None:
    prefill, decode = await new_sites(COUNTS_WRITES)
    stream = Stream(prefill, decode, unit_bytes=CHUNK_BLOCKS * SPEC.bytes_per_slot // 2)
    await stream.open()
    for chunk in range(NUM_CHUNKS):
        await asyncio.to_thread(stream.write_chunk, chunk)
        await stream.chunk_has_arrived(chunk)
    stream.seal()
    await stream.everything_has_arrived()
    assert stream.num_pushes == NUM_CHUNKS * 2
    assert NUM_CHUNKS <= stream.num_writes <= stream.num_pushes


async def test_over_a_slow_link_units_are_joined_and_the_engine_is_through_long_before(new_sites: NewSites) -> None:
    a_second_for_everything = TransferFault("slow", "write", bytes_per_s=NUM_BLOCKS * SPEC.bytes_per_slot)
    prefill, decode = await new_sites(a_second_for_everything)
    stream = Stream(prefill, decode, unit_bytes=1)
    await stream.open()
    for chunk in range(NUM_CHUNKS):
        await asyncio.to_thread(stream.write_chunk, chunk)
        in_flight = hand_over(prefill)
        assert in_flight is None or in_flight.num_waiting <= 3
    stream.seal()
    await until(lambda: (in_flight := hand_over(prefill)) is not None and in_flight.sealed)
    assert prefill.store.shared.bytes_written < NUM_BLOCKS * SPEC.bytes_per_slot / 2
    await stream.everything_has_arrived()
    assert stream.num_pushes == NUM_CHUNKS * SPEC.layers
    assert stream.num_writes <= stream.num_pushes / 2


async def test_who_does_not_answer_lives_as_long_as_its_bytes_come_through(new_sites: NewSites) -> None:
    """On a full network a question may wait for its answer longer than anybody is patient. Both stores ask for the other one."""
    four_seconds_for_everything = TransferFault("slow", "write", bytes_per_s=NUM_BLOCKS * SPEC.bytes_per_slot / 4)
    prefill, decode = await new_sites(four_seconds_for_everything)
    prefill.store.shared.address = prefill.proxy.address
    stream = Stream(prefill, decode, unit_bytes=1)
    await stream.open(decode.proxy.address)
    for chunk in range(NUM_CHUNKS):
        await asyncio.to_thread(stream.write_chunk, chunk)
    stream.seal()
    await until(lambda: prefill.plan.struck["slow"] > 0)
    freezing = [asyncio.create_task(site.proxy.freeze(60.0)) for site in (prefill, decode)]
    await stream.everything_has_arrived()
    for task in freezing:
        task.cancel()
    await until(lambda: hand_over(prefill) is None)


async def test_who_is_cancelled_writes_no_batch_more(new_sites: NewSites, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "FIRST_BATCH_BYTES", turns.MIN_BATCH_BYTES)
    prefill, decode = await new_sites(TransferFault("slow", "write", bytes_per_s=NUM_BLOCKS * SPEC.bytes_per_slot / 4))
    stream = Stream(prefill, decode, unit_bytes=1)
    await stream.open()
    for chunk in range(NUM_CHUNKS):
        await asyncio.to_thread(stream.write_chunk, chunk)
    await until(lambda: prefill.store.shared.bytes_written > 0)
    prefill.engine.send(release=pb.Release(attempt_id="a"))
    await until(lambda: hand_over(prefill) is None)
    assert prefill.store.shared.bytes_written < NUM_BLOCKS * SPEC.bytes_per_slot / 2


async def test_a_link_that_stands_still_fails_the_hand_over_and_not_the_engine(new_sites: NewSites) -> None:
    prefill, decode = await new_sites(TransferFault("hang", "write"), timeout_s=1.0)
    stream = Stream(prefill, decode, unit_bytes=1)
    await stream.open()
    for chunk in range(NUM_CHUNKS):
        await asyncio.to_thread(stream.write_chunk, chunk)
    await until(lambda: prefill.engine.inbox("a").has("hand_over_failed"))
    await until(lambda: decode.engine.inbox("a").has("attempt_failed"))
    decode.engine.send(release=pb.Release(attempt_id="a"))
    prefill.engine.send(release=pb.Release(attempt_id="a"))
    await until(lambda: all(site.store.pool.counts().free == NUM_BLOCKS + 2 for site in (prefill, decode)))


async def test_whoever_waits_for_a_reservation_hears_that_it_will_not_come(new_sites: NewSites) -> None:
    """Because the engine has let go of the attempt, because it has gone, because there is none."""
    prefill, decode = await new_sites()

    def open_hand_over(attempt_id: str) -> None:
        prefill.engine.send(acquire=pb.Acquire(attempt_id=attempt_id, num_blocks=1))
        prefill.engine.send(open_hand_over=pb.OpenHandOver(attempt_id=attempt_id, address=decode.store.address))

    async def why(attempt_id: str) -> FailureCode:
        await until(lambda: prefill.engine.inbox(attempt_id).has("hand_over_failed"))
        code: FailureCode = (await prefill.engine.inbox(attempt_id).next("hand_over_failed")).failure.code
        return code

    open_hand_over("released")
    decode.engine.send(release=pb.Release(attempt_id="released"))
    assert await why("released") == FailureCode.ABORTED
    open_hand_over("lost")
    await decode.engine.close("over")
    open_hand_over("too late")
    assert [await why("lost"), await why("too late")] == [FailureCode.PEER_LOST] * 2


def hand_over(site: Site) -> HandOverWriter | None:
    return site.store._transfers.hand_overs.get(AttemptId("a"))
