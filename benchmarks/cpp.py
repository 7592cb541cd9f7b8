"""Chunked pipeline parallelism: how long one long prompt takes in a prefill group of X stages (`make bench-cpp`).

In the simulator with the costs that this machine's layers were measured to have, and for real with X = 1 and X = 2, one thread a stage.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.results import Row, show, write
from engine.formats.files import describe
from engine.layer_costs import LayerCosts, measure_layers
from engine.loader import load_model
from engine.profiling import measure_prefill
from engine.runner import ModelRunner
from prefill_node.core.split import split
from simulator.cluster import Cluster as SimCluster
from simulator.hardware import Hardware, StepTimes
from simulator.run import Plan, options_of
from simulator.workload import SimRequest, Workload
from springtide.blocks import blocks_for
from springtide.cost import DecodeCost, PrefillCost
from tests.support.cluster import Cluster
from tests.support.generate import generate
from tests.support.reference import random_prompt

BLOCK_TOKENS, CHUNK_TOKENS = 64, 512
PROMPT_TOKENS = 15 * CHUNK_TOKENS
"""The most whole chunks that the model's context has room for, with something to spare."""
LONG_PROMPT_TOKENS = 16 * PROMPT_TOKENS
"""Only simulated."""
CONTEXT_TOKENS = 4096
"""Up to which passes are measured for the simulator; beyond, attention grows as it did until there."""
STAGES = (2, 4)
PAIRS = 5
WANTED = 1.7


@dataclass(frozen=True, slots=True)
class MeasuredPasses:
    cost: PrefillCost

    def pass_ms(self, rows: Sequence[tuple[int, int]]) -> float:
        """Rows of (new tokens, tokens before them)."""
        return sum(self.cost.predict_ms(new, before) for new, before in rows) - self.cost.fixed_ms * (len(rows) - 1)


@dataclass(frozen=True, slots=True)
class Measured:
    """This machine as one thread of it was measured."""

    hardware: Hardware
    layers: LayerCosts

    def shares(self, stages: int) -> tuple[float, ...]:
        """The part of a pass's time that each stage takes, of the split that is quickest."""
        costs = [*self.layers.layers]
        ranges = split(costs, stages, self.layers.embedding, self.layers.head)
        costs[0] += self.layers.embedding
        costs[-1] += self.layers.head
        return tuple(sum(costs[layer] for layer in layers) / sum(costs) for layers in ranges)


def measure() -> Measured:
    torch.set_num_threads(1)
    info = describe("demo")
    spec = info.kv_spec("bfloat16", BLOCK_TOKENS)
    num_slots = blocks_for(CONTEXT_TOKENS, BLOCK_TOKENS)
    runner = ModelRunner(load_model(info, "bfloat16"), spec, np.zeros(num_slots * spec.bytes_per_slot, np.uint8), num_slots)
    cost = PrefillCost.fit(measure_prefill(runner, range(num_slots), CHUNK_TOKENS, budget_s=20.0))
    hardware = Hardware(
        name="this machine",
        num_layers=info.layers,
        kv_bytes_per_token=spec.bytes_per_token,
        link_bytes_per_s=1e9,
        arena_tokens=2 * LONG_PROMPT_TOKENS,
        device_tokens=2 * LONG_PROMPT_TOKENS,
        max_batch=1,
        prefill_cost=cost,
        decode_cost=DecodeCost(1.0, 0.0, 0.0),
        prefill_error=0.0,
        decode_error=0.0,
        passes=MeasuredPasses(cost),
        steps=StepTimes((0.0, 1.0), 0.0),
    )
    layers = measure_layers(info, "bfloat16", BLOCK_TOKENS, CHUNK_TOKENS, PROMPT_TOKENS // 2)
    return Measured(hardware, layers)


def simulated_ms(measured: Measured, num_tokens: int, stages: int) -> float:
    """The time from the request to its first token."""
    blocks = tuple(range(num_tokens // BLOCK_TOKENS))
    workload = Workload("one prompt", BLOCK_TOKENS, [SimRequest(0, 0.0, num_tokens, 2, blocks)])
    config = {"conductor.admission": "baseline", "prefill_node.chunk_tokens": CHUNK_TOKENS}
    options = options_of(Plan(workload, measured.hardware, 1, 1, config=config))
    # The decode node waits for a prompt as long as it takes.
    options = replace(options, stage_shares=measured.shares(stages), ingest_lease_s=math.inf)
    cluster = SimCluster(workload, options)
    cluster.run()
    return float(cluster.records.ttft_ms[0])


def group(stages: int) -> Cluster:
    return Cluster(
        prefill_node={"stages": stages, "threads": 1, "chunk_tokens": CHUNK_TOKENS},
        decode_node={"threads": 1},
        conductor={"admission": "baseline"},
        kv={"block_tokens": BLOCK_TOKENS, "arena_size": "512MiB"},
    )


def prefill_ms(cluster: Cluster, seed: int, num_tokens: int) -> float:
    """The time from the request to its only token, of a prompt that nobody has seen."""
    prompt = random_prompt(seed, num_tokens)
    began = time.perf_counter()
    answer = generate(cluster.grpc_address, cluster.model, prompt, 1)
    elapsed_ms = (time.perf_counter() - began) * 1000
    assert answer.cached_tokens == 0 and len(answer.token_ids) == 1
    return elapsed_ms


def real(pairs: int, num_tokens: int) -> Row:
    """Measures both one after the other, in turn and back; the cluster whose turn it is not is idle."""
    with group(1) as alone, group(2) as split_in_two:
        for cluster in (alone, split_in_two):
            prefill_ms(cluster, 0, CHUNK_TOKENS)
        times: dict[Cluster, list[float]] = {alone: [], split_in_two: []}
        for pair in range(pairs):
            for cluster in (alone, split_in_two) if pair % 2 else (split_in_two, alone):
                times[cluster].append(prefill_ms(cluster, 1 + pair, num_tokens))
    ratio = statistics.median(one / two for one, two in zip(times[alone], times[split_in_two], strict=True))
    ours = times[split_in_two]
    return Row(
        f"{num_tokens} tokens, X = 2, real",
        "ms",
        statistics.median(ours),
        (min(ours), max(ours)),
        peer=statistics.median(times[alone]),
        peer_name="X = 1",
        ratio=ratio,
        wanted=WANTED,
        met=ratio >= WANTED,
        peer_spread=(min(times[alone]), max(times[alone])),
        rounds=pairs,
    )


def main(arguments: Sequence[str]) -> None:
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    measured = measure()
    rows = []
    for num_tokens in (PROMPT_TOKENS, LONG_PROMPT_TOKENS):
        alone_ms = simulated_ms(measured, num_tokens, 1)
        for stages in STAGES:
            ms = simulated_ms(measured, num_tokens, stages)
            name = f"{num_tokens} tokens, X = {stages}, simulated"
            rows.append(Row(name, "ms", ms, peer=alone_ms, peer_name="X = 1", ratio=alone_ms / ms))
    rows.append(real(PAIRS, PROMPT_TOKENS))
    show("One long prompt in a prefill group of X stages", rows)
    notes = (
        f"SmolLM2-135M-Instruct, bfloat16, chunks of {CHUNK_TOKENS} tokens, fewer where attention is dear (the default), one thread a "
        "stage, nothing cached; time from the request to the first token. Simulated: the very scheduler of the prefill node, with passes "
        "as measured on one thread and stages of the measured costs of their layers, each on a core of its own. Real: whole clusters of "
        f"a prefill group and a decode node, which take turns in {PAIRS} pairs."
    )
    print(write("cpp", "make bench-cpp", rows, notes))


if __name__ == "__main__":
    main(sys.argv[1:])
