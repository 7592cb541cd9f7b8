"""How fast the simulator is, and how large a cluster it plays in how much memory (`make bench-simulator`; the million requests take the
better part of an hour), or how fast with a trace (`make bench-simulator ARGS="--trace FILE"`; results by the trace's name)."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from benchmarks.driven import CHECKOUT, OURS, console, others_at_work, plain, with_remarks, within
from benchmarks.results import Row, show, write
from benchmarks.simulated import HARDWARE, RATE_PER_S, STEPS, TURN_TOKENS, Case, Took

SPEEDS, RUNS = (1.0, 2.0), 5
TRACE_INSTANCES = 16
LIMIT_S, LIMIT_REQUESTS = 20.0, 12_031
"""Of one core, for so many requests of a trace."""
CELLS = {10_000: (16, 128, 1000), 100_000: (16, 128, 1000), 1_000_000: (1000,)}
"""Requests, and with how many instances they are played."""
LIMIT_GIB = 4.0
"""At the largest cell."""
MACHINE = (
    f"Each run is a process of its own, which computes on one core; the machine modelled is {HARDWARE}, half of the instances prefill and "
    "half decode, with the default policy and admission. Time is from the cluster's first part to the results."
)
TABLE_NOTES = (
    f"{MACHINE} Generated conversations (`chat`) of {STEPS:g} turns on average, {TURN_TOKENS:g} new tokens each, {RATE_PER_S:g} request a "
    "second for each prefill instance. Memory is the most that the process held, workload included. An event is a moment of virtual time "
    "at which something is due. The most requests are played with 1000 instances only: time is by the request, and with fewer instances "
    "they would take about as long and less memory."
)


def run(case: Case) -> Took:
    command = [OURS, "-m", "benchmarks.simulated", json.dumps(asdict(case))]
    return Took(**json.loads(subprocess.run(command, cwd=CHECKOUT, stdout=subprocess.PIPE, check=True).stdout))


def of_trace(trace: Path) -> list[Row]:
    rows = []
    for speed in SPEEDS:
        console.print(f"{trace.name}, speed {speed:g}, {RUNS} times")
        runs = [run(Case(TRACE_INSTANCES, trace=str(trace), speed=speed)) for _ in range(RUNS)]
        name = f"{runs[0].requests:,} requests on {TRACE_INSTANCES} instances, speed {speed:g}"
        rows += [
            within(f"{name}: CPU time", "s", [took.cpu_s for took in runs], LIMIT_S * runs[0].requests / LIMIT_REQUESTS),
            plain(f"{name}: wall time", "s", [took.wall_s for took in runs]),
        ]
    return rows


FIGURES: dict[str, tuple[str, Callable[[Took], float]]] = {
    "a request": ("ms of CPU", lambda took: 1000 * took.cpu_s / took.requests),
    "wall time": ("s", lambda took: took.wall_s),
    "events": ("1/s of CPU", lambda took: took.events / took.cpu_s),
    "peak memory": ("GiB", lambda took: took.peak_bytes / (1 << 30)),
    "prefill instances at work": ("%", lambda took: 100 * took.prefill_busy),
    "decode instances at work": ("%", lambda took: 100 * took.decode_busy),
    "within both objectives": ("%", lambda took: 100 * took.goodput / took.requests),
}


def of_cell(instances: int, requests: int) -> list[Row]:
    console.print(f"{instances} instances, {requests:,} requests")
    took = run(Case(instances, requests))
    case = f"{requests:,} requests"
    rows = [Row(f"{instances} instances: {name}", unit, read(took), case=case) for name, (unit, read) in FIGURES.items()]
    if (instances, requests) == (CELLS[max(CELLS)][-1], max(CELLS)):
        rows.append(within(f"{instances} instances, {case}: peak memory", "GiB", [took.peak_bytes / (1 << 30)], LIMIT_GIB))
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="JSONL of the Mooncake project; without it, generated conversations")
    trace = parser.parse_args(arguments).trace
    remark = others_at_work()
    if trace is None:
        rows = [row for requests, clusters in CELLS.items() for instances in clusters for row in of_cell(instances, requests)]
        rows.sort(key=lambda row: [*FIGURES].index(row.row.partition(": ")[2]) if row.case else -1)
        name, given, notes = "simulator", "", TABLE_NOTES
    else:
        rows = of_trace(trace.resolve())
        name, given, notes = f"simulator-{trace.stem}", f" ARGS='--trace {trace.name}'", MACHINE
    show("Simulator", rows)
    print(write(name, f"make bench-simulator{given}", rows, with_remarks(notes, [], remark)))


if __name__ == "__main__":
    main()
