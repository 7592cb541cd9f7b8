"""The simulator beside the cluster that it stands for: the same requests played for real on this machine and in virtual time
(`make bench-fidelity`).

The machine is profiled by `springtide profile`. A few requests alone and a first run, of other requests, show what the profile does not
know: what lies between passes and steps, and how much engines slow each other down. The runs that are compared come after it.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.driven import console, others_at_work, with_remarks
from benchmarks.results import Row, show, write
from deploy.bench.workload import LOWEST_TOKEN_ID
from simulator.cluster import Cluster as SimulatedCluster
from simulator.cluster import Options
from simulator.hardware import Hardware, PassTimes, StepTimes, from_profile
from simulator.run import Plan, options_of
from simulator.workload import SimRequest, Workload
from springtide.client import AsyncClient
from springtide.config import ClusterConfig
from springtide.kvspec import KVSpec
from tests.support.cluster import Cluster

SPEC = KVSpec(30, 3, 64, "bfloat16", 64)
"""Of the demo model."""
VOCABULARY = 49152
BLOCK_TOKENS = SPEC.block_tokens
DOCUMENTS = 12
REQUESTS = 120
CASES = {"1 + 1": (1, 1, 1.4), "2 + 2": (2, 2, 1.6)}
"""Prefill and decode nodes, requests a second."""
CORES = 2.0
LINK_BYTES_PER_S = 5e9
WANTED = 0.9
IDLE_REQUESTS = 12
RPCS = 2
"""Between a client's sending and its first token, in the simulator."""


@dataclass(frozen=True, slots=True)
class Played:
    """Milliseconds of each request; TBT is the mean of its tokens'."""

    ttft_ms: Sequence[float]
    tbt_ms: Sequence[float]


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


@dataclass(frozen=True, slots=True)
class Model:
    hardware: Hardware
    rpc_s: float = 0.0
    contention: float = 0.0

    def options(self, load: Workload, prefill: int, decode: int) -> Options:
        config = ClusterConfig()
        settings = {
            "conductor.admission": "baseline",
            "prefill_node.chunk_tokens": config.prefill_node.chunk_tokens,
            "slo.ttft_ms": config.slo.ttft_ms,
            "slo.tbt_ms": config.slo.tbt_ms,
            "conductor.transfer_bytes_per_s": config.conductor.transfer_bytes_per_s,
        }
        return replace(
            options_of(Plan(load, self.hardware, prefill, decode, config=settings)),
            cores=CORES,
            rpc_s=self.rpc_s,
            contention=self.contention,
        )

    def play(self, load: Workload, prefill: int, decode: int) -> tuple[Played, Busy]:
        cluster = SimulatedCluster(load, self.options(load, prefill, decode))
        cluster.run()
        assert cluster.records.completed == len(load.requests), cluster.records.num_rejected()
        busy = Busy(*(sum(engine.busy_s for engine in engines.values()) for engines in (cluster.prefills, cluster.decodes)))
        return Played(cluster.records.ttft_ms, cluster.records.tbt_ms), busy

    def scaled(self, prefill: float, decode: float) -> Model:
        passes, steps = self.hardware.passes, self.hardware.steps
        assert isinstance(passes, PassTimes) and isinstance(steps, StepTimes)
        hardware = replace(
            self.hardware,
            passes=PassTimes(tuple(prefill * ms for ms in passes.by_tokens_ms), prefill * passes.per_pair_ms, 0.0),
            steps=StepTimes(tuple(decode * ms for ms in steps.by_batch_ms), decode * steps.per_context_token_ms),
            prefill_cost=self.hardware.prefill_cost.scaled(prefill),
            decode_cost=self.hardware.decode_cost.scaled(decode),
        )
        return replace(self, hardware=hardware)

    def with_step_overhead(self, step_ms: float) -> Model:
        """`step_ms`: between two steps."""
        steps = self.hardware.steps
        assert isinstance(steps, StepTimes)
        by_batch_ms = (0.0, *(ms + step_ms for ms in steps.by_batch_ms[1:]))
        return replace(self, hardware=replace(self.hardware, steps=replace(steps, by_batch_ms=by_batch_ms)))


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


@dataclass(frozen=True, slots=True)
class Busy:
    """Seconds in passes and in steps, of all engines."""

    passes: float
    steps: float

    @classmethod
    def of(cls, cluster: Cluster) -> Busy:
        return cls(
            busy_seconds(cluster, "prefill", "springtide_prefill_pass_seconds_sum"),
            busy_seconds(cluster, "decode", "springtide_decode_step_seconds_sum"),
        )

    def since(self, earlier: Busy) -> Busy:
        return Busy(self.passes - earlier.passes, self.steps - earlier.steps)


def calibrated(cluster: Cluster, model: Model, prefill: int, decode: int, rate_per_s: float) -> Model:
    """From requests alone, then a run of other requests than those that are compared."""
    alone = [replace(request, arrival_s=10.0 * i) for i, request in enumerate(workload(1.0, 2, IDLE_REQUESTS).requests)]
    before = Busy.of(cluster)
    played = asyncio.run(play(cluster.url, alone, seed=2, at_once=False))
    real = Busy.of(cluster).since(before)
    lone = Workload("alone", BLOCK_TOKENS, alone)
    _, simulated = model.play(lone, prefill, decode)
    scales = real.passes / simulated.passes, real.steps / simulated.steps
    gaps = sum(request.output_tokens - 1 for request in alone)
    waited_ms = sum(tbt * (request.output_tokens - 1) for tbt, request in zip(played.tbt_ms, alone, strict=True))
    step_overhead_ms = max(0.0, (waited_ms - 1000 * real.steps) / gaps)
    model = model.scaled(*scales).with_step_overhead(step_overhead_ms)
    again, _ = model.play(lone, prefill, decode)
    around_ms = statistics.median(ours - theirs for ours, theirs in zip(played.ttft_ms, again.ttft_ms, strict=True))
    model = replace(model, rpc_s=max(0.0, around_ms / 1000 / RPCS))

    before, load = Busy.of(cluster), workload(rate_per_s, seed=1)
    asyncio.run(play(cluster.url, load.requests, seed=1))
    passes_s = Busy.of(cluster).since(before).passes
    low, high = 0.0, 2.0
    while high - low > 0.01:
        middle = (low + high) / 2
        _, simulated = replace(model, contention=middle).play(load, prefill, decode)
        low, high = (low, middle) if simulated.passes > passes_s else (middle, high)
    model = replace(model, contention=low)
    console.print(
        f"alone, passes take {scales[0]:.2f} times as long as in the profile, steps {scales[1]:.2f} times; {step_overhead_ms:.1f} ms "
        f"between steps, {around_ms:.1f} ms around a prefill; another engine at work makes everything {low:.0%} longer"
    )
    return model


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
            with Cluster(prefill=prefill, decode=decode, conductor={"admission": "baseline"}, slo=slo) as cluster:
                model = calibrated(cluster, profile, prefill, decode, rate_per_s)
                load = workload(rate_per_s, seed=3)
                real = asyncio.run(play(cluster.url, load.requests, seed=3))
            simulated, _ = model.play(load, prefill, decode)
            rows += compare(name, real, simulated)
    show("Fidelity", rows)
    notes = (
        f"{REQUESTS} requests as a Poisson process of {', '.join(f'{rate:g}/s ({name})' for name, (_, _, rate) in CASES.items())}: "
        f"questions of 20 to 300 tokens on {DOCUMENTS} documents of 128 to 640, 16 to 64 tokens of output; all engines share {CORES:g} "
        "cores. `ours` is the simulation, the ratio the smaller of both figures over the larger. Calibrated by some "
        "requests alone and a run of other requests before."
    )
    print(write("fidelity", "make bench-fidelity", rows, with_remarks(notes, [], remark)))


if __name__ == "__main__":
    main()
