"""One Conductor as a gateway speaks to it, when it hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conductor.gateway.conductor_peer import ConductorPeer
from springtide.errors import Unavailable
from springtide.ids import GatewayId
from springtide.rpc import conductor_pb2, conductor_pb2_grpc
from springtide.rpc.channels import new_server


class HangingConductor(conductor_pb2_grpc.ConductorServicer):
    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def Schedule(self, request: conductor_pb2.ScheduleRequest, context: Any) -> conductor_pb2.ScheduleReply:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError("it waits for ever")


@pytest.fixture
async def hanging() -> AsyncIterator[tuple[HangingConductor, ConductorPeer]]:
    conductor, server = HangingConductor(), new_server()
    conductor_pb2_grpc.add_ConductorServicer_to_server(conductor, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    peer = ConductorPeer(address, GatewayId("gateway-0"), list)
    yield conductor, peer
    await peer.close(patience_s=0.0)
    await server.stop(None)


async def test_a_call_outlives_the_hanging_up_on_its_conductor_and_fails_as_every_other(
    hanging: tuple[HangingConductor, ConductorPeer],
) -> None:
    conductor, peer = hanging
    call = asyncio.create_task(peer.schedule(conductor_pb2.ScheduleRequest()))
    await conductor.asked.wait()
    await peer.retire()
    with pytest.raises(Unavailable, match="did not answer"):
        await call
