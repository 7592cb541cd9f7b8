"""A bundle of stores, each a process, one of which stands still and closes nothing: who deals with it learns of that in time, and gets what
it wanted from others, or from the bundle that comes next."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
from bundle_support import NUM_SLOTS, SPLITS, BundleEngine
from kvstore_support import SPEC, WAIT_S, Engine, Starter, StoreProcess, contents, keys_of

from kvstore.server.shared.bundle import ANSWER_GRACE_S, SILENCE_S
from springtide.ids import AttemptId
from springtide.process import stage_id
from springtide.protocol.outputs import AttemptFailed, FailureCode
from springtide.rpc import store_pb2 as pb
from tests.support.valkey import new_valkey
from tests.support.waiting import until

BOUND_S = SILENCE_S + ANSWER_GRACE_S
"""What docs/reliability.md says."""
KEYS = keys_of(1, 2, 3)
TCP = {"transports": ("tcp",), "num_slots": NUM_SLOTS}


@pytest.fixture(scope="module")
def valkey_url() -> Iterator[str]:
    with new_valkey() as valkey:
        yield valkey.connection_url


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


class Bundle(BundleEngine):
    """Two processes. The first store's has the engine."""

    def __init__(self, directory: Path, name: str, valkey_url: str) -> None:
        super().__init__(SPLITS[2])
        self.first, self.second = (
            StoreProcess(directory, stage_id(name, stage), redis_url=valkey_url, split=SPLITS[2], stage=stage, **TCP)  # type: ignore[arg-type]
            for stage in range(2)
        )

    async def both_end(self) -> None:
        """Once the second goes on."""
        self.second.kill(signal.SIGCONT)
        for store in (self.first, self.second):
            await asyncio.to_thread(store.process.wait, WAIT_S)

    def kill(self) -> None:
        for store in (self.first, self.second):
            store.kill()
            store.process.wait()


NewBundle = Callable[[str], Awaitable[Bundle]]


@pytest.fixture
def new_bundle(stack: AsyncExitStack, tmp_path: Path, valkey_url: str) -> NewBundle:
    """Its stores have come together, and its engine is there, when it returns."""

    async def new_bundle(name: str) -> Bundle:
        bundle = Bundle(tmp_path, name, valkey_url)
        stack.callback(bundle.kill)
        await bundle.take_up(stack, await bundle.first.engine(), [bundle.second.arena_socket])
        return bundle

    return new_bundle


def now() -> float:
    return asyncio.get_running_loop().time()


class HandOver:
    """Of a prompt of which the last block is not full."""

    def __init__(self, prefill: Bundle, decode: Engine, attempt_id: str) -> None:
        self._prefill, self._decode, self._attempt_id = prefill, decode, attempt_id
        self._want = [contents(key) for key in [*KEYS, b"partial"]]

    async def begin(self) -> None:
        acquired = await self._prefill.engine.acquire(KEYS, len(self._want), attempt_id=self._attempt_id)
        self._targets = (await self._decode.reserve(KEYS, len(self._want), self._attempt_id)).slots
        opening = pb.OpenHandOver(attempt_id=self._attempt_id, address=self._decode.link.address, node_id="decode-0")
        self._prefill.engine.send(open_hand_over=opening)
        for slot, what in zip(acquired.slots, self._want, strict=True):
            self._prefill.write(slot, what)
        self.push(0, 1)
        await until(lambda: all((slot[0] == what[0]).all() for slot, what in self._arrived()))

    def push(self, begin: int, end: int) -> None:
        unit = pb.Push(attempt_id=self._attempt_id, layer_begin=begin, layer_end=end, block_end=len(self._want))
        self._prefill.engine.send(push=unit)

    def end(self) -> None:
        self.push(1, SPEC.layers)
        self._prefill.engine.send(seal=pb.Seal(attempt_id=self._attempt_id, first_token=7))

    async def check(self) -> None:
        assert (await self._decode.notice("ingested", self._attempt_id)).first_token == 7
        assert all(np.array_equal(slot, what) for slot, what in self._arrived())

    def _arrived(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return zip((self._decode.slot(slot) for slot in self._targets), self._want, strict=True)


async def test_a_hand_over_from_it_fails_in_time_lands_nothing_late_and_is_done_by_the_next_one(
    new_bundle: NewBundle, start: Starter
) -> None:
    prefill, (_, decode) = await new_bundle("prefill-0"), await start("decode-0", **TCP)
    failing = HandOver(prefill, decode, "a")
    await failing.begin()
    await prefill.second.stop()
    began = now()
    failing.end()
    (failed,) = await until(lambda: [notice for notice in decode.notices if isinstance(notice, AttemptFailed)])
    await until(lambda: prefill.engine.lost)
    took_s = now() - began
    print(f"hand-over: given up after {took_s:.2f} s")
    assert failed.failure.code is FailureCode.PEER_LOST
    assert took_s <= BOUND_S

    decode.release("a")
    await decode.stat_until(lambda stat: stat.slots_free == NUM_SLOTS)
    others = await decode.acquire([], NUM_SLOTS)
    for slot in others.slots:
        decode.slot(slot)[:] = 3
    await prefill.both_end()
    assert all((decode.slot(slot) == 3).all() for slot in others.slots)
    decode.release(others.attempt_id)

    again = HandOver(await new_bundle("prefill-0"), decode, "b")
    await again.begin()
    again.end()
    await again.check()


@pytest.mark.parametrize("has_another", [True, False], ids=["another source", "no other source"])
async def test_a_prefix_that_is_read_from_it_comes_from_elsewhere_or_is_cut_short_in_time(
    new_bundle: NewBundle, start: Starter, has_another: bool
) -> None:
    source, (_, reader) = await new_bundle("prefill-0"), await start("prefill-1", **TCP)
    await source.cache(KEYS)
    await source.engine.stat_until(lambda stat: stat.slots_cached == len(KEYS))
    sources = [source.engine]
    if has_another:
        _, other = await start("prefill-2", **TCP)
        await other.cache(KEYS)
        sources.append(other)
    await source.second.stop()
    began = now()
    acquired = await reader.acquire(KEYS, len(KEYS) + 1, sources=sources)
    valid = await there(reader, acquired)
    took_s = now() - began
    print(f"prefix: {valid} of {len(KEYS)} blocks after {took_s:.2f} s")
    assert took_s <= BOUND_S
    assert valid == (len(KEYS) if has_another else 0)
    for key, slot in zip(KEYS[:valid], acquired.slots, strict=False):
        assert np.array_equal(reader.slot(slot), contents(key))
    reader.release(acquired.attempt_id)
    await reader.stat_until(lambda stat: stat.slots_free + stat.slots_cached == NUM_SLOTS)


async def there(engine: Engine, acquired: pb.Acquired) -> int:
    """How many blocks of a prefix have come, once no more will."""
    if not acquired.remote_blocks:
        return acquired.local_blocks
    truncated = await asyncio.to_thread(engine.link.wait_layer, AttemptId(acquired.attempt_id), SPEC.layers - 1, WAIT_S)
    return acquired.local_blocks + acquired.remote_blocks if truncated is None else truncated


async def test_its_engine_learns_in_time_that_a_prefix_will_not_come_and_reads_it_by_the_next_one(
    new_bundle: NewBundle, start: Starter
) -> None:
    prefill, (_, holder) = await new_bundle("prefill-0"), await start("decode-0", **TCP)
    await holder.cache(KEYS)
    await prefill.second.stop()
    began = now()
    asked = pb.Acquire(attempt_id="a", keys=KEYS, num_blocks=len(KEYS) + 1, max_reused_blocks=len(KEYS))
    asked.sources.append(holder.as_source(KEYS))
    prefill.engine.send(acquire=asked)
    await until(lambda: prefill.engine.lost)
    took_s = now() - began
    print(f"fetch: given up after {took_s:.2f} s")
    assert took_s <= BOUND_S
    await prefill.both_end()

    prefill = await new_bundle("prefill-0")
    acquired = await prefill.engine.acquire(KEYS, len(KEYS) + 1, source=holder)
    assert await there(prefill.engine, acquired) == len(KEYS)
    for key, slot in zip(KEYS, acquired.slots, strict=False):
        assert np.array_equal(prefill.read(slot), contents(key))
    prefill.engine.release(acquired.attempt_id)
    await holder.stat_until(lambda stat: stat.slots_cached == len(KEYS) and not stat.leases)
