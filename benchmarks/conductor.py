"""The Conductor beside Dynamo's router, its index when it is full, its core and its process with a cluster at work (`make bench-conductor`,
after `make peers`)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from itertools import product

from benchmarks import conductor_core, full_index
from benchmarks.conductor_process import AT_A_TIME, QUESTIONS, SETTLE_S, Answered, Latencies, ask_nothing, ask_process
from benchmarks.driven import CHECKOUT, OURS, Driver, Scale, console, microseconds, others_at_work, plain, with_remarks, within
from benchmarks.drivers.holdings import EVENT_BLOCKS, EVENTS, FOUND
from benchmarks.fake_nodes import EVENT_BLOCKS as STORED_BLOCKS
from benchmarks.fake_nodes import IDLE_ROUNDS, SIGN_EVERY_S, STORED_EVERY_S
from benchmarks.live_cluster import ATTEMPTS_A_GATEWAY, IN_PREFILL, LiveCluster
from benchmarks.pinned import PINNED, Operation, on_one_core_and_all
from benchmarks.results import LIMIT, Row, show, write
from gateway.conductor_link import RENEW_EVERY_S
from node_runtime.servicer import REST_S

WORKERS = (16, 1000)
DEPTHS = (1, 128, 1024)
HASHED = ((20, 4096), (1, 131_072))
"""Prompts in one repetition, tokens of each."""
FIND_TIMES, INTAKE_TIMES, HASH_TIMES, SELECT_TIMES = 5, 5, 20, 300
MEMORY_LIMIT_BYTES = 128.0

INSTANCES = (16, 128, 1000)
LIVE = (10, 30)
"""Attempts that live, to each instance."""
IDLE = 0
LIMIT_MS, LIMITED_TOKENS = 2.0, 131_072
"""Of the 99th percentile, with the most instances, for prompts of at most so many tokens."""
PROCESS_RUNS, CORE_RUNS = 5, 5
HEADLINES = (
    f"finding {EVENT_BLOCKS} blocks, {WORKERS[-1]} workers: {PINNED}",
    f"choosing among {WORKERS[-1]} workers, early-rejection-predicted: {PINNED}",
    f"latency p99, {INSTANCES[-1]} instances, 128k tokens: {LIVE[-1]} live an instance",
)
NOTES = (
    "RadixTree, the index that Dynamo's Python bindings offer (its router in Rust has others): 64 prompts, of which 4 are held by every "
    "worker in full, by half or by a quarter, and the others in full by one to three; "
    "every other prompt that is looked up is one of the 4. Ours and Dynamo's `find_matches` answer with every holder, in a form of their "
    "own; reading it is, ours, an array of each store's blocks, as decisions do, and Dynamo's, the dictionary of `scores`. Events of "
    f"{EVENT_BLOCKS} blocks come as each system's bytes: ours protobuf, Dynamo's JSON. Dynamo's keys have 64 bits and its hashes are of a "
    "block's own tokens; ours have 128 bits and are chained. Choosing: for prompts of 128 blocks whose keys are known already; ours is "
    "`ConductorCore.handle(Schedule)` with so many prefill instances and as many decode nodes, with the default policy; Dynamo's "
    "`select_and_reserve` has so many workers, and an index without blocks. `baseline` leaves out what Dynamo's service does not do "
    "either: refusing what would miss its objectives, which with the default rule takes a look ahead. Dynamo's Python bindings hand each "
    "call to another thread, as its router in Rust need not. So the comparison is of either side kept to one core, with either free "
    "to use all beside it; and a call that does nothing (a find of no blocks, the end of what is not known) is a row of its own, and "
    "subtracted from nothing. "
    "The core and the process: half of the instances prefill and half decode, with so many attempts that live to each instance (with 1000 "
    f"instances, {LIVE[0] * 1000:,} and {LIVE[-1] * 1000:,}), one in {IN_PREFILL} of them in prefill; they do not end, and nor do they "
    f"move. All engines are at work then, and each reports its load {1 / REST_S:g} times a second, as real ones do at most; idle ones, "
    f"{1 / REST_S / IDLE_ROUNDS:g} times. Each gateway has {ATTEMPTS_A_GATEWAY:,} attempts and renews all of them every "
    f"{RENEW_EVERY_S:g} s. Every store shows a sign of life every {SIGN_EVERY_S:g} s and stores {STORED_BLOCKS} blocks every "
    f"{STORED_EVERY_S:g} s. The core: `ConductorCore.handle` in one process with {conductor_core.PER_S} decisions a second, of the core's "
    "time, and all that comes in between. The process: `python -m conductor` with its Valkey, as it is launched, with a connection to "
    f"every engine and every store, {SETTLE_S:g} s after all of them are there. Its messages are encoded beforehand, and one process sends "
    "them over a loopback address for each engine and store; how many reports it sent is a row, how many of them the Conductor's core "
    "took in, and how many it could not send, because the Conductor or itself was late. One more process asks, as a "
    "gateway does: at a rate of its own in a Poisson process, however long the "
    f"answers take (latency: {', '.join(f'{q.per_s:g}/s of {q.num_tokens // 1024}k tokens' for q in QUESTIONS)}), then {AT_A_TIME} at a "
    "time (decisions a second; where the Conductor does not use a whole core for them, who asks is the limit). All but the Conductor are "
    "kept to one of this machine's cores, those that play the cluster to what time of it nobody else wants (SCHED_IDLE); the Conductor "
    "may use all. What asking itself costs is shown, and subtracted from nothing: the same questions to a server that decides nothing, "
    "with nobody else at work, and the processor time of who asks."
)


def finding_and_intake() -> tuple[list[Row], list[str]]:
    """The rows of the index, and why the peer was left out."""
    rows, left_out = [], []
    ours, peer = Driver("Springtide", "router_springtide", OURS), Driver("Dynamo RadixTree", "router_dynamo")
    for workers, blocks in product(WORKERS, DEPTHS):
        console.print(f"index: {workers} workers, prompts of {blocks} blocks")
        operations = [
            Operation("find", f"finding {blocks} blocks, {workers} workers", FIND_TIMES, microseconds(FOUND), 1.0),
            Operation("read", f"finding {blocks} blocks and reading who has them, {workers} workers", FIND_TIMES, microseconds(FOUND)),
        ]
        if blocks == EVENT_BLOCKS:
            scale = Scale("blocks/s", EVENTS * EVENT_BLOCKS)
            operations += [
                Operation("intake", f"events taken in, {workers} workers", INTAKE_TIMES, scale, 1.0),
                Operation("empty", f"finding no blocks, {workers} workers", FIND_TIMES, microseconds(FOUND)),
            ]
        made, reasons = on_one_core_and_all(ours, peer, workers, blocks, operations)
        rows += made
        left_out += reasons
    return rows, left_out


def hashing() -> tuple[list[Row], list[str]]:
    """The rows of hashing, and why the peer was left out."""
    rows, left_out = [], []
    ours, peer = Driver("Springtide", "hashing_springtide", OURS), Driver("Dynamo", "hashing_dynamo")
    for count, tokens in HASHED:
        console.print(f"hashing {tokens} tokens")
        operation = Operation("hash", f"hashing {tokens} tokens, blocks of 64", HASH_TIMES, microseconds(count), 1.0)
        made, reasons = on_one_core_and_all(ours, peer, count, tokens, [operation])
        rows += made
        left_out += reasons
    return rows, left_out


def choosing() -> tuple[list[Row], list[str]]:
    """The rows of choosing, and why the peer was left out."""
    rows, left_out = [], []
    peer = Driver("Dynamo SelectionService", "select_dynamo")
    for admission, workers in product(("baseline", "early-rejection-predicted"), WORKERS):
        console.print(f"choosing among {workers} workers, {admission}")
        ours = Driver("Springtide", "select_springtide", OURS, (admission,))
        operations = [Operation("select", f"choosing among {workers} workers, {admission}", SELECT_TIMES, microseconds(), 1.0)]
        if admission == "baseline":
            operations.append(Operation("empty", f"ending what is not known, {workers} workers", SELECT_TIMES, microseconds()))
        made, reasons = on_one_core_and_all(ours, peer, workers, EVENT_BLOCKS, operations)
        rows += made
        left_out += reasons
    return rows, left_out


def index_when_full() -> list[Row]:
    console.print("index: ten million blocks over a thousand stores; takes a minute")
    figures = full_index.Figures(**_in_a_process("benchmarks.full_index"))
    blocks = full_index.BLOCKS
    return [
        within("memory a block, 10 million over 1000 stores", "bytes", [figures.memory_bytes / figures.blocks], MEMORY_LIMIT_BYTES),
        Row("the same, all", "GiB", figures.memory_bytes / (1 << 30)),
        Row("blocks taken in until there are 10 million", "1/s", figures.taken_in_per_s),
        Row(f"the longest of these events, of {blocks} blocks", "ms", figures.longest_event_s * 1e3),
        Row("blocks removed, 10 million held", "1/s", figures.removed_per_s),
        Row(f"finding the holders of {blocks} blocks, 10 million held, p50", "us", figures.find_p50_s * 1e6),
        Row(f"finding the holders of {blocks} blocks, 10 million held, p99", "us", figures.find_p99_s * 1e6),
    ]


def core() -> list[Row]:
    rows = []
    instances = INSTANCES[-1]
    for live, question in product(LIVE, QUESTIONS):
        if question.num_tokens > LIMITED_TOKENS:
            continue
        console.print(f"the core with {instances} instances, {live * instances:,} attempts, {question.num_tokens} tokens")
        arguments = [str(instances // 2), str(live * instances), str(question.num_tokens)]
        runs = [conductor_core.Figures(**_in_a_process("benchmarks.conductor_core", *arguments)) for _ in range(CORE_RUNS)]
        case, name = case_of(live), f"{instances} instances, {question.num_tokens // 1024}k tokens"
        rows += [
            plain(f"the core alone: decision p50, {name}", "us", [run.decision_p50_us for run in runs], case),
            plain(f"the core alone: decision p99, {name}", "us", [run.decision_p99_us for run in runs], case),
            plain(f"the core alone: a load report, {name}", "us", [run.report_us for run in runs], case),
            plain(f"the core alone: a gateway's renewal, {name}", "ms", [run.renewal_ms for run in runs], case),
            plain(f"the core alone: longest tick, {name}", "ms", [run.tick_ms for run in runs], case),
        ]
    return rows


def _in_a_process(module: str, *arguments: str) -> dict[str, float]:
    """The figures that it prints."""
    done = subprocess.run([OURS, "-m", module, *arguments], cwd=CHECKOUT, stdout=subprocess.PIPE, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def process() -> list[Row]:
    console.print("a server that decides nothing")
    rows = []
    for tokens, asked in ask_nothing(PROCESS_RUNS).items():
        rows += _latencies(f"nothing decided, {tokens // 1024}k tokens", asked)
    for instances, live in [*product(INSTANCES, LIVE), (INSTANCES[-1], IDLE)]:
        console.print(f"the process with {instances} instances and {live * instances:,} attempts")
        answered = ask_process(LiveCluster(instances // 2, live * instances), PROCESS_RUNS)
        for tokens, runs in answered.items():
            limited = instances == INSTANCES[-1] and tokens <= LIMITED_TOKENS
            rows += process_rows(f"{instances} instances, {tokens // 1024}k tokens", case_of(live), runs, limited)
        rows += load_rows(f"{instances} instances", case_of(live), [run for runs in answered.values() for run in runs])
    return rows + growth(rows)


def case_of(live: int) -> str:
    return f"{live} live an instance" if live else "idle"


def process_rows(name: str, case: str, runs: Sequence[Answered], limited: bool) -> list[Row]:
    """What those see who ask about prompts of one length."""
    return [
        *_latencies(name, [run.latencies for run in runs], case, limited),
        _plain(f"decisions a second, {name}", "1/s", case, runs, lambda run: run.per_s),
        _plain(f"the Conductor's use of a core at that rate, {name}", "%", case, runs, lambda run: 100 * run.cores_at_that),
        _plain(f"the decision itself, {name}", "us", case, runs, lambda run: run.decision_us),
    ]


def load_rows(name: str, case: str, runs: Sequence[Answered]) -> list[Row]:
    """What was at work while the latency was measured, whatever was asked."""
    return [
        _plain(f"load reports sent, {name}", "1/s", case, runs, lambda run: run.reports_per_s),
        _plain(f"load reports taken in, {name}", "1/s", case, runs, lambda run: run.taken_in_per_s),
        _plain(f"load reports held back, {name}", "1/s", case, runs, lambda run: run.held_back_per_s),
        _plain(f"the Conductor's use of a core, {name}", "%", case, runs, lambda run: 100 * run.conductor_cores),
        _plain(f"use of a core by who plays the cluster, {name}", "%", case, runs, lambda run: 100 * run.others_cores),
        _plain(f"processor time of asking once, {name}", "us", case, runs, lambda run: run.asking_us),
    ]


def _latencies(name: str, runs: Sequence[Latencies], case: str = "", limited: bool = False) -> list[Row]:
    p99 = [run.p99_ms for run in runs]
    return [
        plain(f"latency p50, {name}", "ms", [run.p50_ms for run in runs], case),
        within(f"latency p99, {name}", "ms", p99, LIMIT_MS, LIMIT, case) if limited else plain(f"latency p99, {name}", "ms", p99, case),
        plain(f"latency, longest, {name}", "ms", [run.longest_ms for run in runs], case),
    ]


def _plain(row: str, unit: str, case: str, runs: Sequence[Answered], read: Callable[[Answered], float]) -> Row:
    return plain(row, unit, [read(run) for run in runs], case)


def growth(rows: Sequence[Row]) -> list[Row]:
    """How much more a decision costs with the most instances than with the fewest, beside how many more these are."""
    cost = {row.label: row.ours for row in rows}
    fewest, most = INSTANCES[0], INSTANCES[-1]
    grown = []
    for question, live in product(QUESTIONS, LIVE):
        name, case = f"instances, {question.num_tokens // 1024}k tokens", case_of(live)
        factor = cost[f"the decision itself, {most} {name}: {case}"] / cost[f"the decision itself, {fewest} {name}: {case}"]
        grown.append(within(f"decision's cost, {most} / {fewest} {name}", "x", [factor], most / fewest, "linear", case))
    return grown


def main() -> None:
    remark = others_at_work()
    rows, left_out = [], []
    for part in (finding_and_intake, hashing, choosing):
        of_part, reasons = part()
        rows += of_part
        left_out += reasons
    rows += index_when_full()
    rows += core()
    rows += process()
    show("Conductor", rows)
    print(write("conductor", "make bench-conductor", rows, with_remarks(NOTES, left_out, remark), HEADLINES))


if __name__ == "__main__":
    main()
