"""One Conductor as a gateway speaks to it: how it is told what happens, also when it is slow, hangs or is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from gateway_cluster import until

from gateway import conductor_link
from gateway.conductor_link import MOST_KEPT, ConductorPeer
from springtide.errors import Unavailable
from springtide.ids import AttemptId, GatewayId, RequestId
from springtide.protocol.attempts import Phase, Progress
from springtide.protocol.scheduling import Schedule
from springtide.rpc import conductor_pb2, conductor_pb2_grpc
from springtide.rpc.channels import new_server

GATEWAY = GatewayId("gateway-0")
REQUEST = Schedule(AttemptId("a.1"), RequestId("a"), GATEWAY, [], 1, 1)


class HangingConductor(conductor_pb2_grpc.ConductorServicer):
    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.told: list[Sequence[conductor_pb2.AttemptReport]] = []
        self.goes_on = asyncio.Event()
        """Until it is set, whoever reports is not answered."""

    async def Schedule(self, request: conductor_pb2.ScheduleRequest, context: Any) -> conductor_pb2.ScheduleReply:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError("it waits for ever")

    async def Advance(self, request: conductor_pb2.AdvanceRequest, context: Any) -> conductor_pb2.AdvanceReply:
        self.told.append(request.reports)
        await self.goes_on.wait()
        return conductor_pb2.AdvanceReply()

    async def Renew(self, request: conductor_pb2.RenewRequest, context: Any) -> conductor_pb2.RenewReply:
        return conductor_pb2.RenewReply()

    @property
    def names(self) -> list[str]:
        return [report.progress.attempt_id for reports in self.told for report in reports]


def ended(number: int) -> Progress:
    return Progress(AttemptId(f"a{number}"), Phase.FINISHED)


@pytest.fixture
async def hanging() -> AsyncIterator[tuple[HangingConductor, ConductorPeer]]:
    conductor, server = HangingConductor(), new_server()
    conductor_pb2_grpc.add_ConductorServicer_to_server(conductor, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    peer = ConductorPeer(address, GATEWAY, list, lambda hung: None)
    yield conductor, peer
    await peer.close(patience_s=0.0)
    await server.stop(None)


async def test_a_call_outlives_the_hanging_up_on_its_conductor_and_fails_as_every_other(
    hanging: tuple[HangingConductor, ConductorPeer],
) -> None:
    conductor, peer = hanging
    call = asyncio.create_task(peer.schedule(REQUEST))
    await conductor.asked.wait()
    await peer.retire()
    with pytest.raises(Unavailable, match="did not answer"):
        await call


async def test_a_call_that_does_not_outlive_it_fails_as_every_other_too(
    hanging: tuple[HangingConductor, ConductorPeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when this process stood still meanwhile, and finds the grace over with the answer's deadline."""
    monkeypatch.setattr(conductor_link, "_GRACE_S", 0.0)
    conductor, peer = hanging
    call = asyncio.create_task(peer.schedule(REQUEST))
    await conductor.asked.wait()
    await peer.retire()
    with pytest.raises(Unavailable, match="did not answer"):
        await call


async def test_who_asks_can_be_cancelled(hanging: tuple[HangingConductor, ConductorPeer]) -> None:
    conductor, peer = hanging
    call = asyncio.create_task(peer.schedule(REQUEST))
    await conductor.asked.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_what_gathers_while_a_report_is_in_flight_goes_in_one_message_in_order(
    hanging: tuple[HangingConductor, ConductorPeer],
) -> None:
    conductor, peer = hanging
    peer.report(ended(0))
    await until(lambda: conductor.told)
    for number in range(1, 500):
        peer.report(ended(number))
    conductor.goes_on.set()
    await until(lambda: len(conductor.names) == 500)
    assert conductor.names == [f"a{number}" for number in range(500)]
    assert len(conductor.told) == 2


async def test_no_more_is_kept_for_a_slow_conductor_than_it_can_be_told_soon(hanging: tuple[HangingConductor, ConductorPeer]) -> None:
    conductor, peer = hanging
    peer.report(ended(0))
    await until(lambda: conductor.told)
    last = 3 * MOST_KEPT
    for number in range(1, last + 1):
        peer.report(ended(number))
    conductor.goes_on.set()
    await until(lambda: f"a{last}" in conductor.names)
    assert conductor.names == ["a0", *(f"a{number}" for number in range(last - MOST_KEPT + 1, last + 1))], "the oldest are lost"


async def test_an_orderly_end_waits_for_what_is_still_to_be_told(hanging: tuple[HangingConductor, ConductorPeer]) -> None:
    conductor, peer = hanging
    conductor.goes_on.set()
    for number in range(100):
        peer.report(ended(number))
    await peer.close(patience_s=10.0)
    assert len(conductor.names) == 100
