"""Figure 6: scheduling policies on 8 prefill and 8 decode instances."""

from __future__ import annotations

from pathlib import Path

from benchmarks.experiments.pages import Result, number, percent, play, table, write_page
from simulator.hardware import load
from simulator.report import compare_pictures
from simulator.run import Plan
from simulator.workload import Workload

POLICIES = ("random", "load-balance", "cache-aware", "kvcache-centric")
SPEEDS = (1.0, 2.0, 2.5)
PICTURED = 2.0
NOTHING_REJECTED, AS_SPRINGTIDE_IS = "baseline", "early-rejection-predicted"
LATENCIES = ("TTFT mean, ms", "p50", "p90", "p99")


def run(trace: Workload, output: Path) -> None:
    hardware = load("a100-llama2-70b")

    def plan(speed: float, policy: str, admission: str) -> Plan:
        return Plan(trace.sped_up(speed), hardware, 8, 8, config={"conductor.policy": policy, "conductor.admission": admission})

    runs = [(speed, policy) for speed in SPEEDS for policy in POLICIES]
    most = SPEEDS[-1]
    plans = {f"{policy} at {speed:g}": plan(speed, policy, NOTHING_REJECTED) for speed, policy in runs}
    plans |= {policy: plan(most, policy, AS_SPRINGTIDE_IS) for policy in POLICIES}
    results = play(plans)
    for name in (f"{policy} at {speed:g}" for speed, policy in runs):
        _all_served(name, results[name]["summary"])
    compare_pictures({policy: results[f"{policy} at {PICTURED:g}"] for policy in POLICIES}, output / "policies")
    write_page(
        output,
        "policies",
        "Figure 6: scheduling policies",
        [
            f"LLaMA2-70B on 8 prefill and 8 decode instances of eight A100 each, nothing rejected; {len(trace.requests):,} requests, "
            "arriving so many times as fast as in the trace. SLO: 30 s to the first token, 100 ms a token in the mean.",
            table(
                ("speed", "policy", *LATENCIES, "SLO attained", "tokens from the cache"),
                [[f"{speed:g} x", policy, *_figures(results[f"{policy} at {speed:g}"]["summary"])] for speed, policy in runs],
            ),
            f"At {PICTURED:g} times the trace's speed:",
            "![TTFT and TBT](policies/latency.png)",
            "![Hit rate](policies/hit-rate.png)",
            "The paper replays 23,000 requests of its own, of which more could be reused, on slower prefill instances: the order of the "
            "policies is what can be compared, not the seconds.",
            "**Beyond what the prefill pool can do** (the last rows) it is busy all the time whatever the policy, and what is not rejected "
            "waits: somebody has to be late, and all that a scheduler can choose is who. A prefill group computes short prompts before "
            "long ones (least relative slack). But whoever waits for it holds slots at a decode node, so with nothing rejected the long "
            "prompts that it puts off come to fill the decode pool, of which what decodes takes a tenth, and whoever comes then waits for "
            "slots. Who has waited longest relative to the slots that it wants has them first: in the order of arrival short prompts would "
            "wait for all long ones before them, and from then on nobody would be in time.",
            f"At {most:g} times the speed with early rejection ({AS_SPRINGTIDE_IS}, the default), where no queue outgrows the objective; "
            "the SLO is attained by so many of all requests, those that were rejected included:",
            table(
                ("policy", "rejected", *LATENCIES, "SLO attained", "tokens from the cache"),
                [[policy, number(results[policy]["summary"]["rejected"]), *_figures(results[policy]["summary"])] for policy in POLICIES],
            ),
        ],
    )


def _figures(summary: Result) -> list[str]:
    latencies = (number(summary[f"ttft_ms_{name}"]) for name in ("mean", "p50", "p90", "p99"))
    return [*latencies, percent(summary["slo_attainment"]), percent(summary["hit_rate"])]


def _all_served(name: str, summary: Result) -> None:
    """Raises RuntimeError: what was left out would flatter the rest."""
    if summary["completed"] != summary["requests"]:
        raise RuntimeError(f"{name}: only {summary['completed']} of {summary['requests']} requests were served, though none is rejected")
