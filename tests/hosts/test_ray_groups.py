"""Prefill groups whose stages Ray places on Ray nodes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.generate import generate
from tests.support.ray_nodes import RayMachines, cluster_on
from tests.support.reference import Reference, random_prompt

pytest.importorskip("ray")

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(480)]
PATIENCE_S = 150.0
OUTPUT_TOKENS = 24
STAGES = 2


@pytest.fixture(scope="module")
def machines() -> Iterator[RayMachines]:
    """A head that places nothing on itself, and a node more than the stages need."""
    with RayMachines() as machines:
        machines.start_head().wait_started()
        for _ in range(STAGES + 1):
            machines.add(cpus=2).wait_started()
        yield machines


@pytest.fixture(scope="module")
def cluster(machines: RayMachines, model: Path) -> Iterator[Cluster]:
    settings: dict[str, Any] = {"model": str(model), "served_model_name": "apart", "dtype": "float32"}
    settings["kv"] = {"block_tokens": 16, "arena_size": "64MiB", "transports": ["tcp"]}
    settings["prefill_node"] = {"stages": STAGES, "spread_stages": True, "chunk_tokens": 128}
    with cluster_on(machines, PATIENCE_S, **settings, prefill=1, decode=2) as cluster:
        cluster.wait_until(lambda: len(cluster.ready_instances()) == 3, "the group and the decode nodes to be there", PATIENCE_S)
        yield cluster


def stages_at(machines: RayMachines) -> list[set[str]]:
    """The stages of groups on each Ray node, by the names of their engines."""
    return [
        {name for record in node.records() for name in record.processes if name.startswith("prefill-") and not name.endswith("-store")}
        for node in machines.nodes
    ]


def test_the_stages_of_a_group_are_on_ray_nodes_of_their_own_and_it_answers_as_transformers_do(
    cluster: Cluster, machines: RayMachines, reference: Reference
) -> None:
    assert cluster.ready_instances() == {"prefill-0", "decode-0", "decode-1"}
    assert sorted(map(sorted, stages_at(machines))) == [[], [], ["prefill-0"], ["prefill-0.stage-1"]]
    prompt = random_prompt(1, 500, 10, 250)
    cold, cached = (generate(cluster.grpc_address, "apart", prompt, OUTPUT_TOKENS) for _ in range(2))
    assert cold.token_ids == cached.token_ids == reference.greedy(prompt, OUTPUT_TOKENS)
    assert (cold.cached_tokens, cached.cached_tokens) == (0, 496)


def test_a_group_that_loses_a_ray_node_forms_again_elsewhere_and_no_answer_is_lost(
    cluster: Cluster, machines: RayMachines, reference: Reference
) -> None:
    lost = next(node for node, stages in zip(machines.nodes, stages_at(machines), strict=True) if "prefill-0.stage-1" in stages)
    prompts = [random_prompt(seed, 1500, 10, 250) for seed in range(10, 14)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = [threads.submit(generate, cluster.grpc_address, "apart", prompt, OUTPUT_TOKENS) for prompt in prompts]
        cluster.wait_until(lambda: any(one.running for one in cluster.status().instances), "the group to be at work")
        lost.kill(and_nodes=True)
        assert [answer.result().token_ids for answer in answers] == [reference.greedy(prompt, OUTPUT_TOKENS) for prompt in prompts]
    roles = ["decode", "decode", "prefill"]
    cluster.wait_until(lambda: sorted(name.partition("-")[0] for name in cluster.ready_instances()) == roles, "all to be there", PATIENCE_S)
    there = sorted(name for stages in stages_at(machines) for name in stages)
    assert len(there) == STAGES and not any(name.startswith("prefill-0") for name in there), "both stages are new"
