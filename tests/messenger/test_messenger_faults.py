"""What a FaultPlan does to the batches of any transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from messenger_support import GRANULE, NUM_GRANULES, TIMEOUT_S, Node, Workshop, fill, until, whole

from messenger.base import Connection, TransferTimeout
from springtide.errors import PeerLost, StaleHandle
from tests.support.faulty_transport import FaultyTransport
from tests.support.transport_faults import FaultPlan, TransferFault


@pytest.fixture(params=["inproc", "shm", "tcp"])
async def workshop(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Workshop]:
    made = Workshop(request.param, tmp_path)
    yield made
    await made.close()


async def connect(workshop: Workshop, *faults: TransferFault, seed: int = 0) -> tuple[Node, Node, Connection]:
    """From here to there; whatever `here` opens has the faults."""
    here, there = await workshop.node("here"), await workshop.node("there")
    here.transport = FaultyTransport(here.transport, FaultPlan(faults, seed))
    return here, there, await here.connect(there.endpoint)


async def test_fail_moves_nothing_and_passes(workshop: Workshop) -> None:
    here, there, connection = await connect(workshop, TransferFault("fail", "write", times=1))
    fill(here, 1)
    with pytest.raises(PeerLost, match="fail"):
        await connection.write([whole(there, 0)], TIMEOUT_S)
    assert not there.bytes.any()
    assert (await connection.write([whole(there, 0)], TIMEOUT_S)).num_bytes == GRANULE


@pytest.mark.parametrize(("kind", "open_after"), [("partial", True), ("drop", False)])
async def test_partial_and_drop_move_a_part(workshop: Workshop, kind: Literal["partial", "drop"], open_after: bool) -> None:
    here, there, connection = await connect(workshop, TransferFault(kind), seed=3)
    here.bytes[:] = 1
    with pytest.raises(PeerLost, match=kind):
        await connection.write([whole(there, granule) for granule in range(24)], TIMEOUT_S, notify=b"x")
    assert 0 < int(there.bytes.sum()) < there.bytes.nbytes
    assert there.notes == []
    assert connection.is_open is open_after


async def test_stale_refuses_one_slice_the_same_for_the_same_seed(workshop: Workshop) -> None:
    here, there, connection = await connect(workshop, TransferFault("stale", "read", after=1), seed=11)
    theirs = fill(there, 2)
    batch = [whole(there, granule) for granule in range(24)]
    assert not (await connection.read(batch, TIMEOUT_S)).failed
    refused = []
    for _ in range(5):
        completion = await connection.read(batch, TIMEOUT_S)
        ((index, error),) = completion.failed.items()
        assert isinstance(error, StaleHandle)
        assert completion.num_bytes == 23 * GRANULE
        refused.append(index)
    for index in refused:  # where nothing is promised
        here.bytes[index * GRANULE : (index + 1) * GRANULE] = theirs[index * GRANULE : (index + 1) * GRANULE]
    assert np.array_equal(here.bytes, theirs), "a refused slice touched nothing but its own bytes"
    again = FaultPlan([TransferFault("stale", "read", after=1)], seed=11)
    for position in range(6):
        assert ("stale" in again.draw("read")) is (position > 0)
        assert position == 0 or again.random.randrange(24) == refused[position - 1]


@pytest.mark.parametrize("fault", [TransferFault("delay", delay_s=3600), TransferFault("hang")], ids=lambda fault: fault.kind)
async def test_delay_and_hang_run_into_the_deadline(workshop: Workshop, fault: TransferFault) -> None:
    _, there, connection = await connect(workshop, fault)
    with pytest.raises(TransferTimeout):
        await connection.read([whole(there, 0)], 0.01)
    assert not connection.is_open


async def test_slow_moves_everything_but_holds_the_batch_back(workshop: Workshop) -> None:
    here, there, connection = await connect(workshop, TransferFault("slow", bytes_per_s=2 * NUM_GRANULES * GRANULE))
    mine, start = fill(here, 4), asyncio.get_running_loop().time()
    completion = await connection.write([whole(there, granule) for granule in range(NUM_GRANULES)], TIMEOUT_S)
    assert asyncio.get_running_loop().time() - start >= 0.49, "at 48 MiB/s 24 MiB take half a second"
    assert completion.num_bytes == mine.nbytes
    assert np.array_equal(there.bytes, mine)


async def test_slow_reports_failed_slices_by_their_place_in_the_batch(workshop: Workshop) -> None:
    _, there, connection = await connect(workshop, TransferFault("slow", bytes_per_s=1e12))
    batch = [whole(there, granule) for granule in range(NUM_GRANULES)]
    there.generations[[3, 17]] += 1
    assert sorted((await connection.read(batch, TIMEOUT_S)).failed) == [3, 17]


async def test_notifications_come_twice_late_or_not_at_all(workshop: Workshop) -> None:
    _, there, connection = await connect(
        workshop,
        TransferFault("notify_late", times=1, delay_s=0.01),
        TransferFault("notify_twice", after=1, times=1),
        TransferFault("notify_lost", after=2, times=1),
    )
    for payload in (b"late", b"twice", b"lost", b"last"):
        await connection.write([], TIMEOUT_S, notify=payload)
    await there.noted(4)
    assert sorted(payload for _, payload in there.notes) == [b"last", b"late", b"twice", b"twice"]


async def test_a_late_notification_dies_with_its_connection(workshop: Workshop) -> None:
    here, there, connection = await connect(workshop, TransferFault("notify_late", times=1, delay_s=3600))
    await connection.write([], TIMEOUT_S, notify=b"never")
    await connection.close()
    again = await here.connect(there.endpoint)
    await again.write([], TIMEOUT_S, notify=b"after")
    assert await there.noted(1) == [b"after"]


async def test_a_delayed_write_is_not_overtaken_by_notifications(workshop: Workshop) -> None:
    _, there, connection = await connect(workshop, TransferFault("delay", times=1, delay_s=0.05))
    writes = [connection.write([whole(there, i)], TIMEOUT_S, notify=b"%d" % i) for i in range(3)]
    await asyncio.gather(*writes)
    assert await there.noted(3) == [b"0", b"1", b"2"]


async def test_refuse_denies_the_connection_only(workshop: Workshop) -> None:
    here, there = await workshop.node("here"), await workshop.node("there")
    plan = FaultPlan([TransferFault("refuse", times=2), TransferFault("fail", after=1)])
    here.transport = FaultyTransport(here.transport, plan)
    for _ in range(2):
        with pytest.raises(PeerLost, match="refuse"):
            await here.connect(there.endpoint)
    connection = await here.connect(there.endpoint)
    assert (await connection.read([whole(there, 0)], TIMEOUT_S)).num_bytes == GRANULE
    assert plan.struck == {"refuse": 2, "fail": 0}
    plan.armed = False
    assert (await connection.read([whole(there, 0)], TIMEOUT_S)).num_bytes == GRANULE


async def test_what_the_inner_transport_loses_is_lost(workshop: Workshop) -> None:
    _, there, connection = await connect(workshop)
    await there.transport.close()
    await until(lambda: not connection.is_open or workshop.transport == "inproc")
    with pytest.raises(PeerLost):
        await connection.read([whole(there, 0)], TIMEOUT_S)


def test_a_probability_decides_by_the_seed() -> None:
    def struck(seed: int) -> list[bool]:
        plan = FaultPlan([TransferFault("fail", probability=0.3)], seed)
        return ["fail" in plan.draw("read") for _ in range(200)]

    assert struck(5) == struck(5) != struck(6)
    assert 30 < sum(struck(5)) < 90


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "fail", "probability": 1.5}, r"TransferFault\.probability"),
        ({"kind": "slow"}, r"TransferFault\.bytes_per_s"),
        ({"kind": "fail", "bytes_per_s": 1.0}, r"TransferFault\.bytes_per_s"),
        ({"kind": "refuse", "operation": "read"}, r"TransferFault\.operation"),
        ({"kind": "hang", "operation": "connect"}, r"TransferFault\.operation"),
    ],
)
def test_a_fault_that_cannot_be_is_refused_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransferFault(**fields)  # type: ignore[arg-type]
