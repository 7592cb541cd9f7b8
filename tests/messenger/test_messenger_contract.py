"""What every transport promises."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from messenger_support import GRANULE, TIMEOUT_S, Node, Workshop, fill, random_batch, until, whole

from messenger.base import Connection, Endpoint, Identity, InvalidSlice, Slice
from springtide.errors import PeerLost, StaleHandle


def moved(batch: Sequence[Slice], source: np.ndarray, target: np.ndarray, inward: bool) -> np.ndarray:
    """What `target` is to look like after the batch."""
    expected = target.copy()
    for piece in batch:
        to, of = (piece.local_offset, piece.remote_offset) if inward else (piece.remote_offset, piece.local_offset)
        expected[to : to + piece.length] = source[of : of + piece.length]
    return expected


@pytest.mark.parametrize(("count", "longest"), [(1, GRANULE), (1, 1), (7, GRANULE), (24, GRANULE), (300, 50_000), (2000, 5_000)])
@pytest.mark.parametrize("seed", [1, 2])
async def test_a_read_brings_exactly_the_slices(
    connection: Connection, here: Node, there: Node, count: int, longest: int, seed: int
) -> None:
    mine, theirs = fill(here, seed), fill(there, seed + 100)
    batch = random_batch(np.random.default_rng(seed), here, there, count, longest)
    completion = await connection.read(batch, TIMEOUT_S)
    assert completion.num_bytes == sum(piece.length for piece in batch)
    assert not completion.failed
    assert np.array_equal(here.bytes, moved(batch, theirs, mine, inward=True))
    assert np.array_equal(there.bytes, theirs)


@pytest.mark.parametrize(("count", "longest"), [(1, GRANULE), (1, 1), (7, GRANULE), (24, GRANULE), (300, 50_000), (2000, 5_000)])
@pytest.mark.parametrize("seed", [1, 2])
async def test_a_write_places_exactly_the_slices(
    connection: Connection, here: Node, there: Node, count: int, longest: int, seed: int
) -> None:
    mine, theirs = fill(here, seed), fill(there, seed + 100)
    batch = random_batch(np.random.default_rng(seed), here, there, count, longest)
    completion = await connection.write(batch, TIMEOUT_S)
    assert completion.num_bytes == sum(piece.length for piece in batch)
    assert not completion.failed
    assert np.array_equal(there.bytes, moved(batch, mine, theirs, inward=False))
    assert np.array_equal(here.bytes, mine)


async def test_slices_that_are_neighbours_on_both_sides_travel_together(connection: Connection, here: Node, there: Node) -> None:
    theirs = fill(there, 5)
    batch = [Slice(start, 3 * GRANULE + start, 4096, 4) for start in range(0, GRANULE, 4096)]
    assert (await connection.read(batch, TIMEOUT_S)).num_bytes == GRANULE
    assert np.array_equal(here.bytes[:GRANULE], theirs[3 * GRANULE : 4 * GRANULE])


async def test_a_granule_larger_than_a_stripe_is_moved_whole(workshop: Workshop) -> None:
    here, there = await workshop.node("left", 2, 10 << 20), await workshop.node("right", 2, 10 << 20)
    theirs = fill(there, 6)
    connection = await here.connect(there.endpoint)
    batch = [Slice(10 << 20, 1, (10 << 20) - 1, 1), Slice(5, 10 << 20, 10 << 19, 2)]
    assert (await connection.read(batch, TIMEOUT_S)).num_bytes == (10 << 20) - 1 + (10 << 19)
    assert np.array_equal(here.bytes[10 << 20 : -1], theirs[1 : 10 << 20])
    assert np.array_equal(here.bytes[5 : 5 + (10 << 19)], theirs[10 << 20 : 15 << 20])


async def test_an_empty_batch_moves_nothing_and_may_notify(connection: Connection, there: Node) -> None:
    assert (await connection.read([], TIMEOUT_S)).num_bytes == 0
    assert (await connection.write([], TIMEOUT_S, notify=b"")).num_bytes == 0
    assert await there.noted(1) == [b""]


async def test_a_notification_comes_with_the_writers_name_after_its_bytes(workshop: Workshop, here: Node) -> None:
    there = await workshop.node("there", on_notify=lambda node: bool((node.bytes[: 8 * GRANULE] == 7).all()))
    connection = await here.connect(there.endpoint)
    here.bytes[: 8 * GRANULE] = 7
    await connection.write([whole(there, granule) for granule in range(8)], TIMEOUT_S, notify=b"done")
    await there.noted(1)
    assert there.notes == [("here", b"done")]
    assert there.observed == [True]


async def test_notifications_arrive_once_each_in_the_order_of_the_writes(connection: Connection, here: Node, there: Node) -> None:
    """Large and small writes at once: the small ones are in place earlier, and wait."""
    payloads = [b"%d" % number for number in range(40)]
    batches = [[whole(there, granule) for granule in range(number % 5 * 4)] for number in range(40)]
    await asyncio.gather(*(connection.write(batch, TIMEOUT_S, notify=payload) for batch, payload in zip(batches, payloads, strict=True)))
    assert await there.noted(40) == payloads


async def test_a_failed_write_keeps_neither_its_notification_nor_others(connection: Connection, there: Node) -> None:
    stale = Slice(0, 0, 100, 999)
    completions = await asyncio.gather(
        connection.write([whole(there, 1)], TIMEOUT_S, notify=b"first"),
        connection.write([stale], TIMEOUT_S, notify=b"second"),
        connection.write([], TIMEOUT_S, notify=b"third"),
    )
    assert [bool(completion.failed) for completion in completions] == [False, True, False]
    assert await there.noted(2) == [b"first", b"third"]


@pytest.mark.parametrize("operation", ["read", "write"])
async def test_stale_slices_are_refused_one_by_one(connection: Connection, here: Node, there: Node, operation: str) -> None:
    mine, theirs = fill(here, 1), fill(there, 2)
    batch = [whole(there, granule) for granule in range(12)]
    there.generations[[2, 3, 9]] += 1
    if operation == "read":
        completion = await connection.read(batch, TIMEOUT_S)
    else:
        completion = await connection.write(batch, TIMEOUT_S)
    assert sorted(completion.failed) == [2, 3, 9]
    assert all(isinstance(error, StaleHandle) and "generation" in error.message for error in completion.failed.values())
    assert completion.num_bytes == 9 * GRANULE
    good = [piece for index, piece in enumerate(batch) if index not in completion.failed]
    if operation == "read":
        for granule in (2, 3, 9):  # where nothing is promised
            here.bytes[granule * GRANULE : (granule + 1) * GRANULE] = mine[granule * GRANULE : (granule + 1) * GRANULE]
        assert np.array_equal(here.bytes, moved(good, theirs, mine, inward=True))
    else:
        assert np.array_equal(there.bytes, moved(good, mine, theirs, inward=False))


async def test_every_slice_of_a_stale_granule_is_refused(connection: Connection, there: Node) -> None:
    batch = [Slice(start, GRANULE + start, 512, 2) for start in range(0, 8192, 512)] + [whole(there, 3)]
    there.generations[1] = 77
    completion = await connection.read(batch, TIMEOUT_S)
    assert sorted(completion.failed) == list(range(16))
    assert completion.num_bytes == GRANULE


@pytest.mark.parametrize(
    ("piece", "field"),
    [
        (Slice(0, 24 * GRANULE, 1, 1), "remote_offset"),
        (Slice(0, 24 * GRANULE - 1, 2, 1), "remote_offset"),
        (Slice(0, -1, 1, 1), "remote_offset"),
        (Slice(-1, 0, 1, 1), "local_offset"),
        (Slice(24 * GRANULE - 1, 0, 2, 1), "local_offset"),
        (Slice(0, 0, 0, 1), "length"),
        (Slice(0, 0, -5, 1), "length"),
        (Slice(0, GRANULE - 1, 2, 1), "granule"),
        (Slice(0, 2**63 - 1, 2**63 - 1, 1), "remote_offset"),
        (Slice(0, 2**70, 1, 1), "64 bits"),
        (Slice(0, 0, 1, -1), "64 bits"),
    ],
)
async def test_a_slice_out_of_bounds_is_refused_with_its_whole_batch(
    connection: Connection, here: Node, there: Node, piece: Slice, field: str
) -> None:
    mine, theirs = fill(here, 1), fill(there, 2)
    for operation in (connection.read, connection.write):
        with pytest.raises(InvalidSlice, match=field):
            await operation([whole(there, 0), piece], TIMEOUT_S)
    assert np.array_equal(here.bytes, mine) and np.array_equal(there.bytes, theirs)
    assert connection.is_open


async def test_batches_at_once_do_not_disturb_each_other(connection: Connection, here: Node, there: Node) -> None:
    """Granules 0..11 are read while 12..23 are written, in many batches of random size."""
    mine, theirs = fill(here, 3), fill(there, 4)
    rng = np.random.default_rng(8)
    operations = []
    for granule in range(24):
        cuts = sorted({0, GRANULE, *rng.integers(1, GRANULE, 10).tolist()})
        batch = [
            Slice(granule * GRANULE + start, granule * GRANULE + start, end - start, granule + 1) for start, end in itertools.pairwise(cuts)
        ]
        operations.append(connection.read(batch, TIMEOUT_S) if granule < 12 else connection.write(batch, TIMEOUT_S))
    completions = await asyncio.gather(*operations)
    assert [completion.num_bytes for completion in completions] == [GRANULE] * 24
    assert np.array_equal(here.bytes, np.concatenate((theirs[: 12 * GRANULE], mine[12 * GRANULE :])))
    assert np.array_equal(there.bytes, here.bytes)


async def test_both_sides_may_connect_to_each_other_at_once(here: Node, there: Node) -> None:
    mine, theirs = fill(here, 5), fill(there, 6)
    to, back = await here.connect(there.endpoint), await there.connect(here.endpoint)
    half = 12 * GRANULE
    await asyncio.gather(
        to.read([whole(there, granule) for granule in range(12)], TIMEOUT_S),
        back.read([whole(here, granule) for granule in range(12, 24)], TIMEOUT_S),
    )
    assert np.array_equal(here.bytes, np.concatenate((theirs[:half], mine[half:])))
    assert np.array_equal(there.bytes, np.concatenate((theirs[:half], mine[half:])))


async def test_a_granule_given_away_during_a_write_is_reported_and_its_neighbours_are_not(
    connection: Connection, here: Node, there: Node
) -> None:
    """Whatever the owner does meanwhile, a slice that is reported as done was of the right generation throughout."""
    fill(here, 9)
    batch = [whole(there, granule) for granule in range(24)]
    writing = asyncio.create_task(connection.write(batch, TIMEOUT_S))
    await until(lambda: bool(there.bytes[:GRANULE].any()) or writing.done())
    there.generations[20] += 1
    there.transport.settle()
    snapshot = there.bytes[20 * GRANULE : 21 * GRANULE].copy()
    completion = await writing
    assert set(completion.failed) <= {20}
    if completion.failed and connection_fences_by_owner(there):
        assert np.array_equal(there.bytes[20 * GRANULE : 21 * GRANULE], snapshot)


def connection_fences_by_owner(node: Node) -> bool:
    """Whether the owner's side stands between the bytes and the memory."""
    return node.transport.name != "shm"


async def test_a_peer_of_another_incarnation_is_refused(here: Node, there: Node) -> None:
    before = Endpoint(there.endpoint.host_id, there.endpoint.incarnation ^ 2, there.endpoint.addresses)
    with pytest.raises(PeerLost, match="restarted"):
        await here.connect(before)


async def test_a_peer_that_is_away_is_lost(here: Node, there: Node) -> None:
    await there.transport.close()
    with pytest.raises(PeerLost):
        await here.connect(there.endpoint)


async def test_a_connection_whose_peer_stops_serving_is_broken(connection: Connection, here: Node, there: Node) -> None:
    await connection.read([whole(there, 0)], TIMEOUT_S)
    await there.transport.close()
    async with asyncio.timeout(TIMEOUT_S):
        while connection.is_open:
            with contextlib.suppress(PeerLost):
                await connection.write([whole(there, 0)], TIMEOUT_S, notify=b"x")
    for operation in (connection.read, connection.write):
        with pytest.raises(PeerLost):
            await operation([whole(there, 0)], TIMEOUT_S)


async def test_a_closed_connection_refuses_batches_and_may_be_closed_again(connection: Connection, there: Node) -> None:
    await connection.close()
    await connection.close()
    assert not connection.is_open
    with pytest.raises(PeerLost, match="closed"):
        await connection.read([whole(there, 0)], TIMEOUT_S)


async def test_closing_fails_the_batches_in_flight_and_no_byte_lands_later(connection: Connection, here: Node, there: Node) -> None:
    fill(here, 1)
    writing = [asyncio.create_task(connection.write([whole(there, granule)] * 4, TIMEOUT_S)) for granule in range(24)]
    await until(lambda: bool(there.bytes.any()))
    await connection.close()
    snapshot = there.bytes.copy()
    results = await asyncio.gather(*writing, return_exceptions=True)
    assert all(isinstance(result, PeerLost) or not isinstance(result, BaseException) for result in results)
    again = await here.connect(there.endpoint)
    await again.read([Slice(0, 0, 1, 1)], TIMEOUT_S)
    assert np.array_equal(there.bytes, snapshot)


async def test_a_cancelled_read_leaves_its_memory_at_rest_and_the_connection_open(connection: Connection, here: Node, there: Node) -> None:
    fill(there, 2)
    reading = asyncio.create_task(connection.read([whole(there, granule) for granule in range(24)], TIMEOUT_S))
    await until(lambda: bool(here.bytes.any()) or reading.done())
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    here.bytes[:] = 0
    assert (await connection.read([whole(there, 5)], TIMEOUT_S)).num_bytes == GRANULE
    here.bytes[5 * GRANULE : 6 * GRANULE] = 0
    assert not here.bytes.any()


async def test_a_cancelled_batch_raises_cancelled_error(connection: Connection, there: Node) -> None:
    reading = asyncio.create_task(connection.read([whole(there, granule) for granule in range(24)], TIMEOUT_S))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_a_fenced_peer_is_cut_off_or_said_to_be_still_there(connection: Connection, here: Node, there: Node) -> None:
    await connection.write([], TIMEOUT_S, notify=b"hello")
    assert await there.transport.fence(Identity("here", here.identity.incarnation ^ 2))
    assert connection.is_open
    fenced = await there.transport.fence(here.identity)
    if there.transport.name == "shm":
        assert not fenced
        await connection.close()
        async with asyncio.timeout(TIMEOUT_S):
            while not await there.transport.fence(here.identity):
                pass
    else:
        assert fenced
        with pytest.raises(PeerLost):
            await connection.write([whole(there, 0)], TIMEOUT_S)


async def test_a_handler_that_raises_harms_nobody(workshop: Workshop, here: Node, caplog: pytest.LogCaptureFixture) -> None:
    def explode(node: Node) -> bool:
        raise RuntimeError("a bug in the handler")

    there = await workshop.node("there", on_notify=explode)
    connection = await here.connect(there.endpoint)
    await connection.write([], TIMEOUT_S, notify=b"one")
    await connection.write([], TIMEOUT_S, notify=b"two")
    assert await there.noted(2) == [b"one", b"two"]
    assert "a bug in the handler" in caplog.text
