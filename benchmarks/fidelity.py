"""The simulator beside the cluster that it stands for: the same requests played for real on this machine and in virtual time
(`make bench-fidelity`). Takes twenty minutes.

The machine is profiled by `springtide profile`. What the profile does not know, what lies between passes and steps and how much engines
slow each other down, is learnt from a cluster of 1 prefill and 1 decode node at a low rate, at which requests come in pairs: as many by
chance hardly meet, and how much a pass slows the steps beside it could not be told. The simulator is then held to what it has not seen:
clusters of other shapes, and rates up to where requests pile up.

The cluster guesses no tokens (`decode_node.speculation`): simulated ones mean nothing, so that there is nothing to guess by.

`make bench-fidelity ARGS="--turns 1 --rates 2"` is a shorter look; results are written by whole runs only.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.calibration import CORES, Busy, Calibration, Model, Played, Seen
from benchmarks.driven import console, others_at_work, with_remarks
from benchmarks.results import Row, show, write
from deploy.bench.workload import LOWEST_TOKEN_ID
from simulator.hardware import from_profile
from simulator.workload import SimRequest, Workload
from springtide.client import NO_RETRIES, AsyncClient
from springtide.config import ClusterConfig
from springtide.modelinfo import KVSpec
from tests.support.cluster import Cluster

SPEC = KVSpec(30, 3, 64, "bfloat16", 64)
"""The KV of the demo model."""
VOCABULARY = 49152
BLOCK_TOKENS = SPEC.block_tokens
DOCUMENTS = 12
TURNS, REQUESTS = 3, 30
"""Every turn has all runs, those that are fitted to and those that are compared: the machine's own speed changes from one minute to the
next."""
LINK_BYTES_PER_S = 5e9
WANTED = 0.9
IDLE_REQUESTS, WARM_UP_REQUESTS = 5, 2


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """A cluster: prefill and decode nodes."""

    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.prefill} + {self.decode}"


FITTED, FITTED_RATE = ClusterShape(1, 1), 0.5
BEHIND_S = 0.25
"""The second of a pair comes so long after the first, to be computed while the answer to that is made."""
LONGEST_OUTPUT = 64
SHAPES = (FITTED, ClusterShape(2, 1), ClusterShape(1, 2), ClusterShape(2, 2))
RATES = tuple(FITTED_RATE * factor for factor in (2, 4, 8, 16))
"""Requests a second, of each shape: the rate that was fitted to, doubled until requests pile up, whatever comes of it."""
NOTES = (
    f"{REQUESTS} requests in each of {TURNS} turns, a Poisson process of questions of 20 to 300 tokens on {DOCUMENTS} documents of 128 to "
    f"640, 16 to 64 tokens of output; all engines share {CORES:g} cores, with a thread each. `ours` is the simulation, the ratio the "
    f"smaller of both figures over the larger. Fitted to a profile of the machine and, once for all rows, to a cluster of {FITTED}: "
    f"{IDLE_REQUESTS} requests one after another and {REQUESTS} in pairs, of which the second comes {1000 * BEHIND_S:.0f} ms after the "
    f"first, at {FITTED_RATE:g} requests/s in all, in each turn. Compared are other requests, "
    f"on clusters of {', '.join(map(str, SHAPES))} at {', '.join(f'{rate:g}' for rate in RATES)} requests/s: no rate that was fitted to, "
    "and the same for every shape, the last being more than the cores can serve. The rows of the fit itself say what is left where "
    "nothing is extrapolated; of them nothing is wanted."
)


def workload(rate_per_s: float, seed: int, requests: int = REQUESTS) -> Workload:
    """A Poisson process of questions on documents of 2 to 10 blocks, the popular ones more often (Zipf)."""
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1 / rate_per_s, requests))
    lengths = random.integers(2, 11, DOCUMENTS)
    popularity = 1 / np.arange(1, DOCUMENTS + 1)
    chosen = random.choice(DOCUMENTS, requests, p=popularity / popularity.sum())
    made = []
    for number, (arrival, document) in enumerate(zip(arrivals.tolist(), chosen.tolist(), strict=True)):
        prefix = [1000 * (1 + document) + i for i in range(lengths[document])]
        question = int(random.integers(20, 300))
        own = [1_000_000 + 100 * number + i for i in range(-(-question // BLOCK_TOKENS))]
        tokens = BLOCK_TOKENS * len(prefix) + question
        made.append(SimRequest(number, arrival, tokens, int(random.integers(16, LONGEST_OUTPUT)), (*prefix, *own)))
    return Workload("fidelity", BLOCK_TOKENS, made)


def prompt_of(request: SimRequest, seed: int) -> list[int]:
    """The tokens, which the ids of its blocks decide."""
    tokens: list[int] = []
    for block in request.blocks:
        tokens += np.random.default_rng([seed, block]).integers(LOWEST_TOKEN_ID, VOCABULARY, BLOCK_TOKENS).tolist()
    return tokens[: request.input_tokens]


async def play(url: str, requests: Sequence[SimRequest], seed: int, at_once: bool = True) -> Played:
    """What becomes of the requests on a real cluster. `at_once`: as they arrive, not one after another."""
    async with AsyncClient(url, retries=NO_RETRIES) as client:
        name, start = (await client.models())[0], time.monotonic() + 0.5

        async def send(request: SimRequest) -> tuple[float, float]:
            prompt = prompt_of(request, seed)
            if at_once:
                await asyncio.sleep(start + request.arrival_s - time.monotonic())
            sent, times = time.monotonic(), []
            options = {"max_tokens": request.output_tokens, "ignore_eos": True, "temperature": 0, "stream_options": {"include_usage": True}}
            async for chunk in client.complete(prompt, model=name, **options):
                if chunk.text:
                    times.append(chunk.received_at)
            return 1000 * (times[0] - sent), 1000 * (times[-1] - times[0]) / (request.output_tokens - 1)

        if at_once:
            figures = await asyncio.gather(*(send(request) for request in requests))
        else:
            figures = [await send(request) for request in requests]
    return Played(*zip(*figures, strict=True))


def profiled(directory: Path) -> Model:
    path, config = directory / "profile.json", ClusterConfig()
    command = [sys.executable, "-m", "deploy.cli", "profile", "--threads", "1", "--output", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    hardware = from_profile(
        path,
        spec=SPEC,
        link_bytes_per_s=LINK_BYTES_PER_S,
        arena_tokens=config.kv.arena_size // SPEC.bytes_per_token,
        max_batch=config.decode_node.max_batch,
    )
    return Model(hardware)


def busy_seconds(cluster: Cluster, role: str, metric: str) -> float:
    return sum(cluster.metric(name, metric) for name in cluster.record.processes if name.startswith(role) and "store" not in name)


def busy(cluster: Cluster) -> Busy:
    return Busy(
        busy_seconds(cluster, "prefill", "springtide_prefill_pass_seconds_sum"),
        busy_seconds(cluster, "decode", "springtide_decode_step_seconds_sum"),
    )


def see(cluster: Cluster, load: Workload, seed: int, at_once: bool = True) -> Seen:
    before = busy(cluster)
    played = asyncio.run(play(cluster.url, load.requests, seed, at_once))
    return Seen(load, played, busy(cluster).since(before))


def alone(seed: int) -> Workload:
    requests = workload(1.0, seed, IDLE_REQUESTS).requests
    return Workload("alone", BLOCK_TOKENS, [replace(request, arrival_s=10.0 * i) for i, request in enumerate(requests)])


def pairs(seed: int) -> Workload:
    """Requests by twos, FITTED_RATE of them a second: the first has a long answer, amid which the second's prompt is computed."""
    made = []
    for number, request in enumerate(workload(FITTED_RATE, seed).requests):
        pair, second = divmod(number, 2)
        output = request.output_tokens if second else LONGEST_OUTPUT
        made.append(replace(request, arrival_s=2 * pair / FITTED_RATE + second * BEHIND_S, output_tokens=output))
    return Workload("pairs", BLOCK_TOKENS, made)


def compare(case: str, real: Played, simulated: Played, wanted: float | None = WANTED) -> list[Row]:
    rows = []
    for figure, take in (("mean", statistics.fmean), ("p90", lambda values: float(np.percentile(values, 90)))):
        for quantity in ("ttft_ms", "tbt_ms"):
            theirs, ours = take(getattr(real, quantity)), take(getattr(simulated, quantity))
            ratio = min(ours, theirs) / max(ours, theirs)
            met = None if wanted is None else ratio >= wanted
            row = f"{quantity.removesuffix('_ms').upper()} {figure}"
            rows.append(Row(row, "ms", ours, None, theirs, "the cluster", ratio, wanted, met, case=case))
    return rows


@dataclass(slots=True)
class Observations:
    """What was seen of the clusters: what the model is fitted to, and what it is held to."""

    lone: list[Seen]
    low: list[Seen]
    compared: defaultdict[tuple[ClusterShape, float], list[Seen]]
    """The runs of each shape and rate."""

    def turn(self, shapes: Sequence[ClusterShape], rates: Sequence[float], number: int) -> None:
        """One run of each, on new clusters."""
        slo = {"ttft_ms": ClusterConfig().slo.ttft_ms, "tbt_ms": ClusterConfig().slo.tbt_ms}
        for place, shape in enumerate(shapes):
            console.print(f"turn {number + 1}: {shape}")
            seed = 100 * (number * len(shapes) + place)
            settings = {"conductor": {"admission": "baseline"}, "decode_node": {"speculation": "off"}, "slo": slo}
            with Cluster(prefill=shape.prefill, decode=shape.decode, **settings) as cluster:
                see(cluster, workload(1.0, seed, WARM_UP_REQUESTS), seed)
                if shape == FITTED:
                    self.lone.append(see(cluster, alone(seed + 1), seed + 1, at_once=False))
                    self.low.append(see(cluster, pairs(seed + 2), seed + 2))
                for index, rate in enumerate(rates, 3):
                    self.compared[shape, rate].append(see(cluster, workload(rate, seed + index), seed + index))

    def rows(self, model: Model) -> list[Row]:
        rows = []
        for (shape, rate), seen in self.compared.items():
            rows += compare(f"{shape}, {rate:g} requests/s", *both(model, shape, seen))
        return [*rows, *compare(f"{FITTED}, {FITTED_RATE:g} requests/s in pairs, fitted to", *both(model, FITTED, self.low), wanted=None)]


def both(model: Model, shape: ClusterShape, runs: Sequence[Seen]) -> tuple[Played, Played]:
    """What was seen, and what is simulated."""
    simulated = [model.play(seen.load, shape.prefill, shape.decode)[0] for seen in runs]
    return Played.of_all(seen.played for seen in runs), Played.of_all(simulated)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="requests a second")
    options = parser.parse_args(arguments)
    remark = others_at_work()
    runs = Observations([], [], defaultdict(list))
    with tempfile.TemporaryDirectory(prefix="springtide-fidelity-") as scratch:
        profile = profiled(Path(scratch))
        for number in range(options.turns):
            runs.turn(SHAPES, options.rates, number)
    rows = runs.rows(Calibration(FITTED.prefill, FITTED.decode, runs.lone, runs.low).fit(profile))
    show("Fidelity", rows)
    if (options.turns, tuple(options.rates)) != (TURNS, RATES):
        console.print("not the whole benchmark: nothing is written")
        return
    print(write("fidelity", "make bench-fidelity", rows, with_remarks(NOTES, [], remark)))


if __name__ == "__main__":
    main(sys.argv[1:])
