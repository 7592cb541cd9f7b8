"""First figures of a whole cluster: 1 prefill + 1 decode node, SmolLM2-135M-Instruct in bfloat16 (`make bench-cluster`)."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.results import Row, write
from tests.support.cluster import Cluster

RUNS = 3
WORKLOADS = {
    "512/64, 1 at a time": ("--requests", "8", "--concurrency", "1"),
    "512/64, 8 at a time": ("--requests", "32", "--concurrency", "8"),
    "2048/64, 75% shared prefix, 4 at a time": (
        *("--requests", "16", "--concurrency", "4"),
        *("--prompt-tokens", "2048", "--shared-prefix", "0.75"),
    ),
    "512/64, Poisson 0.5 requests/s": ("--requests", "24", "--rate", "0.5"),
}
FIGURES = (
    ("requests", "1/s", lambda r: r["requests_per_s"]),
    ("goodput (TTFT 2 s, TBT 200 ms)", "1/s", lambda r: r["goodput_requests_per_s"]),
    ("output tokens", "1/s", lambda r: r["output_tokens_per_s"]),
    ("prompt tokens", "1/s", lambda r: r["prompt_tokens_per_s"]),
    ("cached prompt tokens", "%", lambda r: 100 * r["cached_tokens"] / r["prompt_tokens"]),
    ("TTFT p50", "ms", lambda r: r["ttft_ms"]["p50"]),
    ("TTFT p90", "ms", lambda r: r["ttft_ms"]["p90"]),
    ("TTFT p99", "ms", lambda r: r["ttft_ms"]["p99"]),
    ("TBT p50", "ms", lambda r: r["tbt_ms"]["p50"]),
    ("TBT p90", "ms", lambda r: r["tbt_ms"]["p90"]),
    ("TBT p99", "ms", lambda r: r["tbt_ms"]["p99"]),
)


def drive(url: str, arguments: tuple[str, ...], seed: int) -> dict[str, Any]:
    """The results of one `springtide bench serve --json`. With a seed of its own nothing is cached from the run before."""
    command = [sys.executable, "-m", "deploy.cli", "bench", "serve", "--url", url, "--json", "--seed", str(seed), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    results: dict[str, Any] = json.loads(done.stdout)["results"]
    return results


def main(arguments: Sequence[str]) -> None:
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    started = time.monotonic()
    with Cluster() as cluster:
        rows = [Row("start, installed, until requests are taken", "s", time.monotonic() - started)]
        seeds = itertools.count(1)
        drive(cluster.url, ("--requests", "4", "--concurrency", "2"), next(seeds))
        for name, arguments in WORKLOADS.items():
            runs = [drive(cluster.url, arguments, next(seeds)) for _ in range(RUNS)]
            for figure, unit, read in FIGURES:
                values = [read(run) for run in runs]
                rows.append(Row(figure, unit, statistics.median(values), (min(values), max(values)), case=name, rounds=RUNS))
    notes = (
        "1 prefill + 1 decode node, SmolLM2-135M-Instruct, bfloat16, driven by `springtide bench serve`. "
        f"A column says prompt/output tokens and the load; nothing is cached that the column does not share. {RUNS} runs."
    )
    print(write("cluster", "make bench-cluster", rows, notes))


if __name__ == "__main__":
    main(sys.argv[1:])
