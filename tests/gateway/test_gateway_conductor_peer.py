"""One Conductor as a gateway speaks to it: how it is told what happens, also when it is slow, hangs or is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from gateway_cluster import serving

from gateway import conductor_link
from gateway.conductor_link import MOST_KEPT, ConductorPeer
from springtide.credentials import OPEN
from springtide.errors import Unavailable
from springtide.ids import AttemptId, GatewayId, RequestId
from springtide.protocol.attempts import Phase, Progress
from springtide.protocol.scheduling import Schedule
from springtide.rpc import conductor_pb2
from springtide.rpc.conductor_pb2 import ScheduleAnswer, ScheduleQuestion
from springtide.rpc.frames import Frames
from springtide.rpc.questions import AskedServicer
from tests.support.waiting import until

GATEWAY = GatewayId("gateway-0")
REQUEST = Schedule(AttemptId("a.1"), RequestId("a"), GATEWAY, [], 1, 1)


class HangingConductor(AskedServicer):
    def __init__(self) -> None:
        super().__init__(OPEN)
        self._answering: list[asyncio.Task[None]] = []
        self.asked = asyncio.Event()
        self.answers = asyncio.Event()
        """Until it is set, whoever asks is not answered."""
        self.watches = 0
        self.told: list[Sequence[conductor_pb2.AttemptReport]] = []
        self.goes_on = asyncio.Event()
        """Until it is set, whoever reports is not answered."""

    def answer(self, connection: Frames, question: ScheduleQuestion) -> None:
        self._answering.append(asyncio.create_task(self._answer(connection, question)))

    async def _answer(self, connection: Frames, question: ScheduleQuestion) -> None:
        answer = ScheduleAnswer(number=question.number)
        match question.WhichOneof("question"):
            case "request":
                self.asked.set()
                await self.answers.wait()
                answer.refusal = f"of {question.request.attempt_id}"
            case "advance":
                self.told.append(question.advance.reports)
                await self.goes_on.wait()
                answer.advanced.SetInParent()
            case "renew":
                answer.renewed.SetInParent()
        connection.send(answer.SerializeToString())

    async def hang_up(self) -> None:
        await super().hang_up()
        for answering in self._answering:
            answering.cancel()

    async def WatchOrders(self, request: conductor_pb2.WatchOrdersRequest, context: Any) -> AsyncIterator[conductor_pb2.GatewayOrders]:
        self.watches += 1
        yield conductor_pb2.GatewayOrders()
        await asyncio.Event().wait()

    @property
    def names(self) -> list[str]:
        return [report.progress.attempt_id for reports in self.told for report in reports]


def ended(number: int) -> Progress:
    return Progress(AttemptId(f"a{number}"), Phase.FINISHED)


@pytest.fixture
async def hanging() -> AsyncIterator[tuple[HangingConductor, ConductorPeer]]:
    conductor = HangingConductor()
    async with serving(conductor) as address:
        peer = ConductorPeer(address, GATEWAY, list, lambda hung: None)
        yield conductor, peer
        await peer.close(patience_s=0.0)


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


async def test_who_hangs_is_told_also_after_the_connection_was_given_up(
    hanging: tuple[HangingConductor, ConductorPeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Conductor that stood still: its calls were not answered in time, so their channel was closed."""
    monkeypatch.setattr(conductor_link, "_GRACE_S", 0.0)
    monkeypatch.setattr(conductor_link, "CALL_TIMEOUT_S", 0.2)
    conductor, peer = hanging
    await until(lambda: conductor.watches == 1)
    with pytest.raises(Unavailable, match="nothing came"):
        await peer.schedule(REQUEST)
    await until(lambda: conductor.watches == 2)
