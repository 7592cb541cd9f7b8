"""Store processes with real sockets and shared memory, and engines' links to them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml
from kvstore_support import MODEL, SPEC, WAIT_S, Engine, Starter, contents, keys_of

from kvstore.link import FetchBoard
from kvstore.server.transfer.ingests import SILENCE_UNTIL_LOST_S
from messenger.base import Endpoint, TransferTimeout
from springtide.errors import PeerLost
from springtide.ids import AttemptId
from springtide.membership import Membership
from springtide.protocol import storage
from springtide.protocol.outputs import FailureCode
from springtide.rpc import store_pb2 as pb
from tests.support.valkey import new_valkey
from tests.support.waiting import until


def all_layers(attempt_id: str, blocks: range) -> pb.Push:
    return pb.Push(attempt_id=attempt_id, layer_end=SPEC.layers, block_begin=blocks.start, block_end=blocks.stop)


TRANSPORTS = pytest.mark.parametrize("transports", [("shm",), ("tcp",), pytest.param(("rdma",), marks=pytest.mark.rdma)], ids="-".join)


async def test_blocks_of_one_attempt_are_found_by_the_next(start: Starter) -> None:
    _, engine = await start("prefill-0")
    keys = keys_of(1, 2, 3)
    await engine.cache(keys)
    again = await engine.acquire(keys, 4)
    assert again.local_blocks == 3
    for key, slot in zip(keys, again.slots, strict=False):
        assert np.array_equal(engine.slot(slot), contents(key))
    stat = await engine.stat()
    assert (stat.slots_total, stat.slots_in_use, stat.hits_blocks, stat.lookups_blocks) == (32, 4, 3, 6)
    load = await until(lambda: next((n for n in engine.notices if isinstance(n, storage.StoreLoad) and n.slots_available == 28), None))
    assert load.slots_free == 28


async def test_a_full_pool_is_said_at_once_and_what_is_cached_makes_room(start: Starter) -> None:
    _, engine = await start("prefill-0", num_slots=4)
    await engine.cache(keys_of(1, 2, 3))
    held = await engine.acquire(keys_of(7), 3)
    engine.send(acquire=pb.Acquire(attempt_id="too much", num_blocks=2))
    failed = await engine.notice("attempt_failed", "too much")
    assert failed.failure.code == FailureCode.POOL_FULL
    engine.send(grow=pb.Grow(attempt_id=held.attempt_id, num_blocks=1))
    assert len((await engine.notice("grown", held.attempt_id)).slots) == 1
    engine.send(grow=pb.Grow(attempt_id=held.attempt_id, num_blocks=1))
    failed = await engine.notice("attempt_failed", held.attempt_id)
    assert failed.failure.code == FailureCode.POOL_FULL
    engine.commit(held.attempt_id, 0, keys_of(7))
    await engine.stat_until(lambda stat: stat.slots_in_use == 4)


@pytest.mark.parametrize(
    ("transports", "reserve_first"), [(("shm", "tcp"), True), (("tcp",), False), pytest.param(("rdma",), True, marks=pytest.mark.rdma)]
)
async def test_a_prompt_is_handed_over_layer_by_layer(start: Starter, transports: tuple[str, ...], reserve_first: bool) -> None:
    (_, prefill), (_, decode) = await asyncio.gather(start("prefill-0", transports=transports), start("decode-0", transports=transports))
    keys = keys_of(1, 2, 3)
    await asyncio.gather(prefill.cache(keys[:1]), decode.cache(keys[:1]))
    acquired = await prefill.acquire(keys, 4, attempt_id="a")
    if reserve_first:
        reserved = await decode.reserve(keys, 4, "a")
    prefill.send(open_hand_over=pb.OpenHandOver(attempt_id="a", address=decode.link.address, node_id="decode-0"))
    want = np.stack([contents(key) for key in [*keys, b"partial"]])
    for layer in range(SPEC.layers):
        for i in range(1, 4):
            prefill.slot(acquired.slots[i])[layer] = want[i, layer]
        prefill.send(push=pb.Push(attempt_id="a", layer_begin=layer, layer_end=layer + 1, block_begin=1, block_end=4))
    if not reserve_first:
        reserved = await decode.reserve(keys, 4, "a")
    prefill.commit("a", 1, keys[1:])
    prefill.send(seal=pb.Seal(attempt_id="a", first_token=42))
    prefill.release("a", finish_hand_over=True)
    ingested, handed_over = await asyncio.gather(decode.notice("ingested", "a"), prefill.notice("handed_over", "a"))
    assert ingested.first_token == 42
    assert reserved.present_blocks == 1
    assert handed_over.num_bytes == 3 * SPEC.bytes_per_slot, "what was there was not sent again"
    assert np.array_equal(np.stack([decode.slot(slot) for slot in reserved.slots]), want)
    decode.release("a")
    await asyncio.gather(
        *(engine.stat_until(lambda stat: stat.slots_cached == 3 and stat.slots_free == 29) for engine in (prefill, decode))
    )


@TRANSPORTS
async def test_a_prefix_is_fetched_from_the_store_that_holds_it(start: Starter, transports: tuple[str, ...]) -> None:
    options = {"transports": transports, "layer_group_size": SPEC.bytes_per_slab}
    (_, source), (_, reader) = await asyncio.gather(start("prefill-0", **options), start("prefill-1", **options))
    keys = keys_of(*range(6))
    await asyncio.gather(source.cache(keys), reader.cache(keys[:2]))
    acquired = await reader.acquire(keys, 8, source=source)
    assert (acquired.local_blocks, acquired.remote_blocks) == (2, 4)
    for layer in range(SPEC.layers):
        short = await asyncio.to_thread(reader.link.wait_layer, AttemptId(acquired.attempt_id), layer, WAIT_S)
        assert short is None
        for i in range(6):
            assert np.array_equal(reader.slot(acquired.slots[i])[layer], contents(keys[i])[layer])
    reader.release(acquired.attempt_id)
    assert (await reader.acquire(keys, 7)).local_blocks == 6
    await source.stat_until(lambda stat: stat.slots_cached == 6)  # the lease has ended


async def test_attempts_that_want_the_same_remote_blocks_share_one_copy_afterwards(start: Starter) -> None:
    (_, source), (_, reader) = await asyncio.gather(start("prefill-0"), start("prefill-1"))
    keys = keys_of(*range(4))
    await source.cache(keys)
    acquired = await asyncio.gather(*(reader.acquire(keys, 5, source=source) for _ in range(3)))
    for each in acquired:
        await asyncio.to_thread(reader.link.wait_layer, AttemptId(each.attempt_id), SPEC.layers - 1, WAIT_S)
        assert all(np.array_equal(reader.slot(slot), contents(key)) for key, slot in zip(keys, each.slots, strict=False))
        reader.release(each.attempt_id)
    await reader.stat_until(lambda stat: stat.slots_cached == 4 and stat.slots_free == 28)


async def test_a_source_that_is_away_costs_only_its_part_of_the_prefix(start: Starter) -> None:
    (lost, source), (_, reader) = await asyncio.gather(start("prefill-0"), start("prefill-1"))
    keys = keys_of(1, 2, 3)
    await asyncio.gather(source.cache(keys), reader.cache(keys[:1]))
    lost.kill()
    await until(lambda: source.lost)
    acquired = await reader.acquire(keys, 4, source=source)
    assert (acquired.local_blocks, acquired.remote_blocks) == (1, 0)


async def test_a_source_killed_in_the_middle_truncates_to_what_is_valid(start: Starter) -> None:
    """It dies as soon as the fetch is announced: most of the time in the middle, else just after it."""
    options = {"transports": ("tcp",), "num_slots": 2100, "layer_group_size": 1}
    (lost, source), (_, reader) = await asyncio.gather(start("prefill-0", **options), start("prefill-1", **options))
    keys = keys_of(*range(2000))
    await asyncio.gather(source.cache(keys), reader.cache(keys[:1]))
    acquired = await reader.acquire(keys, 2001, source=source)
    lost.kill()
    valid = await asyncio.to_thread(reader.link.wait_layer, AttemptId(acquired.attempt_id), SPEC.layers - 1, WAIT_S)
    assert valid in (1, None), "only what was local is valid"
    if valid is not None:
        assert (await reader.notice("fetch_truncated", acquired.attempt_id)).valid_blocks == 1
        reader.commit(acquired.attempt_id, 1, keys[1:3])  # recomputed
        await reader.stat_until(lambda stat: stat.slots_in_use == 2001)
        reader.release(acquired.attempt_id)
        await reader.stat_until(lambda stat: stat.slots_cached == 3 and stat.slots_free == 2097)


async def begin_hand_over(prefill: Engine, decode: Engine, attempt_id: str) -> pb.Reserved:
    """Open, with one of two blocks written."""
    acquired = await prefill.acquire([], 2, attempt_id=attempt_id)
    reserved = await decode.reserve([], 2, attempt_id)
    prefill.slot(acquired.slots[0])[:] = 7
    # It may be the slot of a hand-over before this one.
    decode.slot(reserved.slots[0])[:] = 0
    prefill.send(open_hand_over=pb.OpenHandOver(attempt_id=attempt_id, address=decode.link.address, node_id="decode-0"))
    prefill.send(push=all_layers(attempt_id, range(1)))
    await until(lambda: (decode.slot(reserved.slots[0]) == 7).all())
    return reserved


@TRANSPORTS
async def test_a_writer_killed_in_the_middle_fails_the_attempt_and_leaks_nothing(start: Starter, transports: tuple[str, ...]) -> None:
    (lost, prefill), (_, decode) = await asyncio.gather(start("prefill-0", transports=transports), start("decode-0", transports=transports))
    await begin_hand_over(prefill, decode, "waiting")
    await begin_hand_over(prefill, decode, "released")
    lost.kill()
    decode.release("released")
    failed = await decode.notice("attempt_failed", "waiting")
    assert failed.failure.code == FailureCode.PEER_LOST
    decode.release("waiting")
    await decode.stat_until(lambda stat: stat.slots_free == 32)
    await until(lambda: prefill.lost)
    with pytest.raises(PeerLost):
        prefill.link.wait_layer(AttemptId("any"), 0, 0.0)


async def test_slots_stay_quarantined_while_a_writer_is_silent_but_not_dead(start: Starter) -> None:
    (writer, prefill), (_, decode) = await asyncio.gather(start("prefill-0", transports=("shm",)), start("decode-0", transports=("shm",)))
    await begin_hand_over(prefill, decode, "a")
    writer.kill(signal.SIGSTOP)
    try:
        failed = await decode.notice("attempt_failed", "a")
        assert failed.failure.code == FailureCode.PEER_LOST
        decode.release("a")
        stat = await decode.stat_until(lambda stat: stat.slots_quarantined > 0)
        assert (stat.slots_quarantined, stat.slots_free) == (2, 30)
    finally:
        writer.kill(signal.SIGCONT)
    await decode.stat_until(lambda stat: stat.slots_free == 32)
    assert (await prefill.notice("hand_over_failed", "a")).failure.code == FailureCode.ABORTED


@TRANSPORTS
async def test_nobody_is_taken_for_hung_when_the_machine_stood_still(start: Starter, transports: tuple[str, ...]) -> None:
    """A machine that is suspended, or has no time for anybody: what was under way goes on where it was."""
    (first, prefill), (second, decode) = await asyncio.gather(*(start(name, transports=transports) for name in ("prefill-0", "decode-0")))
    await begin_hand_over(prefill, decode, "begun")
    await prefill.acquire([], 2, attempt_id="asking")
    prefill.send(open_hand_over=pb.OpenHandOver(attempt_id="asking", address=decode.link.address, node_id="decode-0"))
    for _ in range(3):
        await asyncio.sleep(0.3)
        for store in (first, second):
            store.kill(signal.SIGSTOP)
        await asyncio.sleep(2.5)
        for store in (first, second):
            store.kill(signal.SIGCONT)
    await decode.reserve([], 2, "asking")
    prefill.send(push=all_layers("asking", range(1)))
    for attempt_id in ("begun", "asking"):
        prefill.send(push=all_layers(attempt_id, range(1, 2)))
        prefill.send(seal=pb.Seal(attempt_id=attempt_id, first_token=42))
        handed_over, ingested = await asyncio.gather(prefill.notice("handed_over", attempt_id), decode.notice("ingested", attempt_id))
        assert (handed_over.num_bytes, ingested.first_token) == (2 * SPEC.bytes_per_slot, 42)


@TRANSPORTS
async def test_a_receiver_killed_in_the_middle_fails_the_hand_over_only(start: Starter, transports: tuple[str, ...]) -> None:
    (_, prefill), (lost, decode) = await asyncio.gather(start("prefill-0", transports=transports), start("decode-0", transports=transports))
    await begin_hand_over(prefill, decode, "a")
    lost.kill()
    prefill.send(push=all_layers("a", range(1, 2)))
    prefill.send(seal=pb.Seal(attempt_id="a", first_token=1))
    assert (await prefill.notice("hand_over_failed", "a")).failure.code == FailureCode.PEER_LOST
    prefill.release("a")
    await prefill.stat_until(lambda stat: stat.slots_free == 32)


async def test_an_abort_on_either_side_ends_the_other(start: Starter) -> None:
    (_, prefill), (_, decode) = await asyncio.gather(start("prefill-0"), start("decode-0"))
    await begin_hand_over(prefill, decode, "by decode")
    decode.release("by decode")
    assert (await prefill.notice("hand_over_failed", "by decode")).failure.code == FailureCode.ABORTED
    await begin_hand_over(prefill, decode, "by prefill")
    prefill.release("by prefill")
    assert (await decode.notice("attempt_failed", "by prefill")).failure.code == FailureCode.ABORTED
    prefill.release("by decode")
    decode.release("by prefill")
    await asyncio.gather(*(engine.stat_until(lambda stat: stat.slots_free == 32) for engine in (prefill, decode)))


@TRANSPORTS
async def test_a_writer_is_not_asked_why_it_was_silent_while_it_wrote_nothing(start: Starter, transports: tuple[str, ...]) -> None:
    (_, prefill), (_, decode) = await asyncio.gather(start("prefill-0", transports=transports), start("decode-0", transports=transports))
    for attempt_id in ("first", "later"):
        await begin_hand_over(prefill, decode, attempt_id)
        decode.release(attempt_id)
        failed = await prefill.notice("hand_over_failed", attempt_id)
        assert failed.failure.code == FailureCode.ABORTED
        prefill.release(attempt_id)
        await decode.stat_until(lambda stat: stat.slots_free == 32)
        await asyncio.sleep(1.5 * SILENCE_UNTIL_LOST_S)
    await begin_hand_over(prefill, decode, "last")
    prefill.send(push=all_layers("last", range(1, 2)))
    prefill.send(seal=pb.Seal(attempt_id="last", first_token=42))
    handed_over, ingested = await asyncio.gather(prefill.notice("handed_over", "last"), decode.notice("ingested", "last"))
    assert (handed_over.num_bytes, ingested.first_token) == (2 * SPEC.bytes_per_slot, 42)


async def test_an_engine_that_dies_loses_its_attempts_but_not_the_cache(start: Starter) -> None:
    store, engine = await start("prefill-0")
    await engine.cache(keys_of(1, 2))
    await engine.acquire(keys_of(1, 2, 3), 6)
    script = (
        "import asyncio, sys, pathlib\n"
        "from kvstore.link import StoreLink\n"
        "from springtide.protocol import storage\n"
        "async def main():\n"
        "    link = await StoreLink.connect(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]),\n"
        "        storage.EngineHello('second', 1), lambda n: print(type(n).__name__, flush=True), print)\n"
        "    link.send(storage.Acquire('x', (), 9, 0))\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", script, str(store.store_socket), str(store.arena_socket)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as second:  # noqa: ASYNC220
        assert second.stdout is not None
        while await asyncio.to_thread(second.stdout.readline) not in ("Acquired\n", ""):
            pass
        await until(lambda: engine.lost)  # replaced: its attempts are over, but a pass of its may still be writing
        stat = await engine.stat()
        assert (stat.slots_quarantined, stat.slots_in_use, stat.slots_cached) == (4, 9 + 2, 0)
        await engine.link.close()
        await engine.stat_until(lambda stat: (stat.slots_quarantined, stat.slots_in_use, stat.slots_cached) == (0, 9, 2))
        os.kill(second.pid, signal.SIGKILL)
    await engine.stat_until(lambda stat: stat.slots_in_use == 0 and stat.slots_cached == 2)


@pytest.mark.parametrize("transports", [["shm", "tcp"], ["tcp"]], ids=["shm", "tcp"])
async def test_what_an_engine_without_a_stream_still_writes_lands_in_nobodys_blocks(start: Starter, transports: list[str]) -> None:
    store, old = await start("prefill-0", num_slots=12, transports=transports)
    written = (await old.acquire([], 8)).slots
    new = await Engine.connect(store)
    await until(lambda: old.lost)
    keys = keys_of(1, 2, 3)
    await new.cache(keys)
    with pytest.raises(AssertionError, match="POOL_FULL"):
        await new.acquire([], 8)
    for slot in written:
        old.slot(slot)[:] = 255  # a pass that was under way
    found = await new.acquire(keys, 4)
    assert found.local_blocks == 3
    assert all(np.array_equal(new.slot(slot), contents(key)) for slot, key in zip(found.slots, keys, strict=False))
    new.release(found.attempt_id)
    await old.link.close()
    await new.stat_until(lambda stat: stat.slots_free == 9 and stat.slots_cached == 3)
    await new.close()


async def test_a_watcher_knows_exactly_what_is_held_while_it_changes(start: Starter) -> None:
    _, engine = await start("prefill-0", num_slots=12)
    await engine.cache(keys_of(0, 1, 2))

    async def watch() -> tuple[set[bytes], int]:
        """Until the block that marks the end."""
        held: set[bytes] = set()
        sequence: int | None = None
        async for event in engine.stub.Watch(pb.WatchStoreRequest(watcher="test")):
            if event.HasField("snapshot"):
                held.update(event.snapshot.keys)
                sequence = event.snapshot.sequence if event.snapshot.complete else None
                continue
            if event.HasField("still_here"):
                assert event.still_here.sequence == sequence
                continue
            change = event.stored if event.HasField("stored") else event.removed
            assert sequence is not None and change.sequence == sequence + 1
            sequence = change.sequence
            if event.HasField("stored"):
                assert held.isdisjoint(event.stored.keys)
                held.update(event.stored.keys)
            else:
                assert held.issuperset(event.removed.keys)
                held.difference_update(event.removed.keys)
            if keys_of(99)[0] in held:
                break
        assert sequence is not None
        return held, sequence

    async def churn() -> None:
        for i in range(60):
            await engine.cache(keys_of(i % 7, i, i + 1))
        await engine.cache(keys_of(99))

    watching = [asyncio.create_task(watch()) for _ in range(2)]
    churning = asyncio.create_task(churn())
    await engine.stat_until(lambda stat: stat.lookups_blocks > 50)
    watching += [asyncio.create_task(watch()) for _ in range(2)]
    views = await asyncio.wait_for(asyncio.gather(*watching), WAIT_S)
    await churning
    assert all(view == views[0] for view in views)
    stat = await engine.stat()
    assert len(views[0][0]) == stat.slots_cached


async def test_a_store_that_has_nothing_to_say_says_that_it_is_there(start: Starter) -> None:
    _, engine = await start("prefill-0")
    watching = engine.stub.Watch(pb.WatchStoreRequest(watcher="test"))
    async with asyncio.timeout(WAIT_S):
        while not (await watching.read()).HasField("still_here"):
            pass
        heard = engine.link.heard
        await until(lambda: engine.link.heard is not heard)
    watching.cancel()


async def test_leases_are_renewed_and_lost_ones_are_told(start: Starter) -> None:
    _, engine = await start("prefill-0", lease_s=0.3)
    keys = keys_of(1, 2)
    await engine.cache(keys)
    lease = await engine.stub.Lease(pb.LeaseRequest(reader="test", keys=keys))
    assert len(lease.slots) == len(lease.generations) == 2
    assert not (await engine.stub.RenewLease(pb.RenewLeaseRequest(lease_ids=[lease.lease_id]))).lost
    await engine.stat_until(lambda stat: stat.slots_in_use == 0)  # expired
    assert list((await engine.stub.RenewLease(pb.RenewLeaseRequest(lease_ids=[lease.lease_id]))).lost) == [lease.lease_id]


def test_a_layer_that_does_not_come_is_an_error_in_time() -> None:
    board = FetchBoard()
    board.update(storage.Acquired(AttemptId("a"), (), 0, 1))
    board.update(storage.FetchProgress(AttemptId("a"), 1))
    assert board.wait_layer(AttemptId("a"), 0, 0.0) is None
    with pytest.raises(TransferTimeout, match="layer 1 of the prefix of a did not arrive"):
        board.wait_layer(AttemptId("a"), 1, 0.01)


async def test_a_store_announces_how_it_is_reached_and_withdraws(start: Starter) -> None:
    with new_valkey() as valkey:
        url = f"redis://127.0.0.1:{valkey.port}"
        membership = Membership(url, "springtide", 5.0)
        try:
            store, engine = await start("prefill-0", redis_url=url)
            (member,) = await until(membership.members) or ()
            assert (member.role, member.node_id, member.address) == ("store", "prefill-0", engine.link.address)
            assert member.incarnation == engine.link.incarnation
            assert set(Endpoint.from_json(member.details["endpoint"]).addresses) == {"shm", "tcp"}
            async with httpx.AsyncClient() as client:
                text = (await client.get(f"http://{member.metrics_address}/metrics")).text
            assert 'springtide_store_slots{state="free",tier="dram"} 32.0' in text
            store.kill(signal.SIGTERM)
            await asyncio.to_thread(store.process.wait, WAIT_S)
            assert await membership.members() == []
        finally:
            await membership.close()


def run_store(tmp_path: Path, arena_size: str, open_to_strangers: bool = True) -> str:
    settings = {"arena_size": arena_size, "block_tokens": 8, "open_to_strangers": open_to_strangers}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"kv": settings}))
    MODEL.save(tmp_path / "m.json")
    arguments = ["--config", tmp_path / "c.yaml", "--model-info", tmp_path / "m.json", "--run-dir", tmp_path, "--node-id", "n"]
    result = subprocess.run([sys.executable, "-m", "kvstore", *map(str, arguments)], capture_output=True, text=True, timeout=WAIT_S)
    assert result.returncode == 1
    return result.stderr


@pytest.mark.parametrize(
    ("size", "message"),
    [("20KiB", "kv.arena_size: 20480 bytes has room for 1 blocks"), ("900TiB", "is more than this machine's memory")],
)
def test_an_arena_that_cannot_be_is_refused_by_name(tmp_path: Path, size: str, message: str) -> None:
    assert message in run_store(tmp_path, size)


def test_a_store_does_without_a_secret_only_where_that_was_decided(tmp_path: Path) -> None:
    assert "cluster_secret: there is none" in run_store(tmp_path, "10MiB", open_to_strangers=False)
