"""The load of the serving benchmark, and what is made of what was seen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from benchmarks import serve_load as load
from benchmarks import serve_picture, serve_sweep
from benchmarks.serve import ADMITTING, SPRINGTIDE, VLLM, Runs, curves, objectives_of, rows
from benchmarks.serve_load import KINDS, LONG, SHORT, InFlightLimit, Objective, Records
from benchmarks.serve_sweep import LIMITS, Setting, Sweep
from benchmarks.vllm_server import ServerSettings, VllmServers
from deploy.bench.driver import REFUSED
from deploy.bench.statistics import RequestRecord

OBJECTIVES = {LONG.name: Objective(1000, 100), SHORT.name: Objective(500, 50)}


def request(sent_s: float, ttft_s: float, tbt_s: float, error: str | None = None) -> RequestRecord:
    times = () if error else (sent_s + ttft_s, sent_s + ttft_s + tbt_s)
    return RequestRecord(sent_s, times, sent_s + 1, 8, 2, 0, error)


def records(chat: RequestRecord) -> Records:
    return {LONG.name: [request(0, 0.9, 0.09), request(0.5, 0.2, 0.2), request(9, 0.1, 0.05)], SHORT.name: [chat]}


def test_kinds_share_the_rate_and_a_document_its_questions() -> None:
    assert sum(kind.share for kind in KINDS) == 1
    workloads = [workload for kind in KINDS for workload in kind.workloads(4.0, 30.0, seed=7)]
    assert sum(workload.rate or 0 for workload in workloads) == pytest.approx(4.0)
    documents = LONG.workloads(4.0, 30.0, seed=7)
    shared = round(LONG.prompt_tokens * LONG.shared_prefix)
    first, second = ([prompt[:shared] for prompt in workload.prompts()] for workload in documents)
    assert all(prefix == first[0] for prefix in first) and first[0] != second[0]


def test_objectives_are_multiples_of_the_faster_system() -> None:
    slow, fast = Objective(100, 20), Objective(80, 30)
    found = objectives_of([dict.fromkeys(OBJECTIVES, slow), dict.fromkeys(OBJECTIVES, fast)])
    assert found[LONG.name] == Objective(800, 100)


def runs_of(**chats: RequestRecord) -> dict[str, Runs]:
    """Ours as it is by default and with admission `baseline`, and vLLM's, one run at each of two rates."""
    names = {"ours": SPRINGTIDE, "admitting": ADMITTING, "vllm": VLLM}
    return {name: Runs({rate: [records(chats[key])] for rate in (1.0, 2.0)}) for key, name in names.items()}


GOOD, LATE, REFUSAL = request(1, 0.4, 0.04), request(1, 0.6, 0.04), request(1, 0, 0, error=REFUSED)


def test_goodput_is_over_the_time_in_which_requests_arrive() -> None:
    made = {(row.row, row.case): row for row in rows(runs_of(ours=GOOD, admitting=LATE, vllm=LATE), [1.0, 2.0], OBJECTIVES)}
    goodput = made["goodput", "2 requests/s"]
    # Three of four requests, and two; the last answer of all comes long after the last request.
    assert (goodput.ours, goodput.peer) == (pytest.approx(1.5), pytest.approx(1.0))
    assert (goodput.ratio, goodput.wanted, goodput.met) == (pytest.approx(1.5), 1.0, True)
    assert made["goodput", "1 requests/s"].ours == pytest.approx(0.75)
    admitting = made["goodput, admission `baseline`", "2 requests/s"]
    assert (admitting.ratio, admitting.wanted) == (pytest.approx(1.0), None)
    assert made["TTFT p90 of chats", "1 requests/s"].ratio == pytest.approx(1.5)


def test_a_ratio_is_of_one_rate_and_of_what_was_served() -> None:
    made = rows(runs_of(ours=GOOD, admitting=GOOD, vllm=REFUSAL), [1.0, 2.0], OBJECTIVES)
    assert {row.case for row in made} == {"1 requests/s", "2 requests/s"}
    by_name = {row.row: row for row in made}
    latency = by_name["TBT p99 of chats"]
    assert (latency.peer, latency.ratio, latency.wanted, latency.met) == (None, None, None, None)
    assert (by_name["served chats"].ours, by_name["served chats"].peer) == (100, 0)
    assert (by_name["refused chats"].ours, by_name["refused chats"].peer) == (0, 100)
    assert by_name["refused documents"].peer == 0
    refused = rows(runs_of(ours=REFUSAL, admitting=REFUSAL, vllm=GOOD), [1.0], OBJECTIVES)
    assert not any(row.row.startswith("TTFT p90 of chats") for row in refused)


def test_a_figure_is_of_as_many_rounds_as_there_were() -> None:
    runs = runs_of(ours=GOOD, admitting=GOOD, vllm=LATE)
    for of_system in runs.values():
        of_system.records[1.0].append(records(LATE))
    made = {(row.row, row.case): row for row in rows(runs, [1.0], OBJECTIVES)}
    goodput = made["goodput", "1 requests/s"]
    assert (goodput.rounds, goodput.spread) == (2, (pytest.approx(0.5), pytest.approx(0.75)))


def test_the_sweep_takes_the_best_setting_of_each_rate_and_prefers_what_has_more_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[float, Setting]] = []
    quick, slow = ServerSettings(64, 2), ServerSettings(2048, 2)
    chats = {(1.0, quick): GOOD, (1.0, slow): request(1, 0.2, 0.02), (2.0, quick): GOOD, (2.0, slow): LATE}

    class Server:
        @contextlib.contextmanager
        def at_work(self) -> Iterator[str]:
            yield ""

    class Servers:
        server: ServerSettings

        def get(self, server: ServerSettings) -> Server:
            self.server = server
            return Server()

        def keep(self, wanted: object) -> None: ...

    servers = Servers()

    def loaded(url: str, rate: float, seconds: float, seed: int, limit: InFlightLimit | None = None) -> Records:
        tried.append((rate, Setting(servers.server, limit)))
        return records(LATE if limit is not None else chats.get((rate, servers.server), LATE))

    monkeypatch.setattr(load, "loaded", loaded)
    monkeypatch.setattr(serve_sweep, "warm_up", lambda url, seed: None)
    sweep = Sweep(cast(VllmServers, servers), OBJECTIVES, 1.0, seed=0)
    sweep.run([1.0, 2.0], [64, 2048], 2)
    assert (sweep.best(1.0), sweep.best(2.0)) == (Setting(slow), Setting(quick))
    # The best chunk of a rate with a thread less, and with every limit.
    assert (1.0, Setting(ServerSettings(2048, 1))) in tried and (2.0, Setting(ServerSettings(64, 1))) in tried
    assert (1.0, Setting(ServerSettings(64, 1))) not in tried
    assert {setting for rate, setting in tried if rate == 1.0 and setting.limit} == {Setting(slow, limit) for limit in LIMITS}
    assert len(tried) == len(set(tried)) == len(sweep.rows())


def test_the_picture_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_picture, "PICTURE", tmp_path / "serve.png")
    serve_picture.draw([1.0, 2.0], curves(runs_of(ours=GOOD, admitting=GOOD, vllm=LATE), [1.0, 2.0], OBJECTIVES), OBJECTIVES)
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")
