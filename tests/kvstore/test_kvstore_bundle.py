"""Stores of which each has the memory for some of the layers look like one: to their engine, and to stores that read from it or are written
to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
from bundle_support import bundled, options, whole
from hypothesis import given
from hypothesis import strategies as st
from kvstore_support import SPEC, WAIT_S, Engine, contents, keys_of

from kvstore.core.stripes import Stripe, cut
from kvstore.link import StoreLink, attach_arena, engine_identity
from kvstore.server.layer_store import LayerStore
from kvstore.server.shared.bundle import Bundle
from messenger.base import Slice
from springtide.credentials import OPEN
from springtide.errors import PeerLost
from springtide.ids import AttemptId, InstanceId, NodeId, new_incarnation
from springtide.protocol.layer_stores import JoinBundle
from springtide.protocol.outputs import AttemptFailed, FailureCode
from springtide.protocol.storage import Acquire, Acquired, EngineHello, Notice
from springtide.rpc import store_pb2 as pb
from tests.support.waiting import until


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.mark.parametrize("stages", [2, 3])
async def test_a_prompt_is_handed_over_from_every_store_of_a_bundle(stack: AsyncExitStack, tmp_path: Path, stages: int) -> None:
    prefill, (_, decode) = await bundled(stack, tmp_path, "prefill-0", stages), await whole(stack, tmp_path, "decode-0")
    keys = keys_of(1, 2, 3)
    acquired = await prefill.engine.acquire(keys, 4, attempt_id="a")
    reserved = await decode.reserve(keys, 4, "a")
    prefill.engine.send(open_hand_over=pb.OpenHandOver(attempt_id="a", address=decode.link.address, node_id="decode-0"))
    want = [contents(key) for key in [*keys, b"partial"]]
    for block, what in enumerate(want):
        prefill.write(acquired.slots[block], what)
    for layer in range(SPEC.layers):
        prefill.engine.send(push=pb.Push(attempt_id="a", layer_begin=layer, layer_end=layer + 1, block_end=4))
    prefill.engine.send(seal=pb.Seal(attempt_id="a", first_token=7))
    assert (await decode.notice("ingested", "a")).first_token == 7
    assert (await prefill.engine.notice("handed_over", "a")).num_bytes == 4 * SPEC.bytes_per_slot
    for slot, what in zip(reserved.slots, want, strict=True):
        assert np.array_equal(decode.slot(slot), what)


@pytest.mark.parametrize(("source", "reader"), [(2, 1), (1, 2), (2, 3), (3, 3)])
async def test_a_prefix_is_read_between_stores_and_bundles(stack: AsyncExitStack, tmp_path: Path, source: int, reader: int) -> None:
    """Each part of the reader's fetches what of its layers lies in which part of the source's."""
    keys = keys_of(1, 2, 3, 4)
    there = (await whole(stack, tmp_path, "there"))[1] if source == 1 else await bundled(stack, tmp_path, "there", source)
    here = (await whole(stack, tmp_path, "here"))[1] if reader == 1 else await bundled(stack, tmp_path, "here", reader)
    await there.cache(keys)
    engine = here if isinstance(here, Engine) else here.engine
    holder = there if isinstance(there, Engine) else there.engine
    await holder.stat_until(lambda stat: stat.slots_in_use == 0)
    acquired = await engine.acquire(keys, 5, source=holder)
    assert (acquired.local_blocks, acquired.remote_blocks) == (0, 4)
    attempt_id = acquired.attempt_id
    await until(lambda: any(getattr(n, "layers_ready", 0) == SPEC.layers and n.attempt_id == attempt_id for n in engine.notices))
    for key, slot in zip(keys, acquired.slots, strict=False):
        assert np.array_equal(here.slot(slot) if isinstance(here, Engine) else here.read(slot), contents(key))


async def test_what_was_evicted_is_refused_by_every_store_of_the_bundle(stack: AsyncExitStack, tmp_path: Path) -> None:
    """By the generations that the first one tells."""
    prefill = await bundled(stack, tmp_path, "prefill-0", 3)
    keys = keys_of(1, 2)
    await prefill.cache(keys)
    slot = (await prefill.engine.acquire(keys, 3, attempt_id="a")).slots[0]
    prefill.engine.release("a")
    generations = [store._arena.memory.region.generations for store in (prefill.store, *prefill.layer_stores)]
    before = int(generations[0][slot])
    await until(lambda: all(each[slot] == before for each in generations))
    await prefill.engine.stub.Evict(pb.EvictRequest(all=True), timeout=WAIT_S)
    await until(lambda: all(each[slot] == before + 1 for each in generations))


async def test_the_slots_of_an_engine_come_back_when_no_stage_has_its_memory(stack: AsyncExitStack, tmp_path: Path) -> None:
    prefill = await bundled(stack, tmp_path, "prefill-0", 2)
    of_first, of_second = prefill.store.options, prefill.layer_stores[0].options
    hello, acquired = EngineHello(InstanceId("prefill-0"), new_incarnation()), asyncio.Event()

    def on_notice(notice: Notice) -> None:
        if isinstance(notice, Acquired):
            acquired.set()

    link = await StoreLink.connect(of_first.store_socket, of_first.arena_socket, hello, on_notice, lambda error: None)
    identity = engine_identity(hello.instance_id, hello.incarnation)
    stage, attachment = await asyncio.to_thread(attach_arena, of_second.arena_socket, identity)
    link.send(Acquire(AttemptId("a"), (), 3, 0))
    await acquired.wait()
    await link.close()
    await until(lambda: prefill.store.pool.counts().quarantined == 3)
    assert not await prefill.store._is_fenced(identity), "the second stage may be writing still"
    attachment.close()
    stage.close()
    await until(lambda: prefill.store.pool.counts().quarantined == 0)


async def test_a_bundle_that_loses_a_store_says_so_and_the_rest_of_it_ends(stack: AsyncExitStack, tmp_path: Path) -> None:
    prefill = await bundled(stack, tmp_path, "prefill-0", 3)
    await prefill.layer_stores[0].close()
    (lost,) = await until(lambda: prefill.lost)
    assert "lost prefill-0.stage-1, the layer store at 127.0.0.1" in lost.message
    await prefill.store.close()
    await asyncio.wait_for(prefill.layer_stores[1].run(), WAIT_S)


async def test_a_layer_store_is_in_one_bundle_and_in_no_wrong_one(stack: AsyncExitStack, tmp_path: Path) -> None:
    taken = LayerStore(options(tmp_path, "a.stage-1", range(1, 4)))
    stack.push_async_callback(taken.close)
    await taken.start()
    join = JoinBundle(NodeId("a"), new_incarnation())
    lost: list[PeerLost] = []
    with pytest.raises(ValueError, match="must have the model's 4 layers, once each and in order, not 0 to 1, 1 to 3"):
        await Bundle.form([taken.address], OPEN, join, SPEC, range(2), lost.append)
    with pytest.raises(PeerLost, match="in a bundle, whose end will be that of this process"):
        await Bundle.form([taken.address], OPEN, join, SPEC, range(1), lost.append)
    assert not lost


async def test_a_hand_over_to_nobody_fails_and_the_bundle_goes_on(stack: AsyncExitStack, tmp_path: Path) -> None:
    prefill = await bundled(stack, tmp_path, "prefill-0", 2)
    _, decode = await whole(stack, tmp_path, "decode-0")
    await prefill.engine.acquire(keys_of(1), 2, attempt_id="a")
    await decode.reserve(keys_of(1), 2, "a")
    prefill.engine.send(open_hand_over=pb.OpenHandOver(attempt_id="a", address=decode.link.address, node_id="decode-0"))
    prefill.engine.send(push=pb.Push(attempt_id="a", layer_begin=0, layer_end=SPEC.layers, block_end=2))
    await until(lambda: prefill.store.shared.bytes_written == 2 * SPEC.bytes_per_slot)
    prefill.engine.release("a")
    failed = await prefill.engine.notice("hand_over_failed", "a")
    assert failed.failure.code is FailureCode.ABORTED
    await decode.stat_until(lambda stat: stat.slots_quarantined == 0)
    await prefill.cache(keys_of(1, 2))
    assert not prefill.lost


async def test_slots_that_a_lost_bundle_wrote_wait_until_every_store_of_it_is_fenced(stack: AsyncExitStack, tmp_path: Path) -> None:
    """A layer store may be in the middle of a write when the first store, by whose order it is, has gone."""
    over_shm = {"transports": ("shm",)}
    prefill = await bundled(stack, tmp_path, "prefill-0", 2, **over_shm)
    store, decode = await whole(stack, tmp_path, "decode-0", **over_shm)
    asked: set[str] = set()
    fence = store._messenger.fence

    async def observed(name: str, incarnation: int) -> bool:
        asked.add(name)
        return await fence(name, incarnation)

    store._messenger.fence = observed  # type: ignore[method-assign]
    await prefill.engine.acquire(keys_of(1), 2, attempt_id="a")
    await decode.reserve(keys_of(1), 2, "a")
    prefill.engine.send(open_hand_over=pb.OpenHandOver(attempt_id="a", address=decode.link.address, node_id="decode-0"))
    prefill.engine.send(push=pb.Push(attempt_id="a", layer_begin=0, layer_end=SPEC.layers, block_end=2))
    await until(lambda: prefill.store.shared.bytes_written == 2 * SPEC.bytes_per_slot)
    await prefill.store._server.stop(0)  # not `close`, which would say that it writes no more
    await prefill.store._arena.stop()
    await until(lambda: any(isinstance(notice, AttemptFailed) for notice in decode.notices))
    decode.release("a")
    await until(lambda: asked == {"prefill-0", "prefill-0.stage-1"})
    asked.clear()
    await until(lambda: asked == {"prefill-0", "prefill-0.stage-1"})
    assert store.pool.counts().quarantined == 2, "the layer store has the memory still"
    await prefill.layer_stores[0].close()
    await until(lambda: store.pool.counts().quarantined == 0)


@st.composite
def stripes(draw: st.DrawFn) -> list[Stripe]:
    ends = [*sorted(draw(st.sets(st.integers(1, 11), max_size=4))), 12]
    return [Stripe(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


@given(stripes(), stripes(), st.integers(0, 2), st.integers(0, 2), st.integers(0, 11), st.integers(1, 12))
def test_pieces_of_a_slice_move_what_it_does(
    own: list[Stripe], theirs: list[Stripe], here: int, there: int, begin: int, length: int
) -> None:
    size, length = 12, min(length, 12 - begin)
    source = np.arange(3 * size, dtype=np.uint8)
    want = np.zeros(3 * size, np.uint8)
    want[there * size + begin :][:length] = source[here * size + begin :][:length]

    def split(memory: np.ndarray, parts: list[Stripe]) -> list[np.ndarray]:
        return [memory.reshape(3, size)[:, part.begin : part.end].reshape(-1).copy() for part in parts]

    sources, targets = split(source, own), split(np.zeros_like(want), theirs)
    for (i, j), pieces in cut([Slice(here * size + begin, there * size + begin, length, 5)], size, own, theirs).items():
        for index, piece in pieces:
            assert (index, piece.generation) == (0, 5)
            targets[j][piece.remote_offset :][: piece.length] = sources[i][piece.local_offset :][: piece.length]
    assert all(np.array_equal(target, part) for target, part in zip(targets, split(want, theirs), strict=True))
