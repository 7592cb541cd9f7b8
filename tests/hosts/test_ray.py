"""A cluster whose nodes Ray places, on a Ray of several nodes: it answers as transformers do, and neither a Ray node's death nor that of
Ray's head ends a stream."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event

import psutil
import pytest

from tests.support.cluster import Cluster
from tests.support.generate import Generated, generate
from tests.support.ray_nodes import RayMachines, RayNode, cluster_on, placed_nodes
from tests.support.reference import Reference, random_prompt

pytest.importorskip("ray")

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(480)]
PATIENCE_S = 150.0
"""Ray alone has a dozen processes, and starts three times as many."""
OUTPUT_TOKENS = 24
LONG = 200


@pytest.fixture(scope="module")
def machines() -> Iterator[RayMachines]:
    """A head that places nothing on itself, and two nodes, either of which has room for all."""
    with RayMachines() as machines:
        machines.start_head().wait_started()
        for _ in range(2):  # one after the other: Ray gives a node half a minute to start
            machines.add(cpus=3).wait_started()
        yield machines


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which a module has a name of ours."""
    directory = tmp_path_factory.mktemp("elsewhere")
    (directory / "deploy.py").write_text("raise ImportError('this is not the one that is meant')\n")
    return directory


@pytest.fixture(scope="module")
def cluster(machines: RayMachines, model: Path, elsewhere: Path) -> Iterator[Cluster]:
    kv = {"block_tokens": 16, "arena_size": "64MiB", "transports": ["tcp"]}
    settings = {"model": str(model), "served_model_name": "placed", "dtype": "float32"}
    with (
        contextlib.chdir(elsewhere),
        cluster_on(machines, PATIENCE_S, **settings, kv=kv, prefill=1, decode=2) as cluster,
    ):
        cluster.wait_until(lambda: len(cluster.ready_instances()) == 3, "all nodes to be there", PATIENCE_S)
        yield cluster
    assert placed_nodes() == {}, "they have ended with the cluster"


def prompt_of(seed: int, length: int = 100) -> list[int]:
    return random_prompt(seed, length, 10, 250)


class Load:
    """Long streams that run at the same time, each of which is to be answered as if nothing had happened."""

    def __init__(self, cluster: Cluster, threads: ThreadPoolExecutor, seeds: range) -> None:
        self._begun = [Event() for _ in seeds]
        self._answers: list[tuple[int, Future[Generated]]] = [
            (seed, threads.submit(self._one, cluster, seed, begun)) for seed, begun in zip(seeds, self._begun, strict=True)
        ]

    def wait_begun(self) -> None:
        assert all(begun.wait(60) for begun in self._begun)

    def check(self, reference: Reference) -> None:
        for seed, answer in self._answers:
            assert answer.result().token_ids == reference.greedy(prompt_of(seed), LONG)

    @property
    def running(self) -> bool:
        return not all(answer.done() for _, answer in self._answers)

    @staticmethod
    def _one(cluster: Cluster, seed: int, begun: Event) -> Generated:
        return generate(cluster.grpc_address, "placed", prompt_of(seed), LONG, on_token=lambda _: begun.set())


def test_nodes_are_spread_over_ray_and_answer_as_transformers_do(cluster: Cluster, machines: RayMachines, reference: Reference) -> None:
    assert cluster.ready_instances() == {"prefill-0", "decode-0", "decode-1"}
    head, first, second = machines.nodes
    assert head.agents == 0 and sorted((first.agents, second.agents)) == [1, 2]
    for node in (first, second):
        assert any("decode-" in name for record in node.records() for name in record.processes)
    prompt = prompt_of(1, 300)
    cold, cached = (generate(cluster.grpc_address, "placed", prompt, OUTPUT_TOKENS) for _ in range(2))
    assert cold.token_ids == cached.token_ids == reference.greedy(prompt, OUTPUT_TOKENS)
    assert (cold.cached_tokens, cached.cached_tokens) == (0, 288)


@pytest.mark.skipif(os.geteuid() != 0, reason="wants root")
def test_nodes_give_way_to_others_on_their_machine_no_more_than_who_started_ray(cluster: Cluster, machines: RayMachines) -> None:
    assert {psutil.Process(pid).nice() for pid in placed_nodes().values()} == {psutil.Process(machines.nodes[0].process.pid).nice()}


def test_a_ray_node_that_is_lost_under_load_costs_no_answer_and_its_nodes_come_up_elsewhere(
    cluster: Cluster, machines: RayMachines, reference: Reference
) -> None:
    _, first, second = machines.nodes
    before = placed_nodes()
    gone = {name for record in first.records() for name in record.processes} & before.keys()
    with ThreadPoolExecutor(4) as threads:
        load = Load(cluster, threads, range(10, 13))
        load.wait_begun()
        first.kill(and_nodes=True)
        load.check(reference)
    roles = ["decode", "decode", "prefill"]
    cluster.wait_until(lambda: sorted(map(role_of, cluster.ready_instances())) == roles, "others in their place", PATIENCE_S)
    cluster.wait_until(lambda: second.agents == 3, "all to be on the other Ray node", PATIENCE_S)
    after = placed_nodes()
    assert gone and all(after.get(name) != before[name] for name in gone)
    assert all(after[name] == pid for name, pid in before.items() if name not in gone), "the others were left alone"


def role_of(name: str) -> str:
    return name.partition("-")[0]


def test_rays_head_may_die_with_all_of_ray_and_the_nodes_serve_on_and_are_found_again(
    cluster: Cluster, machines: RayMachines, reference: Reference
) -> None:
    before = placed_nodes()
    head, *others = machines.nodes
    with ThreadPoolExecutor(4) as threads:
        load = Load(cluster, threads, range(20, 22))
        load.wait_begun()
        head.kill()
        cluster.wait_until(lambda: all(each.ended for each in others), "all Ray nodes to have given up", PATIENCE_S)
        later = Load(cluster, threads, range(22, 23))
        load.check(reference)
        later.check(reference)
    assert placed_nodes() == before
    machines.start_head().wait_started()
    again: RayNode = machines.add(cpus=3)
    cluster.wait_until(lambda: again.agents == 3, "a new Ray to have the nodes", PATIENCE_S)
    assert generate(cluster.grpc_address, "placed", prompt_of(30), OUTPUT_TOKENS).token_ids == reference.greedy(
        prompt_of(30), OUTPUT_TOKENS
    )
    assert placed_nodes() == before, "the same processes, which nobody has started anew"
