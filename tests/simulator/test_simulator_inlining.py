"""Decode nodes that compute short prompts themselves, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from simulator.cluster import Cluster
from simulator.hardware import load
from simulator.run import Plan, options_of
from simulator.workload import SimRequest, Workload, generate

BLOCK = 64
HARDWARE = load("a100-llama2-70b")


def run(requests: Sequence[SimRequest], inline_tokens: int) -> Cluster:
    workload = Workload("test", BLOCK, requests)
    config = {"conductor.admission": "baseline", "decode_node.inline_tokens": inline_tokens}
    cluster = Cluster(workload, options_of(Plan(workload, HARDWARE, 2, 2, config=config)))
    cluster.run()
    cluster.validate()
    return cluster


def test_a_next_turn_whose_prefix_the_decode_node_has_does_not_wait_for_busy_prefill_groups() -> None:
    turn = tuple(range(30))
    first = SimRequest(0, 0.0, 30 * BLOCK, 2 * BLOCK + 1, turn, output_blocks=(30, 31))
    long = [SimRequest(1 + i, 50.0, 500 * BLOCK, 4, tuple(range(1000 * (i + 1), 1000 * (i + 1) + 500))) for i in range(2)]
    second = SimRequest(3, 50.1, 32 * BLOCK + 20, 4, (*turn, 30, 31, 32))
    waiting, inlined = (run([first, *long, second], inline_tokens).records for inline_tokens in (0, 40))
    assert inlined.cached_tokens[3] == 32 * BLOCK
    assert inlined.ttft_ms[3] < 3 * HARDWARE.step_ms(2, 33 * BLOCK) and inlined.ttft_ms[3] < waiting.ttft_ms[3] / 2
    assert inlined.ttft_ms[0] == pytest.approx(waiting.ttft_ms[0])


@pytest.mark.parametrize("name", ["chat", "agents"])
def test_every_request_ends_exactly_once_and_nothing_leaks_when_prompts_are_inlined(name: str) -> None:
    workload = generate(name, 4.0, 60.0, seed=1, block_tokens=BLOCK)
    cluster = run(workload.requests, 200)
    records = cluster.records
    for index, asked in enumerate(workload.requests):
        assert not math.isnan(records.finished_s[index]) and records.output_tokens[index] == asked.output_tokens
    cluster.loop.after(1000, cluster.loop.stop)  # Longer than any limit of time that a store or the Conductor has.
    cluster.loop.run()
    for store in cluster.stores.values():
        counts = store.pool.counts()
        assert (counts.in_use, counts.quarantined, counts.leases, counts.ingests) == (0, 0, 0, 0)
