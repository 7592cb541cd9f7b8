"""The cluster beside one vLLM server under the same load (`make bench-serve`, after `make peers`). Takes half an hour: a sweep that finds
vLLM's best settings for each load, then rounds of ours beside vLLM with those.

`make bench-serve ARGS="--rates 2 --rounds 1 --chunks 256 2048"` is a shorter look; results and picture are written by whole runs only.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks import serve_load as load
from benchmarks.checkpoint import demo_checkpoint
from benchmarks.driven import console, others_at_work, with_remarks
from benchmarks.results import Row, show, write
from benchmarks.serve_load import LONG, SHORT, InFlightLimit, Objective, Records
from benchmarks.serve_picture import PICTURE, Curves, draw
from benchmarks.serve_sweep import LIMITS, RULE, Sweep, at_rate, warm_up
from benchmarks.vllm_server import ServerSettings, VllmServers, preloaded
from tests.support.cluster import Cluster

CORES = 2
RATES = (1.0, 2.0, 3.0)
"""Requests a second."""
CHUNKS = (2048, 512, 256, 128, 64)
"""vLLM's default first."""
ROUNDS = 5
DURATION_S, SWEEP_S = 15.0, 10.0
"""Seconds of a run in a round, and of one in the sweep."""
TTFT_FACTOR, TBT_FACTOR = 10.0, 5.0
"""Objectives as multiples of what a request takes that is alone (arXiv 2407.00079, section 8.1)."""
ALONE_REQUESTS = 6
KV_BYTES = 2 << 30
SPRINGTIDE, ADMITTING, VLLM = "Springtide", "Springtide, admission baseline", "vLLM"
OURS = {SPRINGTIDE: "", ADMITTING: ", admission `baseline`"}
"""What stands behind the names of their rows."""
NOTES = (
    f"SmolLM2-135M-Instruct in bfloat16 on the same cores. Springtide: `springtide up` as it is by default, two "
    "instances with a thread each: what would miss its objectives is answered 429; and with admission `baseline`, which refuses nothing "
    "for that. "
    f"vLLM: one `vllm serve`, prefix caching on; {KV_BYTES >> 30} GiB for keys and values each. The client runs on the same cores. Load: a "
    f"quarter of the requests have prompts of {LONG.prompt_tokens} tokens, of which three quarters are one of {LONG.prefixes} documents "
    f"that are new in each run, and {LONG.output_tokens} tokens of output; the others have {SHORT.prompt_tokens} and "
    f"{SHORT.output_tokens}; each kind is a Poisson process, {DURATION_S:g} s a run. {ROUNDS} rounds: all systems get the same requests, "
    "in turn and back, and the ratio is the median of the rounds' own, always at the same rate. Objectives of each kind: "
    f"{TTFT_FACTOR:g} times the TTFT and {TBT_FACTOR:g} times the TBT of a request alone (medians; the faster system's, vLLM with its "
    "default chunk), for every token; ours is told the longest to the first token and the shortest between tokens. Goodput: requests "
    "that were answered in full within their objectives, a second of the time in which "
    "requests arrived, however long the last of them took. Served: answered in full, in time or not; refused: answered 429 at once. "
    "Latencies are of what was served."
)
SWEPT = (
    f"vLLM's settings were swept in the same run, {SWEEP_S:g} s a setting and rate, the same requests for all: `--max-num-batched-tokens` "
    f"{', '.join(map(str, sorted(CHUNKS)))} with a thread on both cores; with the best of these a core left to its scheduler and HTTP "
    f"server; with the best of those a limit in front of the server, which the client keeps: {', '.join(map(str, LIMITS))}. Taken for "
    f"each rate, by itself: {RULE}. Ours were not swept."
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


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read of a run, and which way is better; None: neither."""

    name: str
    unit: str
    read: Callable[[Records], float]
    more_is_better: bool | None
    wanted: float | None = None
    """The ratio to vLLM that is wanted of ours as it is by default."""


LATENCIES = (
    Reading(f"TTFT p90 of {LONG.name}", "ms", lambda r: load.ttft_ms(r[LONG.name], 90), False),
    Reading(f"TTFT p90 of {SHORT.name}", "ms", lambda r: load.ttft_ms(r[SHORT.name], 90), False),
    Reading(f"TBT p99 of {SHORT.name}", "ms", lambda r: load.tbt_ms(r[SHORT.name], 99), False, wanted=1.0),
)
SHARES = tuple(
    figure
    for kind in (LONG.name, SHORT.name)
    for figure in (
        Reading(f"served {kind}", "%", lambda r, kind=kind: 100 * load.served_share(r[kind]), None),
        Reading(f"refused {kind}", "%", lambda r, kind=kind: 100 * load.refused_share(r[kind]), None),
    )
)


def objectives_of(alone: Sequence[Mapping[str, Objective]]) -> dict[str, Objective]:
    return {
        kind.name: Objective(
            TTFT_FACTOR * min(system[kind.name].ttft_ms for system in alone),
            TBT_FACTOR * min(system[kind.name].tbt_ms for system in alone),
        )
        for kind in load.KINDS
    }


@contextlib.contextmanager
def springtide(model: Path, objectives: Mapping[str, Objective] | None = None, admission: str | None = None) -> Iterator[str]:
    """Its URL. It knows one pair of objectives. For the first token the most lenient of the kinds', as what would miss it is refused;
    between tokens the strictest, as steps are of all kinds together. None: the default."""
    limits = list((objectives or {}).values())
    slo = {"ttft_ms": max(o.ttft_ms for o in limits), "tbt_ms": min(o.tbt_ms for o in limits)} if limits else {}
    conductor = {} if admission is None else {"admission": admission}
    kv = {"arena_size": KV_BYTES // 2}
    with Cluster(model=str(model), instances=2, slo=slo, conductor=conductor, kv=kv) as cluster:
        yield cluster.url


def play(url: str, runs: Runs, rates: Sequence[float], seconds: float, seed: int, limit: InFlightLimit | None = None) -> None:
    """One run at every rate, after a few requests to warm up. `seed`: of the round, and the same for all systems."""
    warm_up(url, seed)
    for rate in rates:
        records = load.loaded(url, rate, seconds, seed + load.SEEDS_APART * (1 + round(10 * rate)), limit)
        runs.records.setdefault(rate, []).append(records)


def play_round(
    runs: Mapping[str, Runs], model: Path, sweep: Sweep, rates: Sequence[float], seconds: float, seed: int, reverse: bool
) -> None:
    """Every system at every rate, vLLM with its best setting for each."""
    order = [*runs]
    for name in reversed(order) if reverse else order:
        if name in OURS:
            with springtide(model, sweep.objectives, "baseline" if name == ADMITTING else None) as url:
                play(url, runs[name], rates, seconds, seed)
        else:
            for rate in rates:
                setting = sweep.best(rate)
                with sweep.servers.get(setting.server).at_work() as url:
                    play(url, runs[name], [rate], seconds, seed, setting.limit)


def rows(runs: Mapping[str, Runs], rates: Sequence[float], objectives: Mapping[str, Objective]) -> list[Row]:
    """Ours beside vLLM, at each rate by itself."""
    made = []
    for system, suffix in OURS.items():
        for rate in rates:
            goodput = Reading("goodput", "1/s", lambda r, rate=rate: rate * load.good_share(r, objectives), True, wanted=1.0)
            for figure in (goodput, *LATENCIES, *SHARES):
                ours, theirs = (runs[name].figures(rate, figure.read) for name in (system, VLLM))
                wanted = figure.wanted if system == SPRINGTIDE else None
                made += _beside(f"{figure.name}{suffix}", figure, at_rate(rate), ours, theirs, wanted)
    names = [row.row for row in made]
    return sorted(made, key=lambda row: names.index(row.row))


def _beside(name: str, figure: Reading, case: str, ours: Sequence[float], theirs: Sequence[float], wanted: float | None) -> list[Row]:
    """No row where nothing of ours was served, of which there is no latency."""
    mine, peers = ([value for value in values if not math.isnan(value)] for values in (ours, theirs))
    if not mine:
        return []
    peer = median(peers) if peers else None
    ratio = _ratio(ours, theirs, figure.more_is_better) if figure.more_is_better is not None else None
    if ratio is None:
        wanted = None
    met = None if wanted is None else ratio >= wanted
    shown = ratio if ratio is not None and math.isfinite(ratio) else None
    spreads = [(min(values), max(values)) if values else None for values in (mine, peers)]
    return [
        Row(name, figure.unit, median(mine), spreads[0], peer, VLLM, shown, wanted, met, case, peer_spread=spreads[1], rounds=len(mine))
    ]


def _ratio(ours: Sequence[float], theirs: Sequence[float], more_is_better: bool) -> float | None:
    """The median of the rounds' own, above one where ours is the better; infinite where the peer achieved nothing. None where no round has
    one."""
    over, under = (ours, theirs) if more_is_better else (theirs, ours)
    pairs = [(a, b) for a, b in zip(over, under, strict=True) if not math.isnan(a) and not math.isnan(b) and (a or b)]
    return median(a / b if b else math.inf for a, b in pairs) if pairs else None


def curves(runs: Mapping[str, Runs], rates: Sequence[float], objectives: Mapping[str, Objective]) -> dict[str, Curves]:
    return {
        system: Curves(
            [rate * share for rate, share in zip(rates, of_system.curve(lambda r: load.good_share(r, objectives)), strict=True)],
            of_system.curve(lambda r: load.ttft_ms(r[LONG.name], 90)),
            of_system.curve(lambda r: load.tbt_ms(r[SHORT.name], 99)),
        )
        for system, of_system in runs.items()
    }


def measure_objectives(model: Path, servers: VllmServers) -> dict[str, Objective]:
    console.print("requests alone")
    with springtide(model) as url:
        alone = [load.unloaded(url, ALONE_REQUESTS, seed=1)]
    with servers.get(ServerSettings(CHUNKS[0], CORES)).at_work() as url:
        alone.append(load.unloaded(url, ALONE_REQUESTS, seed=1))
    return objectives_of(alone)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="requests a second")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=DURATION_S, help="of each run in a round")
    parser.add_argument("--sweep-seconds", type=float, default=SWEEP_S, help="of each run in the sweep of vLLM's settings")
    parser.add_argument("--chunks", nargs="+", type=int, default=CHUNKS, help="of vLLM, that are tried")
    options = parser.parse_args(arguments)
    whole = all(tuple(values) == default for values, default in ((options.rates, RATES), (options.chunks, CHUNKS)))
    whole = whole and (options.rounds, options.seconds, options.sweep_seconds) == (ROUNDS, DURATION_S, SWEEP_S)
    cpus = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, cpus)
    remark, libraries, model = others_at_work(), preloaded(), demo_checkpoint()
    runs = {name: Runs() for name in (*OURS, VLLM)}
    with VllmServers(model, cpus, KV_BYTES) as servers:
        objectives = measure_objectives(model, servers)
        aims = ", ".join(f"{kind}: TTFT {o.ttft_ms:.0f} ms, TBT {o.tbt_ms:.0f} ms" for kind, o in objectives.items())
        console.print(f"objectives: {aims}")
        sweep = Sweep(servers, objectives, options.sweep_seconds, seed=load.SEEDS_APART)
        sweep.run(options.rates, options.chunks, len(cpus))
        console.print(f"vLLM's best settings: {sweep.chosen()}")
        servers.keep({sweep.best(rate).server for rate in options.rates})
        for number in range(options.rounds):
            console.print(f"round {number + 1}")
            seed = load.SEEDS_APART**2 * (number + 1)
            play_round(runs, model, sweep, options.rates, options.seconds, seed, reverse=number % 2 == 1)
    made = [*rows(runs, options.rates, objectives), *sweep.rows()]
    show("Serving", made)
    if not whole:
        console.print("not the whole benchmark: nothing is written")
        return
    draw(options.rates, curves(runs, options.rates, objectives), objectives)
    notes = (
        f"{NOTES} Objectives: {aims}. vLLM has {libraries}. {SWEPT} That was: {sweep.chosen()}.\n\n"
        f"![Goodput and latencies by rate]({PICTURE.name})"
    )
    print(write("serve", "make bench-serve", made, with_remarks(notes, [*sweep.left_out.values()], remark)))


if __name__ == "__main__":
    main(sys.argv[1:])
