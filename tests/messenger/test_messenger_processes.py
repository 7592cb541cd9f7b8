"""Peers that die and hang, as processes of their own."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop
from messenger_support import GRANULE, NUM_GRANULES, TIMEOUT_S, Node, PeerProcess, Workshop, mappings, open_files, until

from messenger import shm
from messenger.base import Connection, Slice, TransferTimeout
from messenger.options import TcpOptions
from messenger.tcp.transport import TcpTransport
from springtide.errors import PeerLost

LOST_WITHIN_S = 15.0
"""Whoever closes nothing and says nothing, by whatever transport, and on machines that are busy otherwise."""
ALL = [Slice(granule * GRANULE, granule * GRANULE, GRANULE, granule + 1) for granule in range(NUM_GRANULES)]


@pytest.fixture(params=["shm", "tcp", pytest.param("rdma", marks=pytest.mark.rdma)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def here(kind: str, tmp_path: Path) -> AsyncIterator[Node]:
    workshop = Workshop(kind, tmp_path)
    yield await workshop.node("here")
    await workshop.close()


@pytest.fixture
async def peer(kind: str, tmp_path: Path) -> AsyncIterator[PeerProcess]:
    process = await PeerProcess.start(kind, tmp_path)
    yield process
    await process.kill()


@pytest.fixture
async def connection(here: Node, peer: PeerProcess) -> Connection:
    return await here.connect(peer.endpoint)


async def test_bytes_go_to_another_process_and_back(connection: Connection, here: Node) -> None:
    here.bytes[:] = 3
    assert (await connection.write(ALL, TIMEOUT_S, notify=b"unit")).num_bytes == here.bytes.nbytes
    here.bytes[:] = 0
    assert (await connection.read(ALL, TIMEOUT_S)).num_bytes == here.bytes.nbytes
    assert (here.bytes == 3).all()


def test_the_loop_of_the_processes_serves_as_well(kind: str, tmp_path: Path) -> None:
    """Peers of these tests run in uvloop, the tests in asyncio's loop; here both ends are in uvloop."""

    async def round_trip() -> None:
        workshop = Workshop(kind, tmp_path)
        here, there = await workshop.node("here"), await workshop.node("there")
        connection = await here.connect(there.endpoint)
        here.bytes[:] = 3
        await asyncio.gather(*(connection.write(ALL[part::4], TIMEOUT_S, notify=b"%d" % part) for part in range(4)))
        assert await there.noted(4) == [b"0", b"1", b"2", b"3"]
        assert (there.bytes == 3).all()
        there.bytes[:] = 4
        await connection.read(ALL, TIMEOUT_S)
        assert (here.bytes == 4).all()
        await there.transport.close()
        await until(lambda: not connection.is_open)
        await workshop.close()

    uvloop.run(round_trip())


@pytest.mark.parametrize("operation", ["read", "write"])
async def test_a_peer_killed_in_the_middle_of_a_batch_is_lost(connection: Connection, peer: PeerProcess, operation: str) -> None:
    moved = 0

    async def without_end() -> None:
        nonlocal moved
        while True:
            move = connection.read if operation == "read" else connection.write
            moved += (await move(ALL, TIMEOUT_S)).num_bytes

    moving = [asyncio.create_task(without_end()) for _ in range(3)]
    await until(lambda: moved > 0)
    peer.signal(signal.SIGKILL)
    results = await asyncio.gather(*moving, return_exceptions=True)
    assert [type(result) for result in results] == [PeerLost] * 3
    assert not connection.is_open


async def test_an_idle_connection_notices_that_its_peer_was_killed(connection: Connection, peer: PeerProcess) -> None:
    await peer.kill()
    await until(lambda: not connection.is_open)


async def test_a_peer_killed_before_it_acknowledges_a_notification_is_lost(connection: Connection, peer: PeerProcess) -> None:
    await peer.stop()
    writing = asyncio.create_task(connection.write(ALL[:1], TIMEOUT_S, notify=b"never seen"))
    await asyncio.sleep(0)
    await peer.kill()
    with pytest.raises(PeerLost):
        await writing


async def test_a_peer_that_hangs_costs_no_more_than_the_deadline(connection: Connection, peer: PeerProcess) -> None:
    await peer.stop()
    with pytest.raises(TransferTimeout, match=r"0\.2 s"):
        await connection.write(ALL, 0.2, notify=b"late")


async def test_a_peer_that_hangs_is_lost_long_before_a_late_deadline(kind: str, connection: Connection, peer: PeerProcess) -> None:
    await peer.stop()
    operations = [connection.write(ALL, 3600, notify=b"never seen"), connection.write([], 3600, notify=b"nor this")]
    if kind not in ("shm", "rdma"):  # there, bytes move without the peer's process
        operations += [connection.read(ALL, 3600), connection.read(ALL[:1], 3600)]
    async with asyncio.timeout(LOST_WITHIN_S):
        results = await asyncio.gather(*operations, return_exceptions=True)
    assert [type(result) for result in results] == [PeerLost] * len(operations)
    assert not connection.is_open


async def test_a_peer_that_went_on_after_a_stop_is_served_again(connection: Connection, here: Node, peer: PeerProcess) -> None:
    """It was stopped for less time than it takes to lose it."""
    await peer.stop()
    writing = asyncio.create_task(connection.write(ALL[:4], TIMEOUT_S, notify=b"seen"))
    with pytest.raises(TransferTimeout):
        await connection.write(ALL, 0.1, notify=b"late")
    peer.signal(signal.SIGCONT)
    assert (await writing).num_bytes == 4 * GRANULE
    assert (await connection.write(ALL, TIMEOUT_S, notify=b"again")).num_bytes == here.bytes.nbytes


async def test_peers_that_stood_still_together_go_on_with_what_was_on_its_way(tmp_path: Path) -> None:
    """The connection is so new that the kernel has no room for all of it, and waits for the owner, by a clock that runs on."""
    workshop = Workshop("tcp", tmp_path)
    here, owner = await workshop.node("here"), await PeerProcess.start("tcp", tmp_path)
    connection = await here.connect(owner.endpoint)
    writer = await PeerProcess.start("tcp", tmp_path, connect_to=owner.endpoint, pattern=7)
    try:
        await owner.stop()
        await asyncio.sleep(0.3)
        await writer.stop()
        await asyncio.sleep(2.5)
        owner.signal(signal.SIGCONT)
        writer.signal(signal.SIGCONT)
        for _ in range(3):  # more than what the kernel had of it already
            here.bytes[:] = 0
            await connection.write(ALL, TIMEOUT_S)
            async with asyncio.timeout(TIMEOUT_S):
                while not here.bytes.all():
                    await connection.read(ALL, TIMEOUT_S)
    finally:
        for process in (writer, owner):
            await process.kill()
        await workshop.close()


async def test_a_peer_that_wakes_a_moment_later_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all processes of a machine stood still, one after the other goes on."""
    workshop, looks = Workshop("shm", tmp_path), itertools.count()
    here, peer = await workshop.node("here"), await PeerProcess.start("shm", tmp_path)

    def is_stopped(pid: int) -> bool:
        if next(looks) == 0:
            peer.signal(signal.SIGCONT)
            return True
        return False

    monkeypatch.setattr(shm, "_is_stopped", is_stopped)
    try:
        connection = await here.connect(peer.endpoint)
        await peer.stop()
        assert (await connection.write(ALL[:1], TIMEOUT_S, notify=b"seen")).num_bytes == GRANULE
        assert next(looks) >= 1
    finally:
        await peer.kill()
        await workshop.close()


async def test_a_cancelled_batch_does_not_wait_for_ever_for_a_peer_that_hangs(connection: Connection, peer: PeerProcess) -> None:
    await peer.stop()
    writing = asyncio.create_task(connection.write(ALL[:1], 3600, notify=b"late"))
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing


async def test_one_sided_memory_is_read_without_the_help_of_its_owner(kind: str, connection: Connection, peer: PeerProcess) -> None:
    await peer.stop()
    if kind in ("shm", "rdma"):
        assert (await connection.read(ALL, TIMEOUT_S)).num_bytes == NUM_GRANULES * GRANULE
    else:
        with pytest.raises(TransferTimeout):
            await connection.read(ALL, 0.2)


async def test_a_native_session_serves_while_its_owners_python_does_not(tmp_path: Path) -> None:
    """One granule is read of a peer that does nothing but hold Python's lock for good."""
    workshop = Workshop("tcp", tmp_path)
    here = await workshop.node("here")
    peer = await PeerProcess.start("tcp", tmp_path, on_notify="hang")
    try:
        connection = await here.connect(peer.endpoint)
        with pytest.raises(TransferTimeout):
            await connection.write([], 0.1, notify=b"from now on")
        assert (await connection.read(ALL, TIMEOUT_S)).num_bytes == here.bytes.nbytes
        assert (await connection.write(ALL, TIMEOUT_S)).num_bytes == here.bytes.nbytes
        with pytest.raises(TransferTimeout):
            await connection.write([], 3.0, notify=b"it is busy, and not lost")
        assert connection.is_open
    finally:
        await peer.kill()
        await workshop.close()


async def test_notifications_that_a_busy_peer_does_not_take_do_not_lose_it(tmp_path: Path) -> None:
    """Its buffer is full for longer than a silent peer is waited for."""
    workshop = Workshop("tcp", tmp_path)
    here = await workshop.node("here", transport=TcpTransport(options=TcpOptions(peer_timeout_s=0.5)))
    peer = await PeerProcess.start("tcp", tmp_path, on_notify="hang")
    try:
        connection = await here.connect(peer.endpoint)
        notes = [connection.write([], 2.5, notify=bytes(1 << 20)) for _ in range(16)]
        assert {type(end) for end in await asyncio.gather(*notes, return_exceptions=True)} == {TransferTimeout}
        assert connection.is_open
        assert (await connection.read(ALL[:1], TIMEOUT_S)).num_bytes == GRANULE
    finally:
        await peer.kill()
        await workshop.close()


async def test_a_restarted_peer_is_not_mistaken_for_the_old_one(kind: str, here: Node, peer: PeerProcess, tmp_path: Path) -> None:
    old = peer.endpoint
    await peer.kill()
    with pytest.raises(PeerLost):
        await here.connect(old)
    successor = await PeerProcess.start(kind, tmp_path)
    try:
        assert (await (await here.connect(successor.endpoint)).read(ALL[:1], TIMEOUT_S)).num_bytes == GRANULE
        if kind == "shm":
            with pytest.raises(PeerLost, match="restarted"):
                await here.connect(old)
    finally:
        await successor.kill()


async def test_nothing_is_left_after_close(kind: str, peer: PeerProcess, tmp_path: Path) -> None:
    gc.collect()
    files, threads = open_files(), set(threading.enumerate())
    await _live_and_close(Workshop(kind, tmp_path), peer)
    gc.collect()
    assert set(open_files().values()) - set(files.values()) == set()
    assert {thread for thread in set(threading.enumerate()) - threads if thread.name.startswith("messenger")} == set()
    assert set(os.listdir(tmp_path)) <= {"peer.sock"}  # a killed process cannot remove its socket; its successor does
    assert "springtide-arena" not in mappings()


async def _live_and_close(workshop: Workshop, peer: PeerProcess) -> None:
    here, back = await workshop.node("here"), await workshop.node("back")
    lost = await here.connect(peer.endpoint)
    await lost.read(ALL, TIMEOUT_S)
    await (await back.connect(here.endpoint)).write(ALL, TIMEOUT_S, notify=b"x")
    await peer.kill()
    await until(lambda: not lost.is_open)
    await workshop.close()
