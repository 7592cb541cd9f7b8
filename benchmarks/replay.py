"""A trace through our Conductor in the simulator beside Dynamo's KV router in its own (`make bench-replay ARGS="--trace FILE"`, after
`make peers`)."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.driven import CHECKOUT, PEERS, console
from benchmarks.mocker_hardware import BLOCK_TOKENS, NUM_BLOCKS, mocker_hardware
from benchmarks.results import Row, show, write
from simulator.run import Plan, simulate
from simulator.workload import read_trace

TTFT_SLO_MS, TBT_SLO_MS = 2000.0, 100.0
CLUSTERS = {4: (2, 2), 8: (6, 2)}
"""Prefill and decode instances of so many workers."""
SPEEDS = (1.0, 2.0, 3.0)
CHUNK_TOKENS = 6144
"""Near where the mocker's polynomial is cheapest by the token. Its own engines take up to 8,192 tokens in a pass."""
GAP_CLOSED = 0.5
"""At the highest speed: of the requests that Dynamo's goodput lacks, ours is to have so many."""
NOTES = (
    "Ours: the simulator with the Conductor as it is by default (kvcache-centric, early rejection based on prediction), disaggregated "
    f"({', '.join(f'{p} prefill + {d} decode for {workers} workers' for workers, (p, d) in CLUSTERS.items())}), chunks of {CHUNK_TOKENS} "
    "tokens. Dynamo: run_mocker_trace_replay, offline, KV router, every worker doing both. Times of passes and steps, KV capacity of a "
    f"worker ({NUM_BLOCKS} blocks of {BLOCK_TOKENS}) and links are the mocker's on both sides; ours moves KV besides. Goodput: requests "
    f"within {TTFT_SLO_MS / 1000:g} s to the first token and {TBT_SLO_MS:g} ms a token in the mean. TTFT and reuse are of what was served: "
    "ours refuses what it predicts to miss its objective. Splits and chunk were chosen for this load and these times: 3 + 1 is better at "
    "1 x and worse above, chunks of 8,192 tokens are some 20 requests of goodput worse at 3 x."
)


def ours(trace: Path, workers: int, speed: float) -> dict[str, Any]:
    prefill, decode = CLUSTERS[workers]
    config = {"slo.ttft_ms": TTFT_SLO_MS, "slo.tbt_ms": TBT_SLO_MS, "prefill_node.chunk_tokens": CHUNK_TOKENS}
    summary: dict[str, Any] = simulate(Plan(read_trace(trace).sped_up(speed), mocker_hardware(), prefill, decode, config=config))["summary"]
    return summary


def theirs(trace: Path, workers: int, speed: float) -> dict[str, Any]:
    figures = (trace, workers, speed, TTFT_SLO_MS, TBT_SLO_MS, BLOCK_TOKENS, NUM_BLOCKS)
    command = [str(PEERS), "-m", "benchmarks.drivers.replay_dynamo", *map(str, figures)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=CHECKOUT, text=True)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def rows(case: str, speed: float, mine: dict[str, Any], peer: dict[str, Any]) -> list[Row]:
    total, good, their_good = mine["requests"], mine["goodput_requests"], peer["goodput_completed_requests"]
    wanted = their_good + GAP_CLOSED * (total - their_good) if speed == max(SPEEDS) else their_good
    reuse, their_reuse = 100 * mine["hit_rate"], 100 * peer["prefix_cache_reused_ratio"]

    def compared(name: str, unit: str, value: float, other: float, ratio: float, wanted: float | None = None) -> Row:
        met = None if wanted is None else ratio >= wanted
        return Row(name, unit, value, None, other, "Dynamo", ratio, None if wanted is None else round(wanted, 3), met, case=case)

    return [
        compared("goodput", "requests", good, their_good, good / their_good, wanted / their_good),
        compared("prompt tokens reused", "%", reuse, their_reuse, reuse / their_reuse, 1.0),
        compared("TTFT mean", "ms", mine["ttft_ms_mean"], peer["mean_ttft_ms"], peer["mean_ttft_ms"] / mine["ttft_ms_mean"]),
        compared("TTFT p99", "ms", mine["ttft_ms_p99"], peer["p99_ttft_ms"], peer["p99_ttft_ms"] / mine["ttft_ms_p99"]),
    ]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="JSONL of the Mooncake project")
    trace = parser.parse_args(arguments).trace.resolve()
    cases = [(workers, speed) for workers in CLUSTERS for speed in SPEEDS]
    with ProcessPoolExecutor(2) as workers_pool:
        mine = list(workers_pool.map(ours, [trace] * len(cases), *zip(*cases, strict=True)))
    made: list[Row] = []
    for (workers, speed), summary in zip(cases, mine, strict=True):
        console.print(f"{workers} workers, {speed:g} x")
        made += rows(f"{workers} workers, {speed:g} x", speed, summary, theirs(trace, workers, speed))
    show("Replay", made)
    print(write("replay", f"make bench-replay ARGS='--trace {trace.name}'", made, NOTES))


if __name__ == "__main__":
    main(sys.argv[1:])
