"""Which way a Messenger goes to a peer, and what it keeps of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from messenger_support import GRANULE, TIMEOUT_S, until
from prometheus_client import REGISTRY

from messenger.arena_memory import SharedMemory
from messenger.base import Endpoint, InvalidSlice, Slice, Transport
from messenger.metered import MeteredConnection
from messenger.router import Messenger, host_id
from messenger.shm import ShmTransport
from messenger.tcp.transport import TcpTransport
from springtide.errors import PeerLost
from springtide.ids import new_incarnation
from tests.support.faulty_transport import FaultyTransport
from tests.support.inproc_transport import InprocHub, InprocTransport
from tests.support.transport_faults import FaultPlan, TransferFault

ONE = [Slice(0, 0, GRANULE, 0)]


class Peer:
    def __init__(self, name: str, make: Callable[[SharedMemory], list[Transport]]) -> None:
        self.memory = SharedMemory.create(4, GRANULE, new_incarnation())
        self.notes: list[tuple[str, bytes]] = []
        self.messenger = Messenger(
            make(self.memory),
            self.memory.region,
            name,
            self.memory.header.incarnation,
            lambda peer, payload: self.notes.append((peer, payload)),
        )
        self.endpoint = Endpoint("", 0, {})

    def _on_notify(self, peer: str, payload: bytes) -> None:
        self.notes.append((peer, payload))

    async def start(self) -> Peer:
        self.endpoint = await self.messenger.start()
        return self

    async def close(self) -> None:
        await self.messenger.close()
        self.memory.close()


@pytest.fixture
async def new_peer(tmp_path: Path) -> AsyncIterator[Callable[[str], Peer]]:
    made: list[Peer] = []

    def make(name: str) -> Peer:
        made.append(Peer(name, lambda memory: [ShmTransport(memory, tmp_path / f"{name}.sock"), TcpTransport()]))
        return made[-1]

    yield make
    for peer in made:
        await peer.close()


@pytest.fixture
async def pair(new_peer: Callable[[str], Peer]) -> tuple[Peer, Peer]:
    return await new_peer("here").start(), await new_peer("there").start()


async def transport_to(here: Peer, endpoint: Endpoint) -> str:
    connection = await here.messenger.connect(endpoint)
    assert isinstance(connection, MeteredConnection)
    assert (await connection.read(ONE, TIMEOUT_S)).num_bytes == GRANULE
    return connection.transport


def test_an_endpoint_survives_json() -> None:
    endpoint = Endpoint("host", 2**62 + 1, {"shm": "/run/a.sock", "tcp": "[::1]:99"})
    assert Endpoint.from_json(endpoint.to_json()) == endpoint


@pytest.mark.parametrize("text", ["", "{}", "[]", "3", '{"host_id": "a", "incarnation": "b", "addresses": {}}'])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Endpoint.from_json(text)


async def test_shared_memory_is_preferred_on_one_host(pair: tuple[Peer, Peer]) -> None:
    here, there = pair
    assert there.endpoint.host_id == host_id()
    assert await transport_to(here, there.endpoint) == "shm"


async def test_another_host_is_reached_by_tcp(pair: tuple[Peer, Peer]) -> None:
    here, there = pair
    assert await transport_to(here, replace(there.endpoint, host_id="elsewhere")) == "tcp"


async def test_tcp_stands_in_when_shared_memory_cannot_be_had(pair: tuple[Peer, Peer]) -> None:
    here, there = pair
    addresses = {**there.endpoint.addresses, "shm": "/nowhere/at-all.sock"}
    assert await transport_to(here, replace(there.endpoint, addresses=addresses)) == "tcp"


async def test_a_peer_without_a_common_transport_is_lost_with_the_reason(pair: tuple[Peer, Peer]) -> None:
    here, there = pair
    with pytest.raises(PeerLost, match="no transport in common"):
        await here.messenger.connect(replace(there.endpoint, addresses={"rdma": "x"}))
    with pytest.raises(PeerLost, match=r"shm: .*tcp: "):
        await here.messenger.connect(replace(there.endpoint, addresses={"shm": "/nowhere.sock", "tcp": "127.0.0.1:1"}))


async def test_a_messenger_reaches_itself(pair: tuple[Peer, Peer]) -> None:
    here, _ = pair
    connection = await here.messenger.connect(here.endpoint)
    await connection.write([Slice(0, GRANULE, GRANULE, 0)], TIMEOUT_S, notify=b"self-test")
    assert here.notes == [("here", b"self-test")]


async def test_connects_at_once_share_one_connection(pair: tuple[Peer, Peer]) -> None:
    here, there = pair
    connections = await asyncio.gather(*(here.messenger.connect(there.endpoint) for _ in range(5)))
    assert len({id(connection) for connection in connections}) == 1


async def test_a_cancelled_connect_does_not_take_the_others_with_it(pair: tuple[Peer, Peer]) -> None:
    here, there = pair
    first = asyncio.create_task(here.messenger.connect(there.endpoint))
    second = asyncio.create_task(here.messenger.connect(there.endpoint))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).is_open


async def test_a_broken_connection_is_replaced(pair: tuple[Peer, Peer]) -> None:
    here, there = pair
    first = await here.messenger.connect(there.endpoint)
    await first.close()
    second = await here.messenger.connect(there.endpoint)
    assert second is not first
    assert second.is_open


async def test_a_failed_connect_is_tried_again_the_next_time(new_peer: Callable[[str], Peer]) -> None:
    here, there = await new_peer("here").start(), await new_peer("there").start()
    wrong = replace(there.endpoint, addresses={"tcp": "127.0.0.1:1"})
    with pytest.raises(PeerLost):
        await here.messenger.connect(wrong)
    assert (await here.messenger.connect(there.endpoint)).is_open


async def test_closing_one_messenger_breaks_the_others_connection_and_refuses_new_ones(pair: tuple[Peer, Peer]) -> None:
    here, there = pair
    connection = await here.messenger.connect(there.endpoint)
    await there.messenger.close()
    await until(lambda: not connection.is_open)
    with pytest.raises(PeerLost):
        await here.messenger.connect(there.endpoint)
    with pytest.raises(PeerLost, match="closed"):
        await there.messenger.connect(here.endpoint)


async def test_a_peer_is_fenced_once_none_of_its_connections_is_left(pair: tuple[Peer, Peer]) -> None:
    here, there = pair
    connection = await here.messenger.connect(there.endpoint)
    await connection.write([], TIMEOUT_S, notify=b"x")
    assert not await there.messenger.fence("here", here.endpoint.incarnation)
    await connection.close()
    async with asyncio.timeout(TIMEOUT_S):
        while not await there.messenger.fence("here", here.endpoint.incarnation):
            pass


async def test_a_start_that_fails_leaves_nothing_listening(tmp_path: Path) -> None:
    hub = InprocHub()
    peer = Peer("here", lambda memory: [InprocTransport(hub, "here"), ShmTransport(memory, tmp_path / ("x" * 200))])
    with pytest.raises(ValueError, match="107 bytes"):
        await peer.start()
    with pytest.raises(PeerLost):
        hub.find("here")
    peer.memory.close()


def test_each_transport_may_be_given_once() -> None:
    with pytest.raises(ValueError, match="tcp"):
        Peer("here", lambda memory: [TcpTransport(), TcpTransport()])
    with pytest.raises(ValueError, match="at least one"):
        Peer("here", lambda memory: [])


async def test_metrics_count_bytes_batches_and_failures(pair: tuple[Peer, Peer]) -> None:
    here, there = pair

    def value(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(f"springtide_messenger_{name}", {"transport": "shm", **labels}) or 0.0

    def readings() -> list[float]:
        return [
            value("bytes_total", direction="read"),
            value("batches_total", direction="read"),
            value("batch_seconds_count", direction="read"),
            value("failures_total", kind="stale_slice"),
            value("failures_total", kind="invalid"),
        ]

    before = readings()
    connection = await here.messenger.connect(there.endpoint)
    await connection.read([*ONE, Slice(0, GRANULE, 5, 99)], TIMEOUT_S)
    with pytest.raises(InvalidSlice):
        await connection.read([Slice(0, 0, 0, 0)], TIMEOUT_S)
    assert [after - earlier for after, earlier in zip(readings(), before, strict=True)] == [GRANULE, 2, 2, 1, 1]


async def test_a_connection_that_dropped_is_made_anew_for_the_caller_of_a_messenger() -> None:
    hub = InprocHub()
    faults = FaultPlan([TransferFault("drop", times=1)])
    here = await Peer("here", lambda memory: [FaultyTransport(InprocTransport(hub, "here"), faults)]).start()
    there = await Peer("there", lambda memory: [InprocTransport(hub, "there")]).start()
    first = await here.messenger.connect(there.endpoint)
    with pytest.raises(PeerLost, match="drop"):
        await first.read(ONE, TIMEOUT_S)
    second = await here.messenger.connect(there.endpoint)
    assert second is not first
    assert (await second.read(ONE, TIMEOUT_S)).num_bytes == GRANULE
    await here.close()
    await there.close()
