"""Where Ray nodes have the nodes of a pool that is packed, beside one that is spread."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import springtide
from deploy.ray.placement import ADOPT_S
from tests.support.cluster import Cluster
from tests.support.generate import generate
from tests.support.ray_nodes import RayMachines, all_serve, cluster_on, placed_nodes, placement_of
from tests.support.reference import Reference, random_prompt

pytest.importorskip("ray")

REPOSITORY = Path(springtide.__file__).parents[1]
pytestmark = [pytest.mark.hosts, pytest.mark.timeout(480)]
PATIENCE_S = 150.0
OUTPUT_TOKENS = 24
SLOW_WORKERS = f"""
import pathlib, time
if b"default_worker.py" in pathlib.Path("/proc/self/cmdline").read_bytes():
    time.sleep({ADOPT_S + 2})
"""


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayMachines]:
    """Two Ray nodes, either of which has room for all. Their workers take longer to start than Ray has to find room for any node."""
    slow = tmp_path_factory.mktemp("slow")
    (slow / "sitecustomize.py").write_text(SLOW_WORKERS)
    with RayMachines() as machines:
        machines.start_head().wait_started()
        for _ in range(2):
            machines.add(cpus=4, code=f"{slow}{os.pathsep}{REPOSITORY}").wait_started()
        yield machines


@pytest.fixture(scope="module")
def cluster(machines: RayMachines, model: Path) -> Iterator[Cluster]:
    kv = {"block_tokens": 16, "arena_size": "64MiB", "transports": ["tcp"]}
    settings = {"model": str(model), "served_model_name": "placed", "dtype": "float32", "kv": kv, "prefill": 2, "decode": 2}
    with cluster_on(machines, PATIENCE_S, {"decode": {"arrange": "pack"}}, **settings) as cluster:
        cluster.wait_until(lambda: len(cluster.ready_instances()) == 4, "all nodes to be there", PATIENCE_S)
        yield cluster


def on_nodes(machines: RayMachines, role: str) -> list[int]:
    """How many nodes of a role there are on each Ray node."""
    names = [[name for record in node.records() for name in record.processes] for node in machines.nodes[1:]]
    return sorted(sum(name in placed_nodes() and name.startswith(f"{role}-") for name in there) for there in names)


def test_a_packed_pool_is_on_one_ray_node_and_a_spread_one_on_both(cluster: Cluster, machines: RayMachines, reference: Reference) -> None:
    assert (on_nodes(machines, "decode"), on_nodes(machines, "prefill")) == ([0, 2], [1, 1])
    prompt = random_prompt(1, 300, 10, 250)
    assert generate(cluster.grpc_address, "placed", prompt, OUTPUT_TOKENS).token_ids == reference.greedy(prompt, OUTPUT_TOKENS)


def test_who_takes_the_place_of_one_that_has_ended_is_packed_too(cluster: Cluster, machines: RayMachines) -> None:
    before = placed_nodes()
    ended = next(record.pid for node in machines.nodes for record in node.records() if before["decode-1"] in record.processes.values())
    os.kill(ended, signal.SIGTERM)
    cluster.wait_until(lambda: before["decode-1"] not in placed_nodes().values(), "one to end", PATIENCE_S)
    cluster.wait_until(lambda: len(cluster.ready_instances()) == 4 == len(placed_nodes()), "another in its place", PATIENCE_S)
    assert (on_nodes(machines, "decode"), on_nodes(machines, "prefill")) == ([0, 2], [1, 1])


def test_the_placer_is_killed_and_the_next_one_finds_all_nodes_as_they_are(cluster: Cluster) -> None:
    """However long their new agents take to come."""
    before, pid = placed_nodes(), cluster.kill("placer")

    def found() -> bool:
        record = placement_of(cluster)
        return record.placer_pid != pid and record.nodes.keys() == before.keys() and all_serve(record)

    cluster.wait_until(found, "another to have all nodes", PATIENCE_S)
    assert placed_nodes() == before
