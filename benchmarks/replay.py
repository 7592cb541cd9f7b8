"""A trace through our Conductor in the simulator beside Dynamo's KV router in its own (`make bench-replay ARGS="--trace FILE"`, after
`make peers`). Results are by the trace's name: those of one leave the others' as they are."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.driven import CHECKOUT, PEERS, console
from benchmarks.mocker_hardware import BLOCK_TOKENS, NUM_BLOCKS, mocker_hardware
from benchmarks.results import Row, show, write
from simulator.run import Plan, simulate
from simulator.workload import read_trace

Summary = dict[str, Any]

TTFT_SLO_MS, TBT_SLO_MS = 2000.0, 100.0
WORKERS = (4, 8)
"""Each side's engines, all of which prefill and decode."""
SPEEDS = (1.0, 2.0, 3.0)
CHUNK_TOKENS = 8192
"""As the mocker's own engines take in a pass at most."""
GAP_CLOSED = 0.5
"""At the highest speed: of the requests that Dynamo's goodput lacks, ours is to have so many."""
DEFAULT, NOTHING_REFUSED = "early-rejection-predicted", "baseline"
TIMES = (
    ("TTFT mean", "ttft_ms_mean", "mean_ttft_ms"),
    ("TTFT p99", "ttft_ms_p99", "p99_ttft_ms"),
    ("time between tokens, mean", "tbt_ms_mean", "mean_itl_ms"),
    ("time between tokens, p99", "gap_ms_p99", "p99_itl_ms"),
)
"""Names, and what our simulator and Dynamo's call them; the times between tokens are over all of them, whoever's they are."""
PEER_RUNS = 5
"""The mocker's goodput varies from run to run."""
NOTES = (
    "Ours: the simulator with the Conductor as it is by default (kvcache-centric, early rejection based on prediction), every worker an "
    f"instance that prefills and decodes (`--instances`), chunks of {CHUNK_TOKENS} tokens, as large as the mocker's passes, "
    "the trace's own blocks; it comes out the same each time. Nothing refused: the same with admission "
    "`baseline`, and Dynamo "
    f"refuses nothing either. Dynamo: run_mocker_trace_replay, offline, KV router, every worker doing both; {PEER_RUNS} runs of each case, "
    f"of which the median is compared. Times of passes and steps, KV capacity of a worker ({NUM_BLOCKS} blocks of {BLOCK_TOKENS}) and "
    f"links are the mocker's on both sides; ours moves KV besides. Goodput: requests within {TTFT_SLO_MS / 1000:g} s to the first token "
    f"and {TBT_SLO_MS:g} ms a token in the mean. Times are compared where nothing is refused: with the default admission they are those of "
    "fewer requests, for it refuses what it predicts to miss its objective. Dynamo has its defaults; it is not told of the objectives."
)


def ours(trace: Path, workers: int, speed: float, admission: str) -> Summary:
    config = {
        "slo.ttft_ms": TTFT_SLO_MS,
        "slo.tbt_ms": TBT_SLO_MS,
        "prefill_node.chunk_tokens": CHUNK_TOKENS,
        "conductor.admission": admission,
    }
    plan = Plan(read_trace(trace).sped_up(speed), mocker_hardware(), prefill=0, decode=0, instances=workers, config=config)
    summary: Summary = simulate(plan)["summary"]
    return summary


def theirs(trace: Path, workers: int, speed: float) -> Summary:
    figures = (trace, workers, speed, TTFT_SLO_MS, TBT_SLO_MS, BLOCK_TOKENS, NUM_BLOCKS)
    command = [str(PEERS), "-m", "benchmarks.drivers.replay_dynamo", *map(str, figures)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=CHECKOUT, text=True)
    summary: Summary = json.loads(done.stdout)
    return summary


def rows(case: str, speed: float, default: Summary, nothing_refused: Summary, peers: Sequence[Summary]) -> list[Row]:
    """The rows of one case: ours by default and with nothing refused, beside all runs of the peer."""

    def compared(name: str, unit: str, value: float, others: list[float], less_is_better: bool = False, wanted: float | None = None) -> Row:
        other, spread = statistics.median(others), (min(others), max(others))
        ratio = other / value if less_is_better else value / other
        met = None if wanted is None else ratio >= wanted
        wanted = None if wanted is None else round(wanted, 3)
        return Row(name, unit, value, None, other, "Dynamo", ratio, wanted, met, case, spread, len(others))

    good = [peer["goodput_completed_requests"] for peer in peers]
    reused = [100 * peer["prefix_cache_reused_ratio"] for peer in peers]
    made, total = statistics.median(good), default["requests"]
    wanted = (made + GAP_CLOSED * (total - made)) / made if speed == max(SPEEDS) else 1.0
    compared_rows = [
        compared("goodput", "requests", default["goodput_requests"], good, wanted=wanted),
        compared("goodput, nothing refused", "requests", nothing_refused["goodput_requests"], good),
        compared("prompt tokens reused", "%", 100 * default["hit_rate"], reused, wanted=1.0),
        compared("prompt tokens reused, nothing refused", "%", 100 * nothing_refused["hit_rate"], reused),
        *(
            compared(f"{name}, nothing refused", "ms", nothing_refused[key], [peer[their_key] for peer in peers], less_is_better=True)
            for name, key, their_key in TIMES
        ),
    ]
    return [
        *compared_rows,
        Row("refused", "requests", default["rejected"], case=case),
        Row("TTFT mean of what was served", "ms", default["ttft_ms_mean"], case=case),
        Row("TTFT p99 of what was served", "ms", default["ttft_ms_p99"], case=case),
    ]


def name_of(workers: int, speed: float) -> str:
    return f"{workers} workers, {speed:g} x"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="JSONL of the Mooncake project")
    trace = parser.parse_args(arguments).trace.resolve()
    cases = list(product(WORKERS, SPEEDS, (DEFAULT, NOTHING_REFUSED)))
    console.print(f"{trace.stem} in the simulator, {len(cases)} times")
    with ProcessPoolExecutor(2) as workers_pool:
        mine = dict(zip(cases, workers_pool.map(ours, [trace] * len(cases), *zip(*cases, strict=True)), strict=True))
    made: list[Row] = []
    for workers, speed in product(WORKERS, SPEEDS):
        console.print(f"{name_of(workers, speed)}: Dynamo, {PEER_RUNS} times")
        peers = [theirs(trace, workers, speed) for _ in range(PEER_RUNS)]
        default, nothing_refused = (mine[workers, speed, admission] for admission in (DEFAULT, NOTHING_REFUSED))
        made += rows(name_of(workers, speed), speed, default, nothing_refused, peers)
    show(f"Replay of {trace.stem}", made)
    headlines = [f"goodput: {name_of(workers, max(SPEEDS))}" for workers in WORKERS]
    print(write(f"replay-{trace.stem}", f"make bench-replay ARGS='--trace {trace.name}'", made, NOTES, headlines))


if __name__ == "__main__":
    main(sys.argv[1:])
