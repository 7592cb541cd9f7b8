"""Prefill groups of several stages, in virtual time."""

from __future__ import annotations

import pytest

from simulator.cluster import Cluster
from simulator.hardware import load
from simulator.run import Plan, options_of
from simulator.workload import SimRequest, Workload, generate
from springtide.chunking import LEAST_PART, Chunking
from springtide.errors import ConfigError

BLOCK = 512
CHUNK = 2048
HARDWARE = load("a100-llama2-70b")


def run(requests: list[SimRequest], stages: int, prefill: int = 1, **prefill_node: float) -> Cluster:
    workload = Workload("test", BLOCK, requests)
    config = {"conductor.admission": "baseline", "prefill_node.stages": stages, "prefill_node.chunk_tokens": CHUNK}
    config |= {f"prefill_node.{name}": value for name, value in prefill_node.items()}
    cluster = Cluster(workload, options_of(Plan(workload, HARDWARE, prefill, 1, config=config)))
    cluster.run()
    cluster.validate()
    return cluster


def one(num_tokens: int) -> list[SimRequest]:
    return [SimRequest(0, 1.0, num_tokens, 10, tuple(range(num_tokens // BLOCK)))]


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_each_further_chunk_of_a_long_prompt_takes_what_the_slowest_stage_takes(stages: int) -> None:
    num_tokens = 32 * CHUNK
    times_ms = [HARDWARE.pass_ms([(CHUNK, start)]) for start in range(0, num_tokens, CHUNK)]
    # Chunks grow dearer with what is before them, so that none waits for the one before it but in the first stage.
    wanted_ms = sum(times_ms[:-1]) / stages + times_ms[-1]
    assert run(one(num_tokens), stages).records.ttft_ms[0] == pytest.approx(wanted_ms, rel=0.01)


def test_the_longest_pass_can_be_configured() -> None:
    num_tokens, least = 4 * CHUNK, CHUNK // LEAST_PART
    wanted_ms = sum(HARDWARE.pass_ms([(least, start)]) for start in range(0, num_tokens, least))
    assert run(one(num_tokens), 1, chunk_ms=1.0).records.ttft_ms[0] == pytest.approx(wanted_ms, rel=0.01)


def test_a_prompt_of_one_chunk_takes_as_long_in_a_group() -> None:
    alone, group = (run(one(CHUNK), stages).records.ttft_ms[0] for stages in (1, 4))
    assert group == pytest.approx(alone)


def test_what_nodes_and_conductor_predict_of_a_group_comes_true() -> None:
    cluster = run(one(64 * CHUNK), 4)
    cost = cluster.prefills[next(iter(cluster.prefills))].load().prefill_cost
    assert cost is not None
    assert Chunking(cost, CHUNK).prompt_ms(64 * CHUNK, 0) == pytest.approx(cluster.records.ttft_ms[0], rel=0.1)


def test_groups_serve_a_workload_to_its_end() -> None:
    workload = generate("chat", 2.0, 60.0, seed=3, block_tokens=BLOCK)
    records = run(list(workload.requests), 3, prefill=2).records
    assert records.completed == len(workload.requests)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"prefill_node\.stages"):
        run(one(BLOCK), HARDWARE.num_layers + 1)
