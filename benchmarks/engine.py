"""Our engine beside vLLM's on the CPU and transformers, with the same weights (`make bench-engine`, after `make peers`).

While working on the engine: `make bench-engine ARGS="--peers --only decode"` measures ours without peers, in the rows whose names contain
the word. Only whole runs write results.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.checkpoint import demo_checkpoint
from benchmarks.driven import OURS, PEERS_VLLM, Bench, Driver, Job, Running, Scale, compared, console, others_at_work, with_remarks
from benchmarks.drivers.engine_work import FEW, KV_BYTES, STEPS
from benchmarks.results import Row, show, write
from benchmarks.vllm_server import environment as vllm_environment
from benchmarks.vllm_server import preloaded

THREADS = 2
CONTEXT = 512
ROUNDS = 5
STARTS = 5
SPRINGTIDE, VLLM, TRANSFORMERS = "Springtide", "vLLM", "transformers"
MIB = Scale("MiB", 0.0, 1 / (1 << 20))
SECONDS = Scale("s", 0.0, 1.0)
MEMORY, START_UP = "memory after all this", "start-up"
NOTES = (
    "SmolLM2-135M-Instruct in bfloat16, from the same safetensors file, greedy, on the same cores. Before it is measured, each system has "
    "to continue a text of 671 tokens with the same 16 tokens, as one prompt and in a batch. Prefill: one prompt of random tokens of which "
    "nothing is cached, to its first token; in chunks of either's default. Decode: the mean of "
    f"{STEPS} steps after {CONTEXT} tokens of context in each sequence, sampling included. TTFT: the time that the engine takes. Both are "
    "measured from a request that arrives as tokens to tokens that come out, scheduling, keeping of prefixes, model and sampling included, "
    "in one process that has no other to talk to: vLLM is `LLMEngine.add_request` and `step`; ours the cores of a prefill and a decode "
    "node with the pools of their stores, the hashing of blocks that a gateway does, and the very steps of a decode node, over an arena "
    "whose slots are used in random order. vLLM has prefix caching on, and its compiled code cached by an earlier start. Both have "
    f"{KV_BYTES >> 30} GiB for keys and values. transformers is the model called directly with a DynamicCache: nothing is scheduled. "
    f"{ROUNDS} rounds; memory: PSS when the rows above had been measured, once. Start-up, {STARTS} times in turn: from the process's start "
    "until the engine is ready for its first pass, ours with the cost models of both kinds of node measured."
)


@dataclass(frozen=True, slots=True)
class Case:
    """An operation that is measured `times` times in a round; the ratio to vLLM that is wanted."""

    name: str
    operation: str
    times: int
    scale: Scale
    wanted: float = 1.0


CASES = (
    # First, for it is short: after the largest batches vLLM took several times as long for it.
    Case(f"TTFT, 2048 tokens cached and {FEW} new", "cached-2048", 5, Scale("ms", 0.0, 1e3), wanted=3.0),
    *(
        Case(f"prefill, {tokens} tokens", f"prefill-{tokens}", times, Scale("tokens/s", tokens))
        for tokens, times in ((128, 5), (512, 3), (2048, 1), (4096, 1))
    ),
    *(
        Case(f"decode step, batch {batch}", f"decode-{batch}", times, Scale("ms", 0.0, 1e3 / STEPS))
        for batch, times in ((1, 2), (4, 2), (16, 1), (64, 1))
    ),
)


def drivers(cpus: Sequence[int], directory: str) -> dict[str, Driver]:
    threads = str(len(cpus))
    environment = {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    # What vLLM itself sets for its workers where they are processes of their own.
    in_process = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(map(str, cpus))}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }
    of_vllm = vllm_environment(cpus, KV_BYTES) | in_process
    return {
        SPRINGTIDE: Driver(SPRINGTIDE, "engine_springtide", OURS, (directory,), environment),
        VLLM: Driver(VLLM, "engine_vllm", PEERS_VLLM, (directory,), environment | of_vllm),
        TRANSFORMERS: Driver(TRANSFORMERS, "engine_transformers", PEERS_VLLM, (directory,), environment),
    }


def start_ups(jobs: Sequence[Job]) -> dict[str, list[float]]:
    """The seconds of STARTS starts, in turn."""
    seconds: dict[str, list[float]] = {job.driver.name: [] for job in jobs}
    for _ in range(STARTS):
        for job in jobs:
            running = Running(job)
            seconds[job.driver.name].append(running.measure("startup", 1))
            running.close()
    return seconds


def rows(name: str, scale: Scale, seconds: dict[str, list[float]], wanted: float) -> list[Row]:
    """Ours beside each peer, of which vLLM is the one to be met."""
    ours = seconds[SPRINGTIDE]
    peers = {peer: of_peer for peer, of_peer in seconds.items() if peer != SPRINGTIDE}
    if not peers:
        figures = [scale.figure(value) for value in ours]
        return [Row(name, scale.unit, median(figures), (min(figures), max(figures)), rounds=len(figures))]
    return [compared(name, scale, ours, of_peer, peer, wanted if peer == VLLM else None) for peer, of_peer in peers.items()]


def measured(jobs: Sequence[Job], only: str) -> tuple[list[Row], list[str]]:
    """The rows whose names contain `only`, and why peers were left out."""
    made: list[Row] = []
    with Bench(jobs[:1], jobs[1:]) as bench:
        for case in CASES:
            if only in case.name:
                console.print(case.name)
                made += rows(case.name, case.scale, bench.rounds(case.operation, case.times, ROUNDS), case.wanted)
        memory = {name: [float(held)] for name, held in bench.memory_bytes().items()}
    if only in MEMORY:
        made += rows(MEMORY, MIB, memory, 1.0)
    if only in START_UP:
        console.print(START_UP)
        made += rows(START_UP, SECONDS, start_ups([job for job in jobs if job.driver.name in memory]), 1.0)
    return made, bench.left_out


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="WORDS", help="rows whose names contain these")
    parser.add_argument("--peers", nargs="*", default=[VLLM, TRANSFORMERS], choices=[VLLM, TRANSFORMERS], help="default: all")
    options = parser.parse_args(arguments)
    cpus = sorted(os.sched_getaffinity(0))[:THREADS]
    os.sched_setaffinity(0, cpus)
    remark, libraries = others_at_work(), preloaded() if VLLM in options.peers else ""
    known = drivers(cpus, str(demo_checkpoint()))
    chosen = [SPRINGTIDE, *options.peers]
    made, left_out = measured([Job(known[name], len(cpus), CONTEXT) for name in chosen], options.only)
    show("Engine", made)
    if options.only or len(chosen) < len(known):
        console.print("not the whole benchmark: nothing is written")
        return
    notes = f"{len(cpus)} threads each. {NOTES} vLLM has {libraries}."
    print(write("engine", "make bench-engine", made, with_remarks(notes, left_out, remark)))


if __name__ == "__main__":
    main(sys.argv[1:])
