from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from node_runtime import servicer
from springtide.clock import MonotonicClock
from springtide.ids import Incarnation, InstanceId
from springtide.protocol.instances import Load, LoadReport
from springtide.rpc import node_pb2


class Engine:
    """Whose load a test sets. `looks` counts how often it was asked."""

    def __init__(self) -> None:
        self.changes = servicer.Changes()
        self.running: int | None = 0
        self.looks = 0

    def becomes(self, running: int | None) -> None:
        self.running = running
        self.changes.note()

    def watch(self) -> AsyncIterator[int]:
        return _running(servicer.watch(self._report, self.changes, MonotonicClock()))

    def _report(self) -> LoadReport | None:
        self.looks += 1
        return None if self.running is None else LoadReport(InstanceId("p0"), Incarnation(1), Load(running=self.running))


async def _running(reports: AsyncIterator[node_pb2.LoadReport]) -> AsyncIterator[int]:
    async for report in reports:
        yield report.load.running


async def test_load_reports_end_when_there_is_nothing_more_to_report() -> None:
    engine = Engine()
    reports = engine.watch()
    assert await anext(reports) == 0
    engine.becomes(None)
    assert await anext(reports, "the end") == "the end"


async def test_every_watcher_hears_of_a_change_and_of_the_last_of_several_at_once() -> None:
    engine = Engine()
    watchers = [engine.watch(), engine.watch()]
    assert [await anext(one) for one in watchers] == [0, 0]
    for running in (1, 2, 3):
        engine.becomes(running)
    assert [await anext(one) for one in watchers] == [3, 3]


@pytest.mark.parametrize("change", [lambda engine: None, lambda engine: engine.becomes(0)], ids=["nothing happens", "nothing is different"])
async def test_who_has_nothing_new_says_so_every_second(change: Callable[[Engine], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "SAY_EVERY_S", 0.2)
    engine, loop = Engine(), asyncio.get_running_loop()
    reports = engine.watch()
    began = loop.time()
    assert await anext(reports) == 0
    change(engine)
    assert await anext(reports) == 0
    assert loop.time() - began >= 0.2


async def test_nobody_looks_while_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "REST_S", 0.001)
    engine = Engine()
    reports = engine.watch()
    await anext(reports)
    waiting = asyncio.ensure_future(anext(reports))
    await asyncio.sleep(0.05)
    assert engine.looks == 1 and not waiting.done()
    engine.becomes(1)
    assert await waiting == 1
