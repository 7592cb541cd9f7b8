"""Table 2 and figures 7 and 8: what is rejected under overload, and how the pools' load fluctuates."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.experiments.pages import Result, number, percent, play, table, write_page
from simulator.hardware import load
from simulator.report import compare_pictures
from simulator.run import Plan
from simulator.workload import Workload

ADMISSIONS = ("baseline", "early-rejection", "early-rejection-predicted", "early-rejection-request")
PAPER = {"baseline": 4183, "early-rejection": 3771, "early-rejection-predicted": 3589}
"""Of 23,000 requests."""


TBT_SLO_MS = 50.0
"""Half of the paper's: of 100 ms, eight A100 are never short before their memory is full."""
SPEED, PREFILL, DECODE = 3.0, 8, 2


def run(trace: Workload, output: Path) -> None:
    hardware = load("a100-llama2-70b")
    faster = trace.sped_up(SPEED)
    plans = {
        admission: Plan(faster, hardware, PREFILL, DECODE, config=_config(admission), late_tbt_slo_ms=TBT_SLO_MS)
        for admission in ADMISSIONS
    }
    ours = "as Springtide is"
    plans[ours] = Plan(faster, hardware, PREFILL, DECODE, config={"slo.tbt_ms": TBT_SLO_MS})
    results = play(plans)
    rows = [_row(name, results[name], results["baseline"]) for name in plans]
    compare_pictures({name: results[name] for name in ADMISSIONS[:3]}, output / "overload")
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
        [
            f"{len(trace.requests):,} requests at {SPEED:g} times the trace's speed on [{PREFILL}P+{DECODE}D], 30 s to the first token, "
            f"{TBT_SLO_MS:g} ms a token. As in the paper, decode nodes look at their objective when a prompt has been prefilled, and what "
            "they refuse then was computed in vain; the baseline judges a request by the load of the prefill pool alone.",
            table(header, rows),
            f"The last row is what Springtide does: its decode nodes look at the door, before the prefill (admission {PREDICTED}).",
            "![Load](overload/load.png)",
            "**Where this differs from the paper.** Its gains (-9.8% by early rejection, -14.2% with prediction) are not reached: early "
            "rejection alone gains a part of it, and the rules that look ahead refuse more than they save. They save prefill (the column "
            "of what was prefilled in vain), but here decode limits what completes, and they leave some of it unused: a defect that is to "
            "be mended. On 8 + 8 of these instances at twice the speed, decode is a quarter loaded and next to nothing is refused.",
        ],
    )


PREDICTED = "early-rejection-predicted"


def _config(admission: str) -> dict[str, Any]:
    if admission == "baseline":
        # It looks at the prefill pool only: no time between tokens is too long for it.
        return {"conductor.admission": "early-rejection", "slo.tbt_ms": 1e6}
    return {"conductor.admission": admission, "slo.tbt_ms": TBT_SLO_MS}


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
