"""The cluster beside one vLLM server under the same load (`make bench-serve`, after `make peers`). Takes a quarter of an hour.

`make bench-serve ARGS="--rates 1 2 --rounds 1 --seconds 20"` is a shorter look; results and picture are written by whole runs only.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks import serve_load as load
from benchmarks.checkpoint import demo_checkpoint
from benchmarks.driven import console, others_at_work, with_remarks
from benchmarks.results import Row, show, write
from benchmarks.serve_load import LONG, SHORT, Objective, Records
from benchmarks.serve_picture import PICTURE, Curves, draw
from benchmarks.vllm_server import VllmServer, environment
from tests.support.cluster import Cluster

CORES = 2
RATES = (0.5, 1.0, 1.5, 2.0, 3.0)
"""Requests a second."""
ROUNDS = 3
DURATION_S = 30.0
TTFT_FACTOR, TBT_FACTOR = 10.0, 5.0
"""Objectives as multiples of what a request takes that is alone (arXiv 2407.00079, section 8.1)."""
ALONE_REQUESTS = 6
KV_BYTES = 2 << 30
SEEDS_APART = 100
SPRINGTIDE, VLLM = "Springtide", "vLLM"
NOTES = (
    f"SmolLM2-135M-Instruct in bfloat16 on the same cores. Springtide: `springtide up` with 1 prefill and 1 decode node, a thread each, "
    "the default admission, which answers 429 to what would miss its objectives; vLLM: one `vllm serve` with 2 threads, Intel's OpenMP "
    f"library, prefix caching and the defaults; {KV_BYTES >> 30} GiB for keys and values each. The client runs on the same cores. Load: "
    f"a quarter of the requests have prompts of {LONG.prompt_tokens} tokens, of which three quarters are one of {LONG.prefixes} documents "
    f"that are new in each run, and {LONG.output_tokens} tokens of output; the others have {SHORT.prompt_tokens} and "
    f"{SHORT.output_tokens}; each kind is a Poisson process, {DURATION_S:g} s a run. Objectives of each kind: {TTFT_FACTOR:g} times the "
    f"TTFT and {TBT_FACTOR:g} times the TBT of a request alone (medians; the faster system's), for every token. Goodput: requests a second "
    "that were answered in full within their objectives."
)


@dataclass(slots=True)
class Runs:
    """What was seen of one system: rate -> one entry a round."""

    records: dict[float, list[Records]] = field(default_factory=dict)

    def figures(self, rate: float, read: Callable[[Records], float]) -> list[float]:
        return [read(records) for records in self.records[rate]]

    def curve(self, read: Callable[[Records], float]) -> list[float]:
        """Medians, by rate."""
        return [median(self.figures(rate, read)) for rate in self.records]


def objectives_of(alone: Sequence[Mapping[str, Objective]]) -> dict[str, Objective]:
    return {
        kind.name: Objective(
            TTFT_FACTOR * min(system[kind.name].ttft_ms for system in alone),
            TBT_FACTOR * min(system[kind.name].tbt_ms for system in alone),
        )
        for kind in load.KINDS
    }


@contextlib.contextmanager
def springtide(model: str, objectives: Mapping[str, Objective] | None = None) -> Iterator[str]:
    """Its URL. Admission knows one pair of objectives: the most lenient of those of the kinds."""
    limits = list((objectives or {}).values())
    slo = {"ttft_ms": max(o.ttft_ms for o in limits), "tbt_ms": max(o.tbt_ms for o in limits)} if limits else {}
    with Cluster(model=model, prefill=1, decode=1, slo=slo, kv={"arena_size": KV_BYTES // 2}) as cluster:
        yield cluster.url


def play(url: str, runs: Runs, rates: Sequence[float], seconds: float, seed: int) -> None:
    """Once at every rate. What came before is forgotten by the caches or of no use to this: seeds differ."""
    load.loaded(url, 1.0, 3.0, seed)
    for rate in rates:
        seed += SEEDS_APART
        runs.records.setdefault(rate, []).append(load.loaded(url, rate, seconds, seed))


def rows(runs: Mapping[str, Runs], rates: Sequence[float], objectives: Mapping[str, Objective]) -> list[Row]:
    made = []
    figures: tuple[tuple[str, str, Callable[[Records], float], bool], ...] = (
        ("goodput", "1/s", lambda r: load.goodput_per_s(r, objectives), True),
        ("TTFT p90 of documents", "ms", lambda r: load.ttft_ms(r[LONG.name], 90), False),
        ("TTFT p90 of chats", "ms", lambda r: load.ttft_ms(r[SHORT.name], 90), False),
        ("TBT p99 of chats", "ms", lambda r: load.tbt_ms(r[SHORT.name], 99), False),
    )
    for name, unit, read, more_is_better in figures:
        for rate in rates:
            ours, theirs = (runs[system].figures(rate, read) for system in (SPRINGTIDE, VLLM))
            made.append(_beside(f"{name}, {rate:g} requests/s", unit, ours, theirs, more_is_better))
    good, slow = figures[0][2], figures[-1][2]
    ours, theirs = ([max(runs[system].curve(good))] for system in (SPRINGTIDE, VLLM))
    made.append(_beside("highest goodput", "1/s", ours, theirs, more_is_better=True, wanted=1.0))
    ours, theirs = ([runs[system].curve(slow)[-1] / runs[system].curve(slow)[0]] for system in (SPRINGTIDE, VLLM))
    name = f"TBT p99 of chats, {rates[-1]:g} over {rates[0]:g} requests/s"
    return [*made, _beside(name, "x", ours, theirs, more_is_better=False, wanted=1.0)]


def _beside(name: str, unit: str, ours: Sequence[float], theirs: Sequence[float], more_is_better: bool, wanted: float | None = None) -> Row:
    """The ratio is the median of the rounds' own; infinite ones, where a peer achieved nothing, are left out."""
    over, under = (ours, theirs) if more_is_better else (theirs, ours)
    ratios = [a / b for a, b in zip(over, under, strict=True) if b > 0 and not math.isnan(a / b)]
    ratio = median(ratios) if ratios else None
    met = None if wanted is None else ratio is not None and ratio >= wanted
    return Row(name, unit, median(ours), (min(ours), max(ours)), median(theirs), VLLM, ratio, wanted, met)


def curves(runs: Mapping[str, Runs], objectives: Mapping[str, Objective]) -> dict[str, Curves]:
    return {
        system: Curves(
            of_system.curve(lambda r: load.goodput_per_s(r, objectives)),
            of_system.curve(lambda r: load.ttft_ms(r[LONG.name], 90)),
            of_system.curve(lambda r: load.tbt_ms(r[SHORT.name], 99)),
        )
        for system, of_system in runs.items()
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="requests a second")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=DURATION_S, help="of each run")
    options = parser.parse_args(arguments)
    cpus = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, cpus)
    remark, model = others_at_work(), demo_checkpoint()
    runs = {SPRINGTIDE: Runs(), VLLM: Runs()}
    console.print("vLLM starts")
    with VllmServer(model, environment(cpus, KV_BYTES)) as server:
        console.print("requests alone")
        with springtide(str(model)) as url:
            alone = [load.unloaded(url, ALONE_REQUESTS, seed=1)]
        with server.at_work() as url:
            alone.append(load.unloaded(url, ALONE_REQUESTS, seed=1))
        objectives = objectives_of(alone)
        aims = ", ".join(f"{kind}: TTFT {o.ttft_ms:.0f} ms, TBT {o.tbt_ms:.0f} ms" for kind, o in objectives.items())
        console.print(f"objectives: {aims}")
        for number in range(options.rounds):
            console.print(f"round {number + 1}")
            for name in (SPRINGTIDE, VLLM) if number % 2 == 0 else (VLLM, SPRINGTIDE):
                with springtide(str(model), objectives) if name == SPRINGTIDE else server.at_work() as url:
                    play(url, runs[name], options.rates, options.seconds, seed=SEEDS_APART**2 * (number + 1))
    made = rows(runs, options.rates, objectives)
    show("Serving", made)
    if (tuple(options.rates), options.rounds, options.seconds) != (RATES, ROUNDS, DURATION_S):
        console.print("not the whole benchmark: nothing is written")
        return
    draw(options.rates, curves(runs, objectives), objectives)
    notes = f"{NOTES} Objectives: {aims}.\n\n![Goodput and latencies by rate]({PICTURE.name})"
    print(write("serve", "make bench-serve", made, with_remarks(notes, [], remark)))


if __name__ == "__main__":
    main(sys.argv[1:])
