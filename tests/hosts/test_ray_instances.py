"""Instances that Ray places: more of them while the work lasts, and others in the place of those whose Ray node is lost, and no answer is
lost or wrong."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.hosts.test_ray import Load as Streams
from tests.hosts.test_ray_scaling import AT_A_TIME, OUTPUT_TOKENS, SCALING, Load, prompt_of, settings_of
from tests.support.cluster import Cluster
from tests.support.ray_nodes import RayMachines, cluster_on, placed_nodes
from tests.support.reference import Reference

pytest.importorskip("ray")

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(480)]
PATIENCE_S = 150.0


@pytest.fixture(scope="module")
def machines() -> Iterator[RayMachines]:
    """A head that places nothing on itself, and two nodes, either of which has room for all."""
    with RayMachines() as machines:
        machines.start_head().wait_started()
        for _ in range(2):
            machines.add(cpus=2).wait_started()
        yield machines


@pytest.fixture(scope="module")
def cluster(machines: RayMachines, model: Path) -> Iterator[Cluster]:
    with cluster_on(machines, PATIENCE_S, {"instance": {"most": 2}, **SCALING}, **settings_of(model), instances=1) as cluster:
        yield cluster
    assert placed_nodes() == {}, "they have ended with the cluster"


def instances(cluster: Cluster) -> set[str]:
    """Those that take requests in both roles."""
    ready = cluster.ready_instances()
    return {name for name in ready if f"{name}.prefill" in ready}


def test_there_are_more_instances_while_the_work_lasts(cluster: Cluster, reference: Reference) -> None:
    assert instances(cluster) == {"instance-0"} and cluster.ready_instances() == {"instance-0", "instance-0.prefill"}
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        load = Load(cluster, threads)
        cluster.wait_until(lambda: len(instances(cluster)) == 2, "a second instance under load", PATIENCE_S)
        asked = cluster.status().requests_scheduled
        cluster.wait_until(lambda: cluster.status().requests_scheduled >= asked + 4 * AT_A_TIME, "the load to go on with both", PATIENCE_S)
        answers = load.end()
    cluster.wait_until(lambda: len(instances(cluster)) == 1, "one to leave after the load", PATIENCE_S)
    for seed, answer in answers[:: max(1, len(answers) // 8)]:
        assert answer.token_ids == reference.greedy(prompt_of(seed), OUTPUT_TOKENS)


def test_an_instance_whose_machine_is_lost_is_placed_elsewhere(cluster: Cluster, machines: RayMachines, reference: Reference) -> None:
    cluster.wait_until(lambda: sum(node.agents for node in machines.nodes) == 1, "one to be there", PATIENCE_S)
    (lost,) = [node for node in machines.nodes if node.agents]
    before = set(placed_nodes().values())
    with ThreadPoolExecutor(4) as threads:
        streams = Streams(cluster, threads, range(10, 13))
        streams.wait_begun()
        lost.kill(and_nodes=True)
        streams.check(reference)
    cluster.wait_until(lambda: len(instances(cluster)) == 1 and not before & set(placed_nodes().values()), "another to serve", PATIENCE_S)
    assert [node.agents for node in machines.nodes if node is not lost and node is not machines.nodes[0]] == [1]
