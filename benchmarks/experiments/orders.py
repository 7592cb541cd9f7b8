"""What the Conductor orders beyond replies: copies of popular prefixes, and instances that switch their role."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.experiments.pages import Result, number, percent, play, table, write_page
from simulator.cluster.options import RESTART_S
from simulator.hardware import load
from simulator.run import Plan
from simulator.workload import SimRequest, Workload

BLOCK = 512
DOCUMENT_BLOCKS = 64
LINKS_GB_PER_S = (7.8, 1.0)
PREFILL_HEAVY_S, OUTPUT_HEAVY_S = 200.0, 600.0


@dataclass(frozen=True, slots=True)
class Phase:
    """Poisson arrivals of prompts of `shared_blocks` blocks, the same for all, and `own_tokens` more."""

    rate_per_s: float
    seconds: float
    own_tokens: int
    output_tokens: int
    """In the mean, from half as many to half as many again."""
    shared_blocks: int = 0


CROWD = (
    Phase(0.1, 10.0, 1500, 50, DOCUMENT_BLOCKS),
    Phase(4.0, 60.0, 1500, 50, DOCUMENT_BLOCKS),
    Phase(30.0, 60.0, 1500, 50, DOCUMENT_BLOCKS),
)
SHIFT = (Phase(1.5, PREFILL_HEAVY_S, 8192, 50), Phase(9.0, OUTPUT_HEAVY_S, 512, 800))


def workload(name: str, phases: Iterable[Phase]) -> Workload:
    """The same for the same phases."""
    rng, requests, now = random.Random(1), list[SimRequest](), 0.0
    for phase in phases:
        end = now + phase.seconds
        while (now := now + rng.expovariate(phase.rate_per_s)) < end:
            first_own = DOCUMENT_BLOCKS + 1000 * len(requests)
            blocks = (*range(phase.shared_blocks), *range(first_own, first_own - (-phase.own_tokens // BLOCK)))
            output_tokens = round(phase.output_tokens * rng.uniform(0.5, 1.5))
            requests.append(SimRequest(len(requests), now, phase.shared_blocks * BLOCK + phase.own_tokens, output_tokens, blocks))
        now = end
    return Workload(name, BLOCK, requests)


def run(trace: Workload, output: Path) -> None:
    """The workloads are made for what is shown: no trace has both."""
    del trace
    crowd, shift = workload("a crowd about one document", CROWD), workload("prompts get short and outputs long", SHIFT)
    node, large = load("a100-llama3-8b"), load("a100-llama2-70b")
    copies = {
        (gb_per_s, rate): Plan(
            crowd,
            replace(node, link_bytes_per_s=gb_per_s * 1e9),
            8,
            4,
            config={"conductor.admission": "baseline", "conductor.replication_rate": rate},
        )
        for gb_per_s in LINKS_GB_PER_S
        for rate in (0, 1 << 30)
    }
    slos = {"slo.ttft_ms": 10_000.0, "slo.tbt_ms": 50.0}
    moves = {on: Plan(shift, large, 3, 1, config={**slos, "conductor.pool_balance": on}) for on in (False, True)}
    results = play({str(key): plan for key, plan in {**copies, **moves}.items()})
    write_page(
        output,
        "orders",
        "What the Conductor orders: copies ahead, and roles",
        [
            f"Not in the paper. Copies: LLaMA3-8B on 8 prefill and 4 decode instances of one A100 each, {len(crowd.requests):,} requests "
            f"about one document of {DOCUMENT_BLOCKS * BLOCK:,} tokens, which one node has computed: 4 requests/s for a minute, then 30. "
            "`conductor.replication_rate` 0 and its default of 1 GiB/s, `kv.replication_rate` 256 MiB/s.",
            table(
                ("link, GB/s", "copied ahead", "GB copied", "TTFT mean, ms", "p50", "p90", "p99", "tokens from the cache"),
                [_copies_row(gb_per_s, rate > 0, results[str((gb_per_s, rate))]["summary"]) for gb_per_s, rate in copies],
            ),
            "Where a fetch takes half a second, Algorithm 1 has spread the document by the time that the crowd comes, and copies ahead "
            "change nothing. Where it takes longer than to compute the document anew, Algorithm 1 fetches nothing, and every further node "
            "computes it in the middle of the crowd.",
            f"Roles: LLaMA2-70B on 3 prefill and 1 decode instances of eight A100 each; {PREFILL_HEAVY_S:.0f} s of prompts of 8192 tokens "
            f"with outputs of 50, then {OUTPUT_HEAVY_S:.0f} s of 512 with 800, {len(shift.requests):,} requests. SLO: 10 s to the first "
            f"token, 50 ms a token. An instance that switches is nobody's for {RESTART_S:.0f} s after what it had has ended.",
            table(
                ("`conductor.pool_balance`", "switches", "rejected", "completed", "within both SLOs", "goodput, requests/s", "TBT p90, ms"),
                [_moves_row(on, results[str(on)]["summary"]) for on in moves],
            ),
        ],
    )


def _copies_row(gb_per_s: float, on: bool, summary: Result) -> list[str]:
    latencies = (number(summary[f"ttft_ms_{name}"]) for name in ("mean", "p50", "p90", "p99"))
    copied = number(summary["replicated_bytes"] / 1e9, 1)
    return [f"{gb_per_s:g}", "yes" if on else "no", copied, *latencies, percent(summary["hit_rate"])]


def _moves_row(on: bool, summary: Result) -> list[str]:
    counts = (number(summary[name]) for name in ("role_switches", "rejected", "completed", "goodput_requests"))
    return ["true" if on else "false", *counts, number(summary["goodput_per_s"], 2), number(summary["tbt_ms_p90"], 1)]
