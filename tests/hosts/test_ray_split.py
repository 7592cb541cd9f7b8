"""A cluster on Ray that becomes one of instances: those of the split go on until the instances serve, and every request is answered."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.ray.placement import Phase
from tests.hosts.test_ray_scaling import Load, prompt_of, settings_of
from tests.support.cluster import Cluster
from tests.support.installation import this_installation
from tests.support.ports import ReservedPorts
from tests.support.ray_nodes import RayMachines, cluster_on, placed_nodes, placement_of
from tests.support.reference import Reference

pytest.importorskip("ray")

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]
PATIENCE_S = 200.0
AT_A_TIME, OUTPUT_TOKENS = 2, 24
SPLIT, INSTANCE = {"prefill-0", "decode-0"}, {"instance-0", "instance-0.prefill"}


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A node of each role, on a Ray node that has room for one more."""
    with RayMachines() as machines:
        machines.start_head().wait_started()
        machines.add(cpus=3).wait_started()
        ports = ReservedPorts(2, machines.host)
        join_port, valkey_port = ports.numbers
        own = {"join_port": join_port, "valkey_port": valkey_port, "run_dir": str(tmp_path_factory.mktemp("run") / "head")}
        try:
            with cluster_on(machines, PATIENCE_S, **{**settings_of(model), "slo": {}}, **own, prefill=1, decode=1) as cluster:
                yield cluster
        finally:
            ports.release()
    assert placed_nodes() == {}, "they have ended with the cluster"


def test_the_nodes_of_a_split_serve_until_the_instances_do(cluster: Cluster, reference: Reference) -> None:
    cluster.wait_until(lambda: cluster.ready_instances() == SPLIT, "both to be there", PATIENCE_S)
    cluster.kill_all()
    cluster.start(this_installation(), prefill=0, decode=0, instances=1)
    seen: list[dict[str, Phase]] = []

    def changed() -> bool:
        seen.append({name: node.phase for name, node in placement_of(cluster).nodes.items()})
        return cluster.ready_instances() == INSTANCE and seen[-1].keys() == {"instance-0"}

    with ThreadPoolExecutor(AT_A_TIME + 1) as threads:
        load = Load(cluster, threads, AT_A_TIME, output_tokens=OUTPUT_TOKENS)
        try:
            cluster.wait_until(changed, "the instance to have taken their place", PATIENCE_S)
        finally:
            answers = load.end()
    left = [phases for phases in seen if not phases.keys() >= SPLIT or Phase.LEAVING in phases.values()]
    assert left != seen, "there was a time in which both were there"
    assert all(phases["instance-0"] is Phase.SERVING for phases in left), seen
    for seed, answer in answers:
        assert answer.token_ids == reference.greedy(prompt_of(seed), OUTPUT_TOKENS)
