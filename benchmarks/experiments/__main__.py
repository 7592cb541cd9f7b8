"""`make experiments`: every experiment, or those named, into docs/experiments."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.driven import CHECKOUT, console
from benchmarks.experiments import orders, overload, policies, throughput
from benchmarks.experiments.pages import write_index
from simulator.workload import Workload, generate, read_trace

EXPERIMENTS = {"policies": policies.run, "overload": overload.run, "throughput": throughput.run, "orders": orders.run}
"""What makes each page, by the page's name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiments", nargs="*", help=f"{', '.join(EXPERIMENTS)}; default: all")
    parser.add_argument("--trace", type=Path, help="JSONL of the Mooncake project; default: generated conversations")
    parser.add_argument("--output", type=Path, default=CHECKOUT / "docs" / "experiments")
    arguments = parser.parse_args()
    trace = _trace(arguments.trace)
    for name in arguments.experiments or EXPERIMENTS:
        started = time.monotonic()
        EXPERIMENTS[name](trace, arguments.output)
        console.print(f"{name}: {time.monotonic() - started:.0f} s")
    write_index(arguments.output, trace)


def _trace(path: Path | None) -> Workload:
    if path is not None:
        return read_trace(path)
    console.print("no --trace: an hour of generated conversations takes its place", style="yellow")
    return generate("chat", 3.3, 3600.0, seed=0)


if __name__ == "__main__":
    main()
