"""Store processes with an arena that is small and an SSD that is not."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvstore_support import SPEC, WAIT_S, Engine, Starter, StoreProcess, contents, keys_of
from prometheus_client import REGISTRY
from ssd_support import flip

from kvstore.server.shared.context import StoreOptions
from kvstore.server.shared.ssd import SsdOptions
from kvstore.server.store import Store
from kvstore.server.transfer import fetch, promotion
from kvstore.server.transfer.demotion import Demotion
from kvstore.ssd.disk import Disk
from springtide.ids import BlockKey, NodeId
from springtide.protocol.outputs import AttemptFailed, FailureCode
from springtide.rpc import common_pb2
from springtide.rpc import store_pb2 as pb
from tests.support.tmpfs import tmpfs
from tests.support.waiting import until

CHAIN = 4
NUM_SLOTS = 32


def chain(number: int) -> list[BlockKey]:
    """The keys of one prompt."""
    return keys_of(number, *range(1, CHAIN))


@pytest.fixture
def ssd(tmp_path: Path) -> dict[str, object]:
    """Settings. Everything is copied that is not in use."""
    return {"ssd_dir": str(tmp_path / "ssd"), "ssd_size": 64 << 20, "demote_below": 1.0, "demote_until": 1.0, "num_slots": NUM_SLOTS}


async def fill(engine: Engine, numbers: Sequence[int]) -> None:
    """Caches these chains, none of them before there is room that costs nothing."""
    for number in numbers:
        await engine.stat_until(lambda stat: stat.slots_free_or_spare > CHAIN)
        await engine.cache(chain(number))


async def copied(engine: Engine, num_blocks: int) -> pb.StatReply:
    """Waits until so many blocks are on the SSD."""
    return await engine.stat_until(lambda stat: stat.ssd.blocks >= num_blocks)


async def fetched(
    engine: Engine, keys: Sequence[BlockKey], sources: Sequence[common_pb2.PrefixSource] = (), recompute_us: int | None = None
) -> tuple[int, int]:
    """Acquires a prompt and waits for its prefix. Returns how many of its blocks were local and how many are valid: they are compared."""
    attempt_id = f"read-{random.random()}"
    command = pb.Acquire(
        attempt_id=attempt_id,
        keys=keys,
        num_blocks=len(keys) + 1,
        max_reused_blocks=len(keys),
        sources=sources,
        recompute_us_per_block=recompute_us,
    )
    engine.send(acquire=command)
    acquired = await engine.notice("acquired", attempt_id)
    valid = acquired.local_blocks + acquired.remote_blocks
    if acquired.remote_blocks:
        truncated = await asyncio.to_thread(engine.link.wait_layer, attempt_id, SPEC.layers - 1, WAIT_S)
        valid = valid if truncated is None else truncated
    for key, slot in zip(keys[:valid], acquired.slots, strict=False):
        assert np.array_equal(engine.slot(slot), contents(key)), "wrong bytes were served"
    engine.release(attempt_id)
    return acquired.local_blocks, valid


async def restart(store: StoreProcess, engine: Engine, number: int = signal.SIGKILL) -> None:
    await engine.close()
    store.kill(number)
    await asyncio.to_thread(store.process.wait, WAIT_S)


async def test_a_working_set_five_times_the_arena_comes_back_byte_for_byte(start: Starter, ssd: dict[str, object]) -> None:
    _, engine = await start("prefill-0", **ssd)
    numbers = range(5 * NUM_SLOTS // CHAIN)
    await fill(engine, numbers)
    stat = await copied(engine, 5 * NUM_SLOTS)
    assert stat.ssd.state == "taking" and stat.ssd.missed == 0
    found = [await fetched(engine, chain(number)) for number in numbers]
    assert [valid for _, valid in found] == [CHAIN] * len(numbers)
    assert sum(local for local, _ in found) < NUM_SLOTS, "most of it was not in the arena"
    verdict = await engine.stub.Verify(pb.VerifyRequest(ssd=True), timeout=WAIT_S)
    assert verdict.problem == "" and verdict.ssd_blocks == 5 * NUM_SLOTS


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
async def test_what_is_on_the_ssd_survives_a_restart(start: Starter, ssd: dict[str, object], number: int) -> None:
    store, engine = await start("prefill-0", **ssd)
    await fill(engine, range(12))
    await copied(engine, 12 * CHAIN)
    await restart(store, engine, number)
    _, engine = await start("prefill-0", **ssd)
    stat = await engine.stat()
    assert stat.ssd.blocks == 12 * CHAIN
    found = [await fetched(engine, chain(number)) for number in range(12)]
    assert [valid for _, valid in found] == [CHAIN] * 12
    assert found[0] == (0, CHAIN)


@pytest.mark.parametrize(("flush_s", "kept"), [(5.0, True), (0.0, False)])
async def test_an_orderly_stop_copies_what_was_only_in_the_arena(
    start: Starter, ssd: dict[str, object], flush_s: float, kept: bool
) -> None:
    lazy = ssd | {"demote_below": 0.0, "demote_until": 0.0, "ssd_flush_s": flush_s}
    store, engine = await start("prefill-0", **lazy)
    for number in range(4):
        await engine.cache(chain(number))
    assert (await engine.stat()).ssd.blocks == 0
    await restart(store, engine, signal.SIGTERM)
    _, engine = await start("prefill-0", **lazy)
    found = [await fetched(engine, chain(number)) for number in range(4)]
    assert found == [(0, CHAIN if kept else 0)] * 4


@pytest.mark.parametrize("seed", range(4))
async def test_a_store_killed_while_it_demotes_serves_only_right_bytes_afterwards(
    start: Starter, ssd: dict[str, object], seed: int
) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    store, engine = await start("prefill-0", **ssd)
    for number in range(rng.randrange(6, 30)):  # without waiting: some are lost, some half written
        await engine.cache(chain(number))
    await restart(store, engine)
    _, engine = await start("prefill-0", **ssd)
    found = [await fetched(engine, chain(number)) for number in range(30)]
    print(f"{sum(valid for _, valid in found)} blocks came back")
    assert (await engine.stub.Verify(pb.VerifyRequest(ssd=True), timeout=WAIT_S)).problem == ""


async def test_flipped_bits_are_never_served_and_what_continues_them_is_computed_anew(start: Starter, ssd: dict[str, object]) -> None:
    store, engine = await start("prefill-0", **ssd)
    await fill(engine, range(10))
    await copied(engine, 10 * CHAIN)
    await restart(store, engine)
    flip(Path(str(ssd["ssd_dir"])), contents(chain(0)[2]))
    _, engine = await start("prefill-0", **ssd)
    before = (await engine.stat()).ssd.blocks
    assert await fetched(engine, chain(0)) == (0, 2)
    stat = await engine.stat()
    assert stat.ssd.dropped["corrupt"] == 1
    assert stat.ssd.blocks == before - 2, "the block, and the one that continued it"
    assert await fetched(engine, chain(0)) == (2, 2)
    await engine.cache(chain(0))
    assert await fetched(engine, chain(0)) == (CHAIN, CHAIN)


async def test_what_the_ssd_fails_to_give_comes_from_a_peer(start: Starter, ssd: dict[str, object]) -> None:
    store, engine = await start("prefill-0", **ssd)
    _, peer = await start("prefill-1", num_slots=NUM_SLOTS)
    await peer.cache(chain(0))
    await fill(engine, range(10))
    await copied(engine, 10 * CHAIN)
    await restart(store, engine)
    flip(Path(str(ssd["ssd_dir"])), contents(chain(0)[1]))
    _, engine = await start("prefill-0", **ssd)
    assert await fetched(engine, chain(0), [peer.as_source(chain(0))]) == (0, CHAIN)


async def test_a_prefix_begins_on_the_ssd_and_goes_on_at_a_peer(start: Starter, ssd: dict[str, object]) -> None:
    store, engine = await start("prefill-0", **ssd)
    _, peer = await start("prefill-1", num_slots=NUM_SLOTS)
    longer = keys_of(0, *range(1, CHAIN), 7, 8, 9)
    await peer.cache(longer)
    await fill(engine, range(10))
    await copied(engine, 10 * CHAIN)
    await restart(store, engine)
    _, engine = await start("prefill-0", **ssd)
    assert await fetched(engine, longer, [peer.as_source(longer)]) == (0, len(longer))
    assert (await peer.stat()).bytes_written == 0 and (await engine.stat()).bytes_read == 3 * SPEC.bytes_per_slot


async def test_a_peer_gets_what_is_on_the_ssd_only(start: Starter, ssd: dict[str, object]) -> None:
    store, engine = await start("prefill-0", **ssd)
    await fill(engine, range(10))
    await copied(engine, 10 * CHAIN)
    await restart(store, engine)
    _, engine = await start("prefill-0", **ssd)
    _, reader = await start("prefill-1", num_slots=NUM_SLOTS)
    source = engine.as_source(chain(0))
    found = await asyncio.gather(*(fetched(reader, chain(0), [source]) for _ in range(3)))
    assert [valid for _, valid in found] == [CHAIN] * 3
    stat = await engine.stat()
    assert stat.slots_cached + stat.slots_in_use == CHAIN, "brought into the arena, once"


async def test_what_is_sooner_computed_is_not_read(start: Starter, ssd: dict[str, object]) -> None:
    store, engine = await start("prefill-0", **ssd)
    await fill(engine, range(10))
    await copied(engine, 10 * CHAIN)
    await restart(store, engine)
    _, engine = await start("prefill-0", **ssd)
    assert await fetched(engine, chain(0), recompute_us=0) == (0, 0)
    assert await fetched(engine, chain(0), recompute_us=10_000_000) == (0, CHAIN)


class SlowDisk(Disk):
    """Takes so long for a read, and as long as it is told to."""

    def __init__(self) -> None:
        self.read_s = 0.0
        self.may_read = threading.Event()
        self.may_read.set()

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        time.sleep(self.read_s)
        self.may_read.wait()
        super().read(fd, buffers, offset)


StartHere = Callable[..., Awaitable[tuple[SlowDisk, Engine]]]


@pytest.fixture
async def start_here(tmp_path: Path) -> AsyncIterator[StartHere]:
    """Starts a store in this process and on a disk of its own, and connects an engine to it. Options are those of the store."""
    disks: list[SlowDisk] = []
    stores: list[Store] = []
    engines: list[Engine] = []

    async def start(node_id: str, demote_below: float = 1.0, demote_until: float = 1.0, **options: Any) -> tuple[SlowDisk, Engine]:
        disks.append(SlowDisk())
        ssd = SsdOptions(tmp_path / f"{node_id}-ssd", 64 << 20, "f", demote_below=demote_below, demote_until=demote_until)
        sockets = tmp_path / f"{node_id}.store.sock", tmp_path / f"{node_id}.arena.sock"
        store_options = StoreOptions(NodeId(node_id), SPEC, NUM_SLOTS, "127.0.0.1", *sockets, transports=("shm",), ssd=ssd, **options)
        stores.append(Store(store_options, disk=disks[-1]))
        await stores[-1].start()
        engines.append(await Engine.connect(store_options))
        return disks[-1], engines[-1]

    yield start
    for disk in disks:
        disk.may_read.set()
    for engine in engines:
        await engine.close()
    for store in stores:
        await store.close()


async def test_a_disk_that_has_become_slow_is_not_read_where_computing_is_sooner(start_here: StartHere) -> None:
    disk, engine = await start_here("prefill-0")
    await fill(engine, range(20))
    await copied(engine, 20 * CHAIN)
    assert await fetched(engine, chain(0), recompute_us=20_000) == (0, CHAIN)
    disk.read_s = 0.5
    assert await fetched(engine, chain(1), recompute_us=20_000) == (0, CHAIN), "nobody knows yet"
    assert await fetched(engine, chain(2), recompute_us=20_000) == (0, 0)
    assert await fetched(engine, chain(2), recompute_us=10_000_000) == (0, CHAIN)


async def with_a_disk_that_stalls(start_here: StartHere) -> tuple[SlowDisk, Engine]:
    """A store that has twenty chains on its disk, of which it reads nothing until `may_read` is set."""
    disk, engine = await start_here("prefill-0")
    await fill(engine, range(20))
    await copied(engine, 20 * CHAIN)
    disk.may_read.clear()
    return disk, engine


async def test_a_disk_that_stalls_in_a_read_fails_the_attempt_soon_and_keeps_its_slots(
    start_here: StartHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "LATE_S", 0.1)
    disk, engine = await with_a_disk_that_stalls(start_here)
    acquired = await engine.acquire(chain(0), CHAIN + 1)
    assert acquired.remote_blocks == CHAIN
    failed = await until(lambda: next((each for each in engine.notices if isinstance(each, AttemptFailed)), None))
    assert (failed.attempt_id, failed.failure.code) == (acquired.attempt_id, FailureCode.PEER_LOST)
    engine.release(acquired.attempt_id)
    await engine.stat_until(lambda stat: stat.slots_quarantined == CHAIN)
    disk.may_read.set()
    await engine.stat_until(lambda stat: stat.slots_quarantined == stat.slots_in_use == 0)
    assert (await fetched(engine, chain(0)))[1] == CHAIN


async def test_a_pause_of_the_store_is_not_laid_to_its_disk(start_here: StartHere) -> None:
    disk, engine = await with_a_disk_that_stalls(start_here)
    acquired = await engine.acquire(chain(0), CHAIN + 1)
    assert acquired.remote_blocks == CHAIN
    asyncio.get_running_loop().call_soon(time.sleep, 1.5 * fetch.LATE_S)  # nothing of this process runs
    await asyncio.sleep(1.5 * fetch.LATE_S + fetch.LOOK_EVERY_S)
    disk.may_read.set()
    assert await asyncio.to_thread(engine.link.wait_layer, acquired.attempt_id, SPEC.layers - 1, WAIT_S) is None
    assert not any(isinstance(each, AttemptFailed) for each in engine.notices)
    engine.release(acquired.attempt_id)


async def test_a_commit_of_what_was_computed_without_late_blocks_is_refused(start_here: StartHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "LATE_S", 0.1)
    disk, engine = await with_a_disk_that_stalls(start_here)
    read_before = REGISTRY.get_sample_value("springtide_store_ssd_promoted_blocks_total")
    assert read_before is not None
    longer = keys_of(0, *range(1, CHAIN), 7)
    acquired = await engine.acquire(longer, CHAIN + 1)
    assert acquired.remote_blocks == CHAIN
    await until(lambda: any(isinstance(each, AttemptFailed) for each in engine.notices))
    engine.notices.clear()
    disk.may_read.set()
    await until(lambda: REGISTRY.get_sample_value("springtide_store_ssd_promoted_blocks_total") == read_before + CHAIN)
    engine.commit(acquired.attempt_id, CHAIN, longer[CHAIN:])
    await until(lambda: any(isinstance(each, AttemptFailed) for each in engine.notices))
    engine.release(acquired.attempt_id)
    assert (await fetched(engine, longer))[1] == CHAIN


async def test_who_stops_a_store_does_not_wait_for_its_disk_before_it_withdraws_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, answer = asyncio.Event(), asyncio.Event()

    async def step(demotion: Demotion, to_the_last: bool = False) -> bool:
        """Ends, cancelled or not, when the disk has answered."""
        began.set()
        try:
            await answer.wait()
        finally:
            await answer.wait()
        return False

    monkeypatch.setattr(Demotion, "_step", step)
    ssd = SsdOptions(tmp_path / "ssd", 64 << 20, "f", demote_below=1.0, demote_until=1.0)
    sockets = tmp_path / "store.sock", tmp_path / "arena.sock"
    store = Store(StoreOptions(NodeId("prefill-0"), SPEC, NUM_SLOTS, "127.0.0.1", *sockets, transports=("shm",), ssd=ssd))
    await store.start()
    running = asyncio.create_task(store.run())
    await began.wait()
    running.cancel()
    assert await asyncio.wait({running}, timeout=WAIT_S) == ({running}, set())
    assert running.cancelled()
    closing = asyncio.create_task(store.close())
    assert not (await asyncio.wait({closing}, timeout=0.1))[0], "it is at rest when it is closed"
    answer.set()
    await closing


async def test_a_peer_does_not_wait_for_a_disk_that_stalls(start_here: StartHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "PATIENCE_S", 0.1)
    disk, engine = await with_a_disk_that_stalls(start_here)
    request = pb.LeaseRequest(reader="peer", keys=chain(0), tenant="")
    assert not (await engine.stub.Lease(request, timeout=WAIT_S)).slots
    disk.may_read.set()
    await engine.stat_until(lambda stat: stat.slots_quarantined == stat.slots_in_use == 0)
    assert len((await engine.stub.Lease(request, timeout=WAIT_S)).slots) == CHAIN


async def test_what_a_quota_pushes_out_is_on_the_ssd(start_here: StartHere) -> None:
    _, engine = await start_here("prefill-0", demote_below=0.5, demote_until=0.5, tenant_quotas={"small": 2 * CHAIN + 1})
    for number in range(6):
        await engine.cache(chain(number), tenant="small")
        await copied(engine, (number + 1) * CHAIN - CHAIN)
    stat = await engine.stat()
    assert stat.slots_free_or_spare > 0.5 * NUM_SLOTS and stat.ssd.missed == 0


async def test_what_is_found_is_counted_by_where_it_was(start_here: StartHere) -> None:
    _, engine = await start_here("prefill-0")
    _, peer = await start_here("prefill-1")
    longer = keys_of(0, *range(1, CHAIN), 7, 8, 9)
    await peer.cache(longer)
    await fill(engine, range(20))
    await copied(engine, 20 * CHAIN)

    def counted() -> list[float]:
        return [
            REGISTRY.get_sample_value("springtide_store_reused_tokens_total", {"source": each}) or 0.0 for each in ("dram", "ssd", "remote")
        ]

    before = counted()
    assert await fetched(engine, longer, [peer.as_source(longer)]) == (0, CHAIN + 3)
    assert await fetched(engine, longer) == (CHAIN + 3, CHAIN + 3)
    blocks = [(now - then) / SPEC.block_tokens for now, then in zip(counted(), before, strict=True)]
    assert blocks == [CHAIN + 3, CHAIN, 3]


async def test_evicted_means_from_the_ssd_too(start: Starter, ssd: dict[str, object]) -> None:
    store, engine = await start("prefill-0", **ssd)
    await fill(engine, range(10))
    before = (await copied(engine, 10 * CHAIN)).ssd.blocks
    reply = await engine.stub.Evict(pb.EvictRequest(keys=[chain(0)[1]]), timeout=WAIT_S)
    assert reply.ssd_blocks == CHAIN - 1
    assert (await engine.stat()).ssd.blocks >= before - (CHAIN - 1)
    await engine.stub.Evict(pb.EvictRequest(all=True), timeout=WAIT_S)
    await restart(store, engine)
    _, engine = await start("prefill-0", **ssd)
    assert (await engine.stat()).ssd.blocks == 0


async def test_events_and_snapshots_say_what_is_in_which_tier(start: Starter, ssd: dict[str, object]) -> None:
    _, engine = await start("prefill-0", **ssd)
    held: dict[int, set[bytes]] = {pb.TIER_DRAM: set(), pb.TIER_SSD: set()}
    stream = engine.stub.Watch(pb.WatchStoreRequest(watcher="test"), timeout=WAIT_S)
    filling = asyncio.create_task(fill(engine, range(16)))
    while len(held[pb.TIER_SSD]) < 16 * CHAIN:
        event = await stream.read()
        if event.HasField("removed"):
            assert held[event.removed.tier].issuperset(event.removed.keys)
            held[event.removed.tier].difference_update(event.removed.keys)
        elif not event.HasField("still_here"):
            added = event.stored if event.HasField("stored") else event.snapshot
            held[added.tier].update(added.keys)
    await filling
    stat = await engine.stat()
    assert stat.ssd.blocks == 16 * CHAIN
    parts = engine.stub.Watch(pb.WatchStoreRequest(watcher="later"), timeout=WAIT_S)
    tiers: dict[int, set[bytes]] = {}
    complete = False
    while not complete:
        part = (await parts.read()).snapshot
        tiers.setdefault(part.tier, set()).update(part.keys)
        complete = part.complete
    assert tiers.keys() == held.keys() and tiers[pb.TIER_SSD] == held[pb.TIER_SSD]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """With room for 1 MiB."""
    with tmpfs(tmp_path / "disk", "1m") as path:
        yield path


async def test_with_a_full_disk_serving_goes_on(start: Starter, ssd: dict[str, object], small_disk: Path) -> None:
    store, engine = await start("prefill-0", **{**ssd, "ssd_dir": str(small_disk)})
    for number in range(20):
        await engine.cache(chain(number))
    assert (await engine.stat_until(lambda stat: stat.ssd.state == "disk_full")).ssd.blocks == 0
    assert await fetched(engine, chain(19)) == (CHAIN, CHAIN)
    assert store.log.read_text().count("grows no more") == 1, "said once"


async def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = StoreProcess(tmp_path, "prefill-0", ssd_dir=str(tmp_path / "file"), ssd_size=64 << 20)
    assert await asyncio.to_thread(store.process.wait, WAIT_S) == 1
    assert "kv.ssd_dir" in store.log.read_text() and "Traceback" not in store.log.read_text()
