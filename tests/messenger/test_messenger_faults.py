"""What a FaultPlan does to the batches of an inproc transport."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest
from messenger_support import GRANULE, TIMEOUT_S, Node, Workshop, fill, whole

from messenger.base import Connection, DeadlineExceeded
from messenger.faults import Fault, FaultPlan
from messenger.inproc import InprocTransport
from springtide.errors import PeerLost


@pytest.fixture
async def workshop(tmp_path: Path) -> AsyncIterator[Workshop]:
    made = Workshop("inproc", tmp_path)
    yield made
    await made.close()


async def connect(workshop: Workshop, *faults: Fault, seed: int = 0) -> tuple[Node, Node, Connection]:
    here, there = await workshop.node("here"), await workshop.node("there")
    transport = InprocTransport(workshop.hub, "faulty", FaultPlan(faults, seed))
    return here, there, await transport.connect(there.endpoint, here.memory.region, here.identity)


async def test_fail_moves_nothing_and_passes(workshop: Workshop) -> None:
    here, there, connection = await connect(workshop, Fault("fail", "write", times=1))
    fill(here, 1)
    with pytest.raises(PeerLost, match="fail"):
        await connection.write([whole(there, 0)], TIMEOUT_S)
    assert not there.bytes.any()
    assert (await connection.write([whole(there, 0)], TIMEOUT_S)).num_bytes == GRANULE


@pytest.mark.parametrize(("kind", "open_after"), [("partial", True), ("drop", False)])
async def test_partial_and_drop_move_a_part(workshop: Workshop, kind: Literal["partial", "drop"], open_after: bool) -> None:
    here, there, connection = await connect(workshop, Fault(kind), seed=3)
    here.bytes[:] = 1
    with pytest.raises(PeerLost, match=kind):
        await connection.write([whole(there, granule) for granule in range(24)], TIMEOUT_S, notify=b"x")
    assert 0 < int(there.bytes.sum()) < there.bytes.nbytes
    assert there.notes == []
    assert connection.is_open is open_after


async def test_stale_refuses_one_slice_the_same_for_the_same_seed(workshop: Workshop) -> None:
    _, there, connection = await connect(workshop, Fault("stale", "read", after=1), seed=11)
    batch = [whole(there, granule, (granule * 7) % 24) for granule in range(24)]
    assert not (await connection.read(batch, TIMEOUT_S)).failed
    refused = [tuple((await connection.read(batch, TIMEOUT_S)).failed) for _ in range(5)]
    assert all(len(indices) == 1 for indices in refused)
    again = InprocTransport(workshop.hub, "again", FaultPlan([Fault("stale", "read", after=1)], seed=11))
    connection = await again.connect(there.endpoint, there.memory.region, there.identity)
    await connection.read(batch, TIMEOUT_S)
    assert [tuple((await connection.read(batch, TIMEOUT_S)).failed) for _ in range(5)] == refused


async def test_delay_runs_into_the_deadline(workshop: Workshop) -> None:
    _, there, connection = await connect(workshop, Fault("delay", delay_s=3600))
    with pytest.raises(DeadlineExceeded):
        await connection.read([whole(there, 0)], 0.01)
    assert not connection.is_open


async def test_notifications_come_twice_or_late(workshop: Workshop) -> None:
    _, there, connection = await connect(workshop, Fault("notify_late", times=1, delay_s=0.01), Fault("notify_twice", after=1, times=1))
    for payload in (b"one", b"two", b"three"):
        await connection.write([], TIMEOUT_S, notify=payload)
    assert await there.noted(4) == [b"two", b"two", b"three", b"one"]


def test_a_probability_decides_by_the_seed() -> None:
    def struck(seed: int) -> list[bool]:
        plan = FaultPlan([Fault("fail", probability=0.3)], seed)
        return ["fail" in plan.draw("read") for _ in range(200)]

    assert struck(5) == struck(5) != struck(6)
    assert 30 < sum(struck(5)) < 90
    with pytest.raises(ValueError, match=r"Fault\.probability"):
        Fault("fail", probability=1.5)
