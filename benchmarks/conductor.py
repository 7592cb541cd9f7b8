"""The Conductor beside Dynamo's router, its index when it is full, and the process as it is launched (`make bench-conductor`, after
`make peers`)."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Sequence

from benchmarks.conductor_process import INSTANCES, LIMIT_MS, LIMITED_TOKENS, REQUESTS, Answered, ask_process
from benchmarks.driven import CHECKOUT, OURS, Bench, Driver, Job, Scale, compared, console, microseconds, others_at_work, with_remarks
from benchmarks.drivers.holdings import EVENT_BLOCKS, EVENTS, FOUND
from benchmarks.fake_nodes import LESS_URGENT
from benchmarks.full_index import BLOCKS, Figures
from benchmarks.results import Row, show, write

WORKERS = (16, 1000)
DEPTHS = (1, 128, 1024)
HASHED = ((20, 4096), (1, 131_072))
"""Prompts in one repetition, tokens of each."""
FIND_TIMES, INTAKE_TIMES, HASH_TIMES, SELECT_TIMES = 5, 5, 20, 300
MEMORY_LIMIT_BYTES = 128.0
PROCESS_RUNS = 3
NOTES = (
    "RadixTree: 64 prompts, of which 4 are held by every worker in full, by half or by a quarter, and the others in full by one to three; "
    "every other prompt that is looked up is one of the 4. Ours and Dynamo's `find_matches` answer with every holder. Events of "
    f"{EVENT_BLOCKS} blocks come as each system's bytes: ours protobuf, Dynamo's JSON. Dynamo's keys have 64 bits and its hashes are of a "
    "block's own tokens; ours have 128 bits and are chained. Choosing: for prompts of 128 blocks whose keys are known already; ours is "
    "`ConductorCore.handle(Schedule)` with so many prefill instances and as many decode nodes, with the default policy; Dynamo's "
    "`select_and_reserve` has so many workers, and an index without blocks. `baseline` leaves out what Dynamo's service does not do "
    "either: refusing what would miss its objectives, which with the default rule takes a look ahead. The process: `python -m conductor` "
    "with its Valkey; stores and engines are served by another process, which reports every engine's load once a second and stores blocks "
    "all the time; one more process asks, one request after the other (latency) and 16 at a time (throughput). All of them share this "
    f"machine's cores, the one with the stores and engines at a niceness of {LESS_URGENT}, for real ones are on other machines."
)


def finding_and_intake() -> tuple[list[Row], list[str]]:
    """And why the peer was left out."""
    rows, left_out = [], []
    for workers in WORKERS:
        for blocks in DEPTHS:
            console.print(f"index: {workers} workers, prompts of {blocks} blocks")
            ours, peer = Driver("Springtide", "router_springtide", OURS), Driver("Dynamo RadixTree", "router_dynamo")
            with Bench([Job(ours, workers, blocks)], [Job(peer, workers, blocks)]) as bench:
                rows += _beside(bench, f"finding {blocks} blocks, {workers} workers", "find", FIND_TIMES, microseconds(FOUND))
                if blocks == EVENT_BLOCKS:
                    scale = Scale("blocks/s", EVENTS * EVENT_BLOCKS)
                    rows += _beside(bench, f"events taken in, {workers} workers", "intake", INTAKE_TIMES, scale)
            left_out += bench.left_out
    return rows, left_out


def hashing() -> tuple[list[Row], list[str]]:
    """And why the peer was left out."""
    rows, left_out = [], []
    for count, tokens in HASHED:
        console.print(f"hashing {tokens} tokens")
        ours, peer = Driver("Springtide", "hashing_springtide", OURS), Driver("Dynamo", "hashing_dynamo")
        with Bench([Job(ours, count, tokens)], [Job(peer, count, tokens)]) as bench:
            rows += _beside(bench, f"hashing {tokens} tokens, blocks of 64", "hash", HASH_TIMES, microseconds(count))
        left_out += bench.left_out
    return rows, left_out


def choosing() -> tuple[list[Row], list[str]]:
    """And why the peer was left out."""
    rows, left_out = [], []
    peer = Driver("Dynamo SelectionService", "select_dynamo")
    for admission in ("baseline", "early-rejection-predicted"):
        for workers in WORKERS:
            console.print(f"choosing among {workers} workers, {admission}")
            ours = Driver("Springtide", "select_springtide", OURS, (admission,))
            with Bench([Job(ours, workers, EVENT_BLOCKS)], [Job(peer, workers, EVENT_BLOCKS)]) as bench:
                rows += _beside(bench, f"choosing among {workers} workers, {admission}", "select", SELECT_TIMES, microseconds())
            left_out += bench.left_out
    return rows, left_out


def _beside(bench: Bench, row: str, operation: str, times: int, scale: Scale) -> list[Row]:
    seconds = bench.rounds(operation, times)
    ours = seconds.pop("Springtide")
    return [compared(row, scale, ours, theirs, name, 1.0) for name, theirs in seconds.items()]


def full_index() -> list[Row]:
    console.print("index: ten million blocks over a thousand stores; takes a minute")
    command = [OURS, "-m", "benchmarks.full_index"]
    figures = Figures(**json.loads(subprocess.run(command, cwd=CHECKOUT, stdout=subprocess.PIPE, check=True).stdout))
    memory = figures.memory_bytes / figures.blocks
    met = memory <= MEMORY_LIMIT_BYTES
    return [
        Row(
            "memory a block, 10 million over 1000 stores",
            "bytes",
            memory,
            None,
            MEMORY_LIMIT_BYTES,
            "limit",
            MEMORY_LIMIT_BYTES / memory,
            1.0,
            met,
        ),
        Row("the same, all", "GiB", figures.memory_bytes / (1 << 30)),
        Row("blocks taken in until there are 10 million", "1/s", figures.taken_in_per_s),
        Row("blocks removed, 10 million held", "1/s", figures.removed_per_s),
        Row(f"finding the holders of {BLOCKS} blocks, 10 million held, p50", "us", figures.find_p50_s * 1e6),
        Row("the same, p99", "us", figures.find_p99_s * 1e6),
    ]


def process() -> list[Row]:
    rows = []
    for instances in INSTANCES:
        console.print(f"the process with {instances} instances")
        for tokens, runs in ask_process(instances, PROCESS_RUNS).items():
            name = f"{instances} instances, {tokens // 1024}k tokens"
            p99 = [run.p99_ms for run in runs]
            limited = instances == INSTANCES[-1] and tokens <= LIMITED_TOKENS
            median = statistics.median(p99)
            rows += [
                _plain(f"decisions a second, {name}", "1/s", runs, lambda run: run.per_s),
                _plain(f"latency p50, {name}", "ms", runs, lambda run: run.p50_ms),
                Row(
                    f"latency p99, {name}",
                    "ms",
                    median,
                    (min(p99), max(p99)),
                    LIMIT_MS,
                    "limit",
                    LIMIT_MS / median,
                    1.0,
                    median <= LIMIT_MS,
                )
                if limited
                else _plain(f"latency p99, {name}", "ms", runs, lambda run: run.p99_ms),
                _plain(f"the decision itself, {name}", "us", runs, lambda run: run.decision_us),
            ]
    return rows + _growth(rows)


def _plain(row: str, unit: str, runs: Sequence[Answered], read: Callable[[Answered], float]) -> Row:
    values = [read(run) for run in runs]
    return Row(row, unit, statistics.median(values), (min(values), max(values)))


def _growth(rows: list[Row]) -> list[Row]:
    """How much more a decision costs with the most instances than with the fewest, beside how many more these are."""
    cost = {row.row: row.ours for row in rows}
    fewest, most = INSTANCES[0], INSTANCES[-1]
    grown = []
    for tokens in REQUESTS:
        name = f"instances, {tokens // 1024}k tokens"
        factor = cost[f"the decision itself, {most} {name}"] / cost[f"the decision itself, {fewest} {name}"]
        linear = most / fewest
        grown.append(
            Row(f"decision's cost, {most} / {fewest} {name}", "x", factor, None, linear, "linear", linear / factor, 1.0, factor <= linear)
        )
    return grown


def main() -> None:
    remark = others_at_work()
    rows, left_out = [], []
    for part in (finding_and_intake, hashing, choosing):
        of_part, reasons = part()
        rows += of_part
        left_out += reasons
    rows += full_index()
    rows += process()
    show("Conductor", rows)
    print(write("conductor", "make bench-conductor", rows, with_remarks(NOTES, left_out, remark)))


if __name__ == "__main__":
    main()
