"""Who follows an engine, whose turn may be long in coming."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from conductor_nodes import Engine

from conductor.core.types.events import Event, InstanceDown, InstanceUp, LoadReported
from conductor.metrics import SILENCES
from conductor.server.report_queue import Reporter, ReportQueue
from conductor.server.runner import CoreRunner
from conductor.server.silence import Silences
from conductor.server.watch import LoadWatcher
from springtide.membership import Member
from springtide.rpc import node_pb2_grpc
from springtide.rpc.channels import new_server
from tests.support.waiting import until

SILENCE_S = 0.75


class Events:
    """Takes what is fed."""

    def __init__(self) -> None:
        self.fed: list[Event] = []

    def feed(self, event: Event) -> list[Any]:
        self.fed.append(event)
        return []

    def count(self, kind: type[Any]) -> int:
        return sum(isinstance(event, kind) for event in self.fed)


class NobodysTurn(ReportQueue):
    """After the first report nobody's turn comes until `go_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = False
        self.paused: set[Reporter] = set()

    def put(self, reporter: Reporter, message: bytes) -> None:
        if self.goes_on or not self.paused:
            reporter.report(message)
        if not self.goes_on:
            reporter.pause()
            self.paused.add(reporter)


def silences() -> float:
    """That were counted of prefill engines, whichever had room for a series of their own."""
    samples = (sample for family in SILENCES.collect() for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name.endswith("_total") and sample.labels["role"] == "prefill")


async def test_an_engine_whose_turn_does_not_come_is_not_lost_for_being_unread_and_one_that_hangs_is() -> None:
    engine, server, events, queue, before = Engine("p0", "prefill"), new_server(), Events(), NobodysTurn(), silences()
    node_pb2_grpc.add_PrefillNodeServicer_to_server(engine, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    member = Member("prefill", "p0", engine.incarnation, address, "p0", details={"store_address": "127.0.0.1:1"})
    watcher = LoadWatcher(member, cast(CoreRunner, events), queue, Silences(SILENCE_S))
    try:
        await asyncio.sleep(3 * SILENCE_S)
        assert (events.count(InstanceUp), events.count(LoadReported), events.count(InstanceDown)) == (1, 1, 0)
        queue.goes_on = True
        await until(lambda: events.count(LoadReported) >= 3)
        assert (events.count(InstanceUp), events.count(InstanceDown)) == (1, 0)
        engine.goes_on.clear()
        assert silences() == before
        await until(lambda: events.count(InstanceDown))
        assert watcher.hung
        assert silences() == before + 1
    finally:
        engine.goes_on.set()
        await watcher.stop()
        await server.stop(None)


async def test_who_is_cancelled_while_it_stops_a_watcher_ends_as_cancelled() -> None:
    member = Member("prefill", "p0", 1, "127.0.0.1:1", "p0", details={"store_address": "127.0.0.1:1"})
    watcher = LoadWatcher(member, cast(CoreRunner, Events()), ReportQueue(), Silences(SILENCE_S))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(watcher.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
