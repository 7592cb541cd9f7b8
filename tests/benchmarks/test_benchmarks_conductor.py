"""What the benchmarks of the Conductor and of replay are made of."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest

from benchmarks import conductor, conductor_core, replay, results
from benchmarks.conductor_process import Answered, Latencies
from benchmarks.driven import OURS, Bench, Driver, Job, microseconds, on_cores
from benchmarks.fake_nodes import INCARNATION
from benchmarks.live_cluster import LiveCluster, instance_id
from benchmarks.pinned import FREE, PINNED, Operation, on_one_core_and_all
from benchmarks.streams import FIRST_WINDOW, StreamConnection, framed
from springtide.protocol import wire
from springtide.protocol.attempts import LiveAttempt, Phase
from springtide.protocol.instances import LoadReport, Role

ANSWERED = Answered(Latencies(1.0, 1.5, 9.0), 200.0, 20_000.0, 15_000.0, 10.0, 0.9, 0.4, 300.0, 1500.0, 0.8)
MEMCPY = Driver("Springtide", "memcpy", OURS)


# ---- a cluster at work ----


def test_engines_report_exactly_the_attempts_that_gateways_renew() -> None:
    live = LiveCluster(workers=5, live=103)
    renewed = {attempt.attempt_id: attempt for renewal in live.renewals() for attempt in renewal.attempts}
    assert len(renewed) == 103
    for role in Role:
        for number in range(5):
            name = instance_id(role, number)

            def is_here(attempt: LiveAttempt, role: Role = role, name: str = name) -> bool:
                in_prefill = attempt.phase is Phase.PREFILL
                return attempt.decode_id == name if role is Role.DECODE else attempt.prefill_id == name and in_prefill

            here = {attempt_id for attempt_id, attempt in renewed.items() if is_here(attempt)}
            for load in live.reports_of(role, number):
                assert load.attempt_ids == here
                assert 0 < load.slots_available < load.slots_total and load.tokens > 0


def test_every_engine_of_a_live_cluster_is_at_work_and_of_an_idle_one_none() -> None:
    live, idle = LiveCluster(500, 10_000), LiveCluster(500, 0)
    for role in Role:
        for number in (0, 1, 250, 499):
            reports = live.reports_of(role, number)
            assert len(reports) > 1 and len(set(reports)) == len(reports)
            assert all(load.running > 0 for load in reports)
            (load,) = idle.reports_of(role, number)
            assert load.running == 0 and not load.attempt_ids
    assert not idle.renewals()


def test_what_is_told_of_a_live_cluster_is_of_the_protocol() -> None:
    live = LiveCluster(3, 40)
    for renewal in live.renewals():
        assert wire.RENEW.decode(wire.RENEW.encode(renewal)) == renewal
    for load in live.reports_of(Role.DECODE, 1):
        report = LoadReport(instance_id(Role.DECODE, 1), INCARNATION, load)
        assert wire.LOAD_REPORT.decode(wire.LOAD_REPORT.encode(report)) == report


def test_the_core_decides_with_attempts_that_live_and_reports_that_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conductor_core, "DECISIONS", 500)
    monkeypatch.setattr(conductor_core, "WARM_UP", 5)
    figures = conductor_core.measure(LiveCluster(4, 40), 8192)
    assert 0 < figures.decision_p50_us <= figures.decision_p99_us
    assert figures.report_us > 0 and figures.renewal_ms > 0


# ---- streams ----


class Said(StreamConnection):
    """Says what it was given to whoever calls."""

    def __init__(self, messages: list[bytes], connections: list[Said]) -> None:
        super().__init__()
        self._messages = messages
        self._connections = connections

    def begun(self) -> None:
        self._connections.append(self)
        self.saying = asyncio.create_task(self._say())

    async def _say(self) -> None:
        for message in self._messages:
            await self.send_in_time(framed(message))


@asynccontextmanager
async def calling(messages: list[bytes]) -> AsyncIterator[tuple[Callable[..., Any], list[Said]]]:
    """How to call who says these messages, and the connections that have come to it."""
    connections: list[Said] = []
    server = await asyncio.get_running_loop().create_server(lambda: Said(messages, connections), "0.0.0.0", 0)
    port = server.sockets[0].getsockname()[1]
    async with grpc.aio.insecure_channel(f"127.1.2.3:{port}") as channel:

        def call(method: str = "Watch") -> Any:
            return channel.unary_stream(f"/a.Service/{method}", request_serializer=None, response_deserializer=None)(b"asked")

        yield call, connections
    server.close()
    await server.wait_closed()


async def test_messages_of_any_size_reach_a_client_of_grpc() -> None:
    messages = [b"a", b"b" * (3 * FIRST_WINDOW), b"", b"c" * 100]
    async with calling(messages) as (call, connections):
        said = call()
        assert [await said.read() for _ in messages] == messages
        assert connections[0].address == "127.1.2.3"
        assert connections[0].send(framed(b"at once"))
        assert await said.read() == b"at once"
        said.cancel()


async def test_what_a_client_does_not_take_in_is_held_back() -> None:
    async with calling([b"first"]) as (call, connections):
        said = call()
        assert await said.read() == b"first"
        one = framed(b"x" * 10_000)
        sent = 0
        while connections[0].send(one):
            sent += 1
            assert sent < 1000, "it is never held back"
        assert sent > 0
        assert [len(await said.read()) for _ in range(sent)] == [10_000] * sent
        said.cancel()


async def test_who_does_not_watch_is_answered_with_an_empty_message() -> None:
    async with calling([b"first"]) as (call, connections):
        for _ in range(2):
            order = call("Replicate")
            assert [await order.read(), await order.read()] == [b"", grpc.aio.EOF]
        assert not connections
        assert await call().read() == b"first"


async def test_a_connection_streams_to_one_call_at_a_time_and_to_another_after_it() -> None:
    async with calling([b"first"]) as (call, connections):
        said = call()
        assert await said.read() == b"first"
        meanwhile = call()
        assert await meanwhile.read() == b""
        assert await meanwhile.read() is grpc.aio.EOF
        said.cancel()
        async with asyncio.timeout(10):
            while connections[0].send(framed(b"")):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await call().read() == b"first"


# ---- one core and all ----


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def affinities(but: Collection[psutil.Process]) -> set[int]:
    """How many cores each process below this one may use, save those that were there before."""
    return {len(child.cpu_affinity()) for child in children().difference(but)}


def test_who_is_pinned_runs_on_one_core_and_who_started_it_as_before() -> None:
    before, others = os.sched_getaffinity(0), children()
    with Bench([Job(replace(MEMCPY, pinned=True), 1, 4096)]):
        assert affinities(others) == {1}
    with Bench([Job(MEMCPY, 1, 4096)]):
        assert affinities(others) == {len(before)}
    with on_cores({min(before)}):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


def test_both_sides_are_compared_on_one_core_and_shown_on_all() -> None:
    operation = Operation("read", "copying", 1, microseconds(), wanted=1e-9)
    rows, left_out = on_one_core_and_all(MEMCPY, Driver("peer", "memcpy", OURS), 1, 4096, [operation])
    assert not left_out
    assert [(row.row, row.case, row.peer_name, row.wanted, row.met) for row in rows] == [
        ("copying", PINNED, "peer", 1e-9, True),
        ("copying", FREE, "peer", None, None),
    ]


# ---- rows ----


def test_the_limit_holds_for_the_most_instances_and_prompts_of_up_to_128k() -> None:
    case = conductor.case_of(30)
    limited = conductor.process_rows("1000 instances, 8k tokens", case, [ANSWERED] * 5, limited=True)
    (row,) = [row for row in limited if row.wanted is not None]
    assert (row.label, row.ours, row.peer, row.met, row.rounds) == (
        "latency p99, 1000 instances, 8k tokens: 30 live an instance",
        1.5,
        2.0,
        True,
        5,
    )
    assert all(row.wanted is None for row in conductor.process_rows("16 instances, 8k tokens", case, [ANSWERED], limited=False))


def test_growth_compares_decisions_under_the_same_load() -> None:
    rows = []
    for instances, decision_us in ((16, 100.0), (1000, 150.0)):
        for question in conductor.QUESTIONS:
            name = f"{instances} instances, {question.num_tokens // 1024}k tokens"
            for live in conductor.LIVE:
                rows += conductor.process_rows(name, conductor.case_of(live), [replace(ANSWERED, decision_us=decision_us)], False)
    grown = conductor.growth(rows)
    assert len(grown) == len(conductor.QUESTIONS) * len(conductor.LIVE)
    assert {(row.ours, row.peer, row.met) for row in grown} == {(1.5, 62.5, True)}


def ours(goodput: int, refused: int) -> dict[str, Any]:
    times = {key: 10.0 for _, key, _ in replay.TIMES}
    return {"requests": 100, "goodput_requests": goodput, "rejected": refused, "hit_rate": 0.2, **times}


def of_the_peer(goodput: int) -> dict[str, Any]:
    return {"goodput_completed_requests": goodput, "prefix_cache_reused_ratio": 0.1, **{key: 20.0 for _, _, key in replay.TIMES}}


def test_replay_compares_times_where_nothing_is_refused_and_goodput_with_the_median_of_the_peers_runs() -> None:
    peers = [of_the_peer(goodput) for goodput in (70, 90, 80)]
    rows = {row.row: row for row in replay.rows("4 workers, 3 x", max(replay.SPEEDS), ours(90, 8), ours(84, 0), peers)}
    goodput = rows["goodput"]
    assert (goodput.ours, goodput.peer, goodput.peer_spread, goodput.rounds) == (90, 80, (70, 90), 3)
    assert (goodput.ratio, goodput.wanted, goodput.met) == (1.125, 1.125, True)
    assert (rows["goodput, nothing refused"].ratio, rows["goodput, nothing refused"].wanted) == (1.05, None)
    assert rows["TTFT p99, nothing refused"].ratio == 2.0
    assert (rows["refused"].ours, rows["refused"].peer) == (8, None)
    assert rows["TTFT p99 of what was served"].ratio is None


def test_the_results_of_one_trace_leave_those_of_others_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(replay, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(replay, "ours", lambda trace, workers, speed, admission: ours(90, 8 if admission == replay.DEFAULT else 0))
    monkeypatch.setattr(replay, "theirs", lambda trace, workers, speed: of_the_peer(80))
    for trace in ("conversation.jsonl", "agents.jsonl"):
        replay.main(["--trace", trace])
    assert {path.name for path in tmp_path.iterdir()} == {"replay-conversation.json", "replay-agents.json"}
    document = json.loads((tmp_path / "replay-agents.json").read_text())
    assert "agents.jsonl" in document["command"]
    assert {row["case"] for row in document["rows"]} == {f"{workers} workers, {speed} x" for workers in (4, 8) for speed in (1, 2, 3)}
    assert {row["rounds"] for row in document["rows"] if row["peer"] is not None} == {replay.PEER_RUNS}
