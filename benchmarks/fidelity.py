"""The simulator beside the cluster that it stands for: the same requests played for real on this machine and in virtual time
(`make bench-fidelity`).

The machine is profiled by `springtide profile`. A few requests alone and runs of other requests show what the profile does not know: what
lies between passes and steps, and how much engines slow each other down.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.calibration import CORES, Busy, Calibration, Model, Played, Seen
from benchmarks.driven import others_at_work, with_remarks
from benchmarks.results import Row, show, write
from deploy.bench.workload import LOWEST_TOKEN_ID
from simulator.hardware import from_profile
from simulator.workload import SimRequest, Workload
from springtide.client import AsyncClient
from springtide.config import ClusterConfig
from springtide.modelinfo import KVSpec
from tests.support.cluster import Cluster

SPEC = KVSpec(30, 3, 64, "bfloat16", 64)
"""Of the demo model."""
VOCABULARY = 49152
BLOCK_TOKENS = SPEC.block_tokens
DOCUMENTS = 12
TURNS, REQUESTS = 6, 30
"""Runs to calibrate by and runs that are compared take turns, as the machine's own speed changes from one minute to the next."""
CASES = {"1 + 1": (1, 1, 1.1), "2 + 2": (2, 2, 0.8)}
"""Prefill and decode nodes, requests a second."""
LINK_BYTES_PER_S = 5e9
WANTED = 0.9
IDLE_REQUESTS = 5


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
        made.append(SimRequest(number, arrival, tokens, int(random.integers(16, 64)), (*prefix, *own)))
    return Workload("fidelity", BLOCK_TOKENS, made)


def prompt_of(request: SimRequest, seed: int) -> list[int]:
    """Its blocks' ids decide the tokens."""
    tokens: list[int] = []
    for block in request.blocks:
        tokens += np.random.default_rng([seed, block]).integers(LOWEST_TOKEN_ID, VOCABULARY, BLOCK_TOKENS).tolist()
    return tokens[: request.input_tokens]


async def play(url: str, requests: Sequence[SimRequest], seed: int, at_once: bool = True) -> Played:
    """For real. `at_once`: as they arrive, not one after another."""
    async with AsyncClient(url) as client:
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


def compare(name: str, real: Played, simulated: Played) -> list[Row]:
    rows = []
    for figure, take in (("mean", statistics.fmean), ("p90", lambda values: float(np.percentile(values, 90)))):
        for quantity in ("ttft_ms", "tbt_ms"):
            theirs, ours = take(getattr(real, quantity)), take(getattr(simulated, quantity))
            ratio = min(ours, theirs) / max(ours, theirs)
            row = f"{name}: {quantity.removesuffix('_ms').upper()} {figure}"
            rows.append(Row(row, "ms", ours, None, theirs, "the cluster", ratio, WANTED, ratio >= WANTED))
    return rows


def main() -> None:
    remark = others_at_work()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="springtide-fidelity-") as scratch:
        profile = profiled(Path(scratch))
        for name, (prefill, decode, rate_per_s) in CASES.items():
            slo = {"ttft_ms": ClusterConfig().slo.ttft_ms, "tbt_ms": ClusterConfig().slo.tbt_ms}
            lone, loaded, compared = [], [], []
            with Cluster(prefill=prefill, decode=decode, conductor={"admission": "baseline"}, slo=slo) as cluster:
                for seed in range(0, 3 * TURNS, 3):
                    lone.append(see(cluster, alone(seed), seed, at_once=False))
                    loaded.append(see(cluster, workload(rate_per_s, seed + 1), seed + 1))
                    compared.append(see(cluster, workload(rate_per_s, seed + 2), seed + 2))
            model = Calibration(prefill, decode, lone, loaded).fit(profile)
            simulated = [model.play(seen.load, prefill, decode)[0] for seen in compared]
            real, simulated = Played.of_all(seen.played for seen in compared), Played.of_all(simulated)
            rows += compare(name, real, simulated)
    show("Fidelity", rows)
    notes = (
        f"{TURNS} times {REQUESTS} requests as a Poisson process of "
        f"{', '.join(f'{rate:g}/s ({name})' for name, (_, _, rate) in CASES.items())}: questions of 20 to 300 tokens on {DOCUMENTS} "
        f"documents of 128 to 640, 16 to 64 tokens of output; all engines share {CORES:g} cores. `ours` is the simulation, the ratio the "
        "smaller of both figures over the larger. Calibrated by some requests alone and runs of other requests, which take turns with "
        "the runs that are compared."
    )
    print(write("fidelity", "make bench-fidelity", rows, with_remarks(notes, [], remark)))


if __name__ == "__main__":
    main()
