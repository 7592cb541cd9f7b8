"""The load of the serving benchmark, and what is made of what was seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import serve_picture
from benchmarks.serve import SPRINGTIDE, VLLM, Runs, curves, objectives_of, rows
from benchmarks.serve_load import KINDS, LONG, SHORT, Objective, Records
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


def test_goodput_counts_what_keeps_the_objectives_of_its_kind() -> None:
    runs = {
        SPRINGTIDE: Runs({1.0: [records(request(1, 0.4, 0.04))], 2.0: [records(request(1, 0.4, 0.04))]}),
        VLLM: Runs({1.0: [records(request(1, 0.6, 0.04))], 2.0: [records(request(1, 0, 0, error="429"))]}),
    }
    made = {row.row: row for row in rows(runs, [1.0, 2.0], OBJECTIVES)}
    goodput = made["goodput, 1 requests/s"]
    assert (goodput.ours, goodput.peer, goodput.ratio) == (pytest.approx(0.3), pytest.approx(0.2), pytest.approx(1.5))
    assert made["highest goodput"].met
    assert made["TTFT p90 of chats, 1 requests/s"].ratio == pytest.approx(1.5)
    assert made["TTFT p90 of chats, 2 requests/s"].ratio is None


def test_the_picture_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_picture, "PICTURE", tmp_path / "serve.png")
    runs = {system: Runs({rate: [records(request(1, 0.4, 0.04))] for rate in (1.0, 2.0)}) for system in (SPRINGTIDE, VLLM)}
    serve_picture.draw([1.0, 2.0], curves(runs, OBJECTIVES), OBJECTIVES)
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")
