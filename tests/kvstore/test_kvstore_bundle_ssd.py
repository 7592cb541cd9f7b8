"""The SSDs of a bundle: a block is on all of them, in pieces, or on none."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from bundle_support import SPLITS, Bundled, bundled
from kvstore_support import SPEC, WAIT_S, contents, keys_of
from ssd_support import BLOCK_BYTES, FINGERPRINT, chain, flip, key, open_tier

from kvstore.core.pool import Pool
from kvstore.server.shared.ssd import Ssd
from kvstore.server.shared.stripe_ssd import OwnSsd, agree, counts_of_all
from kvstore.ssd.disk import aligned_memory
from kvstore.ssd.format import Layout
from kvstore.ssd.health import TierState
from kvstore.ssd.tier import TierCounts
from springtide.ids import AttemptId, BlockKey, Slot
from springtide.rpc import store_pb2 as pb

CHAIN, NUM_CHAINS = 4, 8
"""Twice what the arenas have room for."""


def prompt(number: int) -> list[BlockKey]:
    return keys_of(number, *range(1, CHAIN))


@asynccontextmanager
async def life(directory: Path, stages: int) -> AsyncIterator[Bundled]:
    async with AsyncExitStack() as stack:
        yield await bundled(stack, directory, "prefill-0", stages, ssd=True)


async def fill(prefill: Bundled) -> None:
    """Caches all the prompts, none before there is room that costs nothing; all are on the SSDs when this returns."""
    for number in range(NUM_CHAINS):
        await prefill.engine.stat_until(lambda stat: stat.slots_free_or_spare > CHAIN)
        await prefill.cache(prompt(number))
    await prefill.engine.stat_until(lambda stat: stat.ssd.blocks == NUM_CHAINS * CHAIN)


async def fetched(prefill: Bundled, keys: Sequence[BlockKey]) -> tuple[int, int]:
    """How many blocks of a prompt were in the arenas, and how many are right after those on the SSDs have come: they are compared."""
    acquired = await prefill.engine.acquire(keys, len(keys) + 1)
    valid = acquired.local_blocks + acquired.remote_blocks
    if acquired.remote_blocks:
        truncated = await asyncio.to_thread(prefill.engine.link.wait_layer, acquired.attempt_id, SPEC.layers - 1, WAIT_S)
        valid = valid if truncated is None else truncated
    for block, slot in zip(keys[:valid], acquired.slots, strict=False):
        assert np.array_equal(prefill.read(slot), contents(block)), "wrong bytes were served"
    prefill.engine.release(acquired.attempt_id)
    return acquired.local_blocks, valid


@pytest.mark.parametrize("stages", [2, 3])
async def test_what_the_arenas_had_no_room_for_comes_back_from_the_ssds_also_after_a_restart(tmp_path: Path, stages: int) -> None:
    async with life(tmp_path, stages) as prefill:
        await fill(prefill)
        found = [await fetched(prefill, prompt(number)) for number in range(NUM_CHAINS)]
        assert [valid for _, valid in found] == [CHAIN] * NUM_CHAINS
        assert sum(local for local, _ in found) < NUM_CHAINS * CHAIN
        verdict = await prefill.engine.stub.Verify(pb.VerifyRequest(ssd=True), timeout=WAIT_S)
        assert (verdict.problem, verdict.ssd_blocks) == ("", NUM_CHAINS * CHAIN)
    async with life(tmp_path, stages) as prefill:
        assert [await fetched(prefill, prompt(number)) for number in range(NUM_CHAINS)] == [(0, CHAIN)] * NUM_CHAINS


@pytest.mark.parametrize("damaged", [0, 2])
async def test_flipped_bits_on_one_ssd_are_never_served_and_the_block_is_gone_from_all(tmp_path: Path, damaged: int) -> None:
    async with life(tmp_path, 3) as prefill:
        await fill(prefill)
    layers = SPLITS[3][damaged]
    flip(tmp_path / "ssd" / prefill.options[damaged].node_id, contents(prompt(0)[2])[layers.start : layers.stop])
    async with life(tmp_path, 3) as prefill:
        assert await fetched(prefill, prompt(0)) == (0, 2)
        stat = await prefill.engine.stat()
        assert (stat.ssd.dropped["corrupt"], stat.ssd.blocks) == (1, NUM_CHAINS * CHAIN - 2), "with the one that continued it"
        assert await held_by_each(prefill) == [NUM_CHAINS * CHAIN - 2] * 3
        await prefill.cache(prompt(0))
        await prefill.engine.stat_until(lambda stat: stat.ssd.blocks == NUM_CHAINS * CHAIN)
        assert await held_by_each(prefill) == [NUM_CHAINS * CHAIN] * 3


async def test_with_the_files_of_one_ssd_all_its_blocks_are_lost(tmp_path: Path) -> None:
    async with life(tmp_path, 2) as prefill:
        await fill(prefill)
    shutil.rmtree(tmp_path / "ssd" / "prefill-0.stage-1")
    async with life(tmp_path, 2) as prefill:
        assert await fetched(prefill, prompt(0)) == (0, 0)
        assert await held_by_each(prefill) == [0, 0]
        await fill(prefill)
        assert await held_by_each(prefill) == [NUM_CHAINS * CHAIN] * 2


async def test_what_is_evicted_goes_from_every_ssd(tmp_path: Path) -> None:
    async with life(tmp_path, 2) as prefill:
        await fill(prefill)
        await prefill.engine.stub.Evict(pb.EvictRequest(keys=[prompt(0)[1]]), timeout=WAIT_S)
        assert await held_by_each(prefill) == [NUM_CHAINS * CHAIN - (CHAIN - 1)] * 2


async def held_by_each(prefill: Bundled) -> list[int]:
    assert prefill.store.shared.ssd is not None
    return [len(await ssd.kept()) for ssd in prefill.store.shared.ssd._all]


# ---- without processes ----


class Elsewhere(OwnSsd):
    """That of another store, which copies slots when it comes to it."""

    may_copy: asyncio.Event

    def copy_out(self, slots: Sequence[Slot]) -> Awaitable[int]:
        return asyncio.create_task(self._copy_out_late(slots))

    async def _copy_out_late(self, slots: Sequence[Slot]) -> int:
        await self.may_copy.wait()
        return await super().copy_out(slots)


class Bench:
    """Two SSDs, here and elsewhere, each with as many bytes of every slot."""

    def __init__(self, here: OwnSsd, elsewhere: Elsewhere, num_slots: int) -> None:
        generations = [0] * num_slots
        self.pool = Pool(generations, 1, ssd_capacity=100)
        assert self.pool.ssd is not None
        self.here, self.elsewhere = here, elsewhere
        self.ssd = Ssd(here, self.pool.ssd, [elsewhere], generations)

    def cache(self, *numbers: int) -> None:
        keys, attempt_id = [key(number) for number in numbers], AttemptId(str(numbers))
        self.pool.acquire(attempt_id, keys, len(keys), 0)
        self.pool.commit(attempt_id, 0, keys)
        self.pool.release(attempt_id)

    async def demote(self) -> int:
        return await self.ssd.put(self.ssd.copy_out(self.ssd.blocks.next_copies(100)))

    async def held(self) -> list[BlockKey]:
        """By both, and by the index."""
        here, elsewhere = await self.here.kept(), await self.elsewhere.kept()
        assert set(here) == set(elsewhere) == set(self.ssd.blocks.keys())
        return here


@asynccontextmanager
async def bench(directory: Path, num_slots: int = 8, blocks_elsewhere: int = 100) -> AsyncIterator[Bench]:
    there = Layout(BLOCK_BYTES, FINGERPRINT).segment_bytes(blocks_elsewhere)
    tiers = await open_tier(directory / "here"), await open_tier(directory / "elsewhere", capacity_bytes=there)
    memories = [np.frombuffer(aligned_memory(num_slots * BLOCK_BYTES), np.uint8) for _ in tiers]
    elsewhere = Elsewhere(tiers[1], memories[1], BLOCK_BYTES)
    elsewhere.may_copy = asyncio.Event()
    elsewhere.may_copy.set()
    bench = Bench(OwnSsd(tiers[0], memories[0], BLOCK_BYTES), elsewhere, num_slots)
    try:
        yield bench
    finally:
        await bench.ssd.close()


@pytest.mark.parametrize(("num_slots", "kept"), [(2, []), (3, [key(1)])])
async def test_a_slot_that_is_another_blocks_before_all_have_copied_it_is_not_kept(
    tmp_path: Path, num_slots: int, kept: list[BlockKey]
) -> None:
    async with bench(tmp_path, num_slots) as two:
        two.cache(1, 2)
        two.elsewhere.may_copy.clear()
        writing = asyncio.create_task(two.demote())
        await asyncio.sleep(0)
        two.cache(11, 12)
        two.elsewhere.may_copy.set()
        assert await writing == len(kept)
        assert await two.held() == kept


async def test_what_one_has_no_room_for_none_keeps(tmp_path: Path) -> None:
    async with bench(tmp_path, blocks_elsewhere=2) as two:
        two.cache(1, 2, 3, 4)
        assert two.ssd.counts().free == 2
        assert await two.demote() == 2
        assert await two.held() == [key(1), key(2)]
        assert two.ssd.counts().free == 0


async def test_a_block_that_one_has_lost_is_given_up_when_it_is_read(tmp_path: Path) -> None:
    async with bench(tmp_path) as two:
        two.cache(1, 2, 3)
        assert await two.demote() == 3
        await two.elsewhere.tier.remove([key(2)])
        assert await two.ssd.read([key(1), key(2), key(3)], 0, [Slot(5), Slot(6), Slot(7)]) == 1
        assert await two.held() == [key(1)]


async def test_a_block_that_one_has_lost_does_not_keep_its_children_out(tmp_path: Path) -> None:
    async with bench(tmp_path) as two:
        two.cache(1)
        assert await two.demote() == 1
        await two.elsewhere.tier.remove([key(1)])
        two.cache(1, 2)
        assert await two.demote() == 0
        assert await two.held() == []
        assert await two.demote() == 2


async def test_a_prompt_in_two_batches_is_kept_whole(tmp_path: Path) -> None:
    async with bench(tmp_path) as two:
        two.cache(1, 2, 3, 4)
        head = two.ssd.blocks.next_copies(2)
        first = asyncio.create_task(two.ssd.put(two.ssd.copy_out(head)))
        rest = two.ssd.blocks.next_copies(100, in_flight={copy.key for copy in head})
        second = asyncio.create_task(two.ssd.put(two.ssd.copy_out(rest), after=first))
        assert await asyncio.gather(second, first) == [2, 2]
        assert len(await two.held()) == 4


async def test_they_agree_on_what_all_have(tmp_path: Path) -> None:
    tiers = [await open_tier(tmp_path / str(i)) for i in range(3)]
    for tier, lengths in zip(tiers, [(4, 2), (3, 2), (4, 1)], strict=True):
        await tier.put([*chain(range(lengths[0])), *chain(range(10, 10 + lengths[1]))])
    ssds = [OwnSsd(tier, np.frombuffer(aligned_memory(BLOCK_BYTES), np.uint8), BLOCK_BYTES) for tier in tiers]
    await agree(ssds)
    assert [await ssd.kept() for ssd in ssds] == [[key(0), key(1), key(2), key(10)]] * 3
    for ssd in ssds:
        await ssd.close()


def test_a_block_takes_room_on_all_of_them() -> None:
    here = TierCounts(TierState.TAKING, held=5, free=9, capacity=20, retired=0, dropped={"torn": 1})
    there = TierCounts(TierState.DISK_FULL, held=4, free=3, capacity=10, retired=2, dropped={"torn": 1, "corrupt": 2})
    want = TierCounts(TierState.DISK_FULL, held=4, free=3, capacity=10, retired=2, dropped={"corrupt": 2, "torn": 2})
    assert counts_of_all([here, there]) == want
