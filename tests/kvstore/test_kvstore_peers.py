"""A store knows the stores that it deals with, however many there have been."""

from __future__ import annotations

import asyncio
import gc
import os

import numpy as np
import pytest
from kvstore_support import SPEC

from kvstore.server.shared.peers import FORGOTTEN_S, IDLE_S, Peers
from messenger.base import Connection, Region, Traffic
from messenger.router import Messenger
from springtide.clock import ManualClock
from springtide.credentials import OPEN
from springtide.errors import PeerLost
from springtide.rpc import channels
from springtide.rpc import store_pb2 as pb
from springtide.rpc.store_pb2_grpc import StoreServicer, add_StoreServicer_to_server
from tests.support.inproc_transport import InprocHub, InprocTransport

GRANULE = 64


def messenger_of(hub: InprocHub, name: str, incarnation: int) -> Messenger:
    region = Region(np.zeros(GRANULE, np.uint8), np.ones(1, np.uint64), GRANULE)
    return Messenger([InprocTransport(hub, name)], region, name, incarnation, lambda peer, payload: None)


class Other(StoreServicer):
    """Another store, as far as it is asked who it is."""

    def __init__(self, hub: InprocHub, incarnation: int) -> None:
        self.incarnation = incarnation
        self.layers: list[pb.LayersAt] = []
        self._messenger = messenger_of(hub, f"other-{incarnation}", incarnation)
        self._server = channels.new_server()

    async def start(self) -> str:
        self.endpoint = await self._messenger.start()
        add_StoreServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def Describe(self, request: pb.DescribeRequest, context: object) -> pb.DescribeReply:
        return pb.DescribeReply(endpoint=self.endpoint.to_json(), incarnation=self.incarnation, layers=self.layers)

    async def close(self) -> None:
        await self._server.stop(None)
        await self._messenger.close()


def num_open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def test_of_stores_that_come_and_go_nothing_is_left() -> None:
    hub, clock = InprocHub(), ManualClock()
    messenger = messenger_of(hub, "here", 1)
    await messenger.start()
    peers = Peers(messenger, OPEN, clock, SPEC)
    before, most = 0, 0
    for incarnation in range(2, 32):
        other = Other(hub, incarnation)
        address = await other.start()
        connection = await peers.connect(address, incarnation)
        assert isinstance(connection, Connection) and connection.is_open
        await other.close()
        clock.advance(IDLE_S / 4)
        await peers.hang_up_idle()
        most = max(most, len(peers))
        if incarnation == 11:
            before = num_open_files()
    assert most == 4, "those of the last minute"
    assert num_open_files() <= before
    clock.advance(2 * IDLE_S)
    await peers.hang_up_idle()
    assert len(peers) == 0
    await peers.close()
    await messenger.close()


async def test_a_store_that_is_asked_again_and_again_is_not_hung_up() -> None:
    hub, clock = InprocHub(), ManualClock()
    messenger, other = messenger_of(hub, "here", 1), Other(hub, 2)
    await messenger.start()
    address = await other.start()
    peers = Peers(messenger, OPEN, clock, SPEC)
    for _ in range(5):
        assert (await peers.stub(address).Describe(pb.DescribeRequest(), timeout=5.0)).incarnation == 2
        clock.advance(IDLE_S * 0.9)
        await peers.hang_up_idle()
        assert len(peers) == 1
    assert (await peers.connect(address, 2)).is_open
    link = peers.link(address)
    clock.advance(2 * IDLE_S)
    await peers.hang_up_idle()
    assert len(peers) == 0
    assert peers.link(address) is link, "whoever is still to write there knows how fast the way is, and whom to watch"
    assert (await peers.connect(address, 2)).is_open, "it is called anew"
    clock.advance(2 * FORGOTTEN_S)
    await peers.hang_up_idle()
    assert peers.link(address) is not link
    await peers.close()
    await other.close()
    await messenger.close()


async def test_what_comes_of_any_store_of_a_bundle_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = InprocHub()
    messenger, first, second = messenger_of(hub, "here", 1), Other(hub, 2), messenger_of(hub, "second", 3)
    await messenger.start()
    address, endpoints = await first.start(), [first.endpoint, await second.start()]
    half = SPEC.layers // 2
    first.layers = [
        pb.LayersAt(layer_begin=begin, layer_end=end, endpoint=endpoint.to_json())
        for begin, end, endpoint in zip((0, half), (half, SPEC.layers), endpoints, strict=True)
    ]
    monkeypatch.setattr(messenger, "traffic", {2: Traffic(round_trip_s=0.1), 3: Traffic(round_trip_s=0.7)}.__getitem__)
    peers = Peers(messenger, OPEN, ManualClock(), SPEC)
    await peers.connect(address, 2)
    assert peers.round_trip_s(address) == 0.7
    await peers.close()
    await first.close()
    for each in (messenger, second):
        await each.close()


async def test_another_incarnation_at_the_same_address_is_not_taken_for_the_one_before() -> None:
    hub = InprocHub()
    messenger, other = messenger_of(hub, "here", 1), Other(hub, 2)
    await messenger.start()
    address = await other.start()
    peers = Peers(messenger, OPEN, ManualClock(), SPEC)
    with pytest.raises(PeerLost, match="has restarted"):
        await peers.connect(address, 3)
    await peers.close()
    await other.close()
    await messenger.close()


async def test_work_with_a_store_has_ended_when_it_is_over_however_often_it_is_cancelled() -> None:
    messenger = messenger_of(InprocHub(), "here", 1)
    await messenger.start()
    peers = Peers(messenger, OPEN, ManualClock(), SPEC)
    begun, ending, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def takes_long_to_end() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            ending.set()
            await asyncio.sleep(0.2)
            ended.set()

    watched = asyncio.create_task(peers.while_it_lives("127.0.0.1:1", takes_long_to_end(), silence_s=15.0))
    await begun.wait()
    watched.cancel()
    await ending.wait()
    watched.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watched
    assert ended.is_set()
    await peers.close()
    await messenger.close()


async def test_work_that_ends_while_its_store_is_asked_does_not_wait_for_the_answer() -> None:
    hub, asked = InprocHub(), asyncio.Event()
    messenger, other = messenger_of(hub, "here", 1), Other(hub, 2)

    async def say_nothing(request: pb.DescribeRequest, context: object) -> pb.DescribeReply:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    other.Describe = say_nothing  # type: ignore[method-assign]
    await messenger.start()
    address = await other.start()
    peers = Peers(messenger, OPEN, ManualClock(), SPEC)
    assert await peers.while_it_lives(address, asked.wait(), silence_s=15.0)
    await peers.close()
    await other.close()
    await messenger.close()
