"""Table 2 and figures 7 and 8: what is rejected under overload, and how the pools' load fluctuates."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.experiments.pages import Result, number, percent, play, table, write_page
from simulator.hardware import load
from simulator.report import compare_pictures
from simulator.run import Plan
from simulator.workload import Workload

ADMISSIONS = ("baseline", "early-rejection", "early-rejection-predicted", "early-rejection-request")
PAPER = {"baseline": 4183, "early-rejection": 3771, "early-rejection-predicted": 3589}
"""Of 23,000 requests."""


def run(trace: Workload, output: Path) -> None:
    hardware = load("a100-llama2-70b")
    plans = {
        admission: Plan(trace.sped_up(2.0), hardware, 8, 8, config={"conductor.admission": admission, "slo.tbt_ms": 100.0})
        for admission in ADMISSIONS
    }
    results = play(plans)
    rows = [_row(admission, results[admission], results["baseline"]) for admission in ADMISSIONS]
    compare_pictures(results, output / "overload")
    header = (
        "admission",
        "rejected",
        "against baseline",
        "goodput",
        "prefilled in vain, tokens",
        "load of decode, std",
        "the paper's rejected",
    )
    write_page(
        output,
        "overload",
        "Table 2, figures 7 and 8: overload",
        [f"{len(trace.requests):,} requests at twice the trace's speed.", table(header, rows), "![Load](overload/load.png)"],
    )


def _row(admission: str, result: Result, baseline: Result) -> list[str]:
    summary, before = result["summary"], baseline["summary"]
    change = summary["rejected"] / before["rejected"] - 1 if before["rejected"] else 0.0
    paper = PAPER.get(admission)
    return [
        admission,
        number(summary["rejected"]),
        percent(change),
        number(summary["goodput_requests"]),
        number(summary["wasted_prefill_tokens"]),
        number(statistics.pstdev(result["series"]["decode_load"]), 3),
        "-" if paper is None else f"{paper:,} ({paper / PAPER['baseline'] - 1:.1%})",
    ]
