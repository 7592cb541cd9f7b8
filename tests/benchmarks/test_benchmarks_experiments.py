"""Throughput under objectives: coupled instances count as they are best, Springtide as it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments import kept, throughput
from benchmarks.experiments.throughput import (
    COUPLED,
    UNCHUNKED,
    WHOLE_PROMPT_TOKENS,
    Objectives,
    Setting,
    best_setting,
    climb,
    coupled_rows,
    find,
)
from simulator.hardware import load
from simulator.run import Plan
from simulator.workload import generate

HARDWARE = load("a100-llama2-70b")
SMALL, LARGE = Setting(256, "cache-aware", "lru"), Setting(4096, "least-loaded", "hit-density")
WHOLE = Setting(WHOLE_PROMPT_TOKENS, "cache-aware", "lru")
OBJECTIVES = Objectives(1000.0, 100.0)


@pytest.fixture(autouse=True)
def kept_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "DIRECTORY", tmp_path / "kept")


def summary(ttft_ms: float, p90_ms: float, p99_ms: float, rejected: int = 0) -> dict[str, Any]:
    return {"ttft_ms_p90": ttft_ms, "gap_ms_p90": p90_ms, "gap_ms_p99": p99_ms, "rejected": rejected}


SWEPT: Mapping[Setting, Mapping[float, dict[str, Any]]] = {
    SMALL: {1.0: summary(900, 60, 60), 2.0: summary(1100, 60, 60), 3.0: summary(9000, 60, 60)},
    LARGE: {1.0: summary(300, 40, 300), 2.0: summary(500, 99, 300), 3.0: summary(600, 101, 300)},
    WHOLE: {1.0: summary(100, 30, 900), 2.0: summary(100, 30, 900, rejected=1), 3.0: summary(800, 110, 900)},
}


def test_coupled_instances_are_named_as_they_are_best_at_each_rate_and_percentile() -> None:
    assert [best_setting(SWEPT, rate, OBJECTIVES, 90) for rate in (1.0, 2.0, 3.0)] == [WHOLE, LARGE, LARGE]
    assert [best_setting(SWEPT, rate, OBJECTIVES, 99) for rate in (1.0, 2.0)] == [SMALL, SMALL]
    large = "coupled [4M], 4,096, least-loaded, hit-density"
    assert [row[:2] + row[-2:] for row in coupled_rows(SWEPT, OBJECTIVES)] == [
        ["coupled [4M], whole prompts", "1", "yes", "no"],
        ["coupled [4M], 256", "1", "yes", "yes"],
        [large, "2", "yes", "no"],
        ["coupled [4M], 256", "2", "no", "no"],
        [large, "3", "no", "no"],
    ]


def test_the_highest_rate_of_coupled_instances_is_that_of_any_setting() -> None:
    found = find({"ours": {1.0: summary(999, 99, 99), 2.0: summary(999, 99, 101)}}, SWEPT, OBJECTIVES)
    assert found.rates["ours"] == {90: 2.0, 99: 1.0}
    assert found.rates[COUPLED] == {90: 2.0, 99: 1.0}
    assert found.rates[UNCHUNKED] == {90: 1.0, 99: 0.0}
    assert found.best == {90: LARGE, 99: SMALL}


def test_routing_and_eviction_are_swept_where_prefixes_are_shared() -> None:
    chunks = len(throughput.CHUNKS) + 1
    alone, shared = generate("poisson", 1.0, 60.0, seed=0), generate("documents", 5.0, 60.0, seed=0)
    assert len(throughput.settings_for(alone)) == chunks
    settings = throughput.settings_for(shared)
    assert len(settings) == len(set(settings)) == 4 * chunks
    assert {setting.chunk_tokens for setting in settings} == {*throughput.CHUNKS, WHOLE_PROMPT_TOKENS}


def test_springtide_is_not_played_beyond_two_rates_in_a_row_that_it_fails() -> None:
    def plan(rate: float) -> Plan:
        return Plan(generate("poisson", rate, 20 / rate, seed=1), HARDWARE, 1, 1, config={"conductor.admission": "baseline"})

    plans = {rate: plan(rate) for rate in (0.01, 10.0, 20.0, 30.0)}
    assert list(climb(plans, Objectives(15_000.0, 1000.0))) == [0.01, 10.0, 20.0]
    assert list(climb(plans, Objectives(1e9, 1e9))) == list(plans)


def test_the_page_names_the_best_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"input_tokens": 4096, "input_cv": 0.01, "output_tokens": 16}
    monkeypatch.setattr(throughput, "WORKLOADS", {"few": ("poisson", few, (0.5, 1.0))})
    monkeypatch.setattr(throughput, "PAPER", {"few": "-"})
    monkeypatch.setattr(throughput, "CHUNKS", (512,))
    monkeypatch.setattr(throughput, "LEAST_S", 30.0)
    monkeypatch.setattr(throughput, "LEAST_REQUESTS", 10)
    swept = throughput._sweep(throughput._workloads("few"), HARDWARE)
    assert [str(setting) for setting in swept] == ["512", "whole prompts"]
    found, parts = throughput._compare("few", swept, HARDWARE, tmp_path)
    assert (tmp_path / "throughput-few.png").exists()
    page = "\n".join(parts)
    for percentile in throughput.TBT_PERCENTILES:
        assert found.rates[COUPLED][percentile] == 1.0, "four instances are idle nearly always"
        assert f"| {COUPLED}, {found.best[percentile]} | 1 |" in page
    overview = "\n".join(throughput._overview({"few": found}))
    assert all(f"1 or more ({setting})" in overview for setting in found.best.values())


RUNS: list[Plan] = []


def run(plan: Plan) -> dict[str, Any]:
    RUNS.append(plan)
    return {"ttft_ms_p90": 0.1 + 0.2, "most": None}


def test_a_run_is_kept_as_long_as_nothing_has_changed_that_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [Plan(generate("poisson", rate, 10.0, seed=1), HARDWARE, 1, 1) for rate in (1.0, 2.0)]
    wanted = run(plans[0])
    for depends, runs in (("one", 2), ("one", 0), ("another", 2), (None, 2), (None, 2), ("one", 0)):
        monkeypatch.setattr(kept, "_depends", lambda depends=depends: depends)
        RUNS.clear()
        assert [kept.kept(run, plan) for plan in plans] == [wanted, wanted]
        assert len(RUNS) == runs
    assert len(list(kept.DIRECTORY.iterdir())) == 4
