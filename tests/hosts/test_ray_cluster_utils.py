"""A cluster whose nodes Ray places on a Ray of `ray.cluster_utils`, by which Ray's own tests have one of several nodes."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from tests.hosts.test_ray import Load, prompt_of
from tests.support.cluster import Cluster
from tests.support.environment import own_environment
from tests.support.generate import generate
from tests.support.ray_nodes import ENVIRONMENT, all_serve, cluster_on, placed_nodes, placement_of, raylet_of, title_of
from tests.support.reference import Reference

pytest.importorskip("ray")

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(480)]
PATIENCE_S = 150.0
OUTPUT_TOKENS = 24
# A head that places nothing on itself, and two nodes, either of which has room for all. All of it ends with the process.
MAKE = """
import sys
from ray.cluster_utils import Cluster
alike = {"object_store_memory": 80_000_000, "include_log_monitor": False}
made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **alike})
nodes = [made.add_node(num_cpus=3, **alike) for _ in range(2)]
print(made.address, *(node.all_processes["raylet"][0].process.pid for node in nodes), flush=True)
for _ in sys.stdin:
    made.remove_node(nodes.pop(0), allow_graceful=False)
    print("removed", flush=True)
made.shutdown()
"""


@dataclass
class Made:
    address: str
    raylets: list[str]
    """Their process ids."""
    process: subprocess.Popen[str]

    def remove_first(self) -> None:
        """By force."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "removed\n"
        del self.raylets[0]

    def agents(self) -> list[int]:
        """Of nodes of the cluster that were placed here, how many each Ray node has."""
        there = [raylet_of(pid) for pid in psutil.pids() if "NodeAgent" in title_of(pid)]
        return [there.count(raylet) for raylet in self.raylets]


@pytest.fixture(scope="module")
def made() -> Iterator[Made]:
    scratch = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets have long names
    log = Path(scratch, "made.log")
    own = {name: value for name, value in own_environment(proxies=False).items() if not name.startswith("RAY_")}
    environment = own | ENVIRONMENT | {"RAY_TMPDIR": scratch}
    with log.open("wb") as errors:
        command = [sys.executable, "-c", MAKE]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    with process:
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            assert len(words) == 3, log.read_text()[-3000:]
            yield Made(words[0], words[1:], process)
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=60)
            process.kill()
            shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(made: Made, model: Path) -> Iterator[Cluster]:
    settings: dict[str, Any] = {"model": str(model), "served_model_name": "placed", "dtype": "float32"}
    settings["kv"] = {"block_tokens": 16, "arena_size": "64MiB", "transports": ["tcp"]}
    with cluster_on(cast(Any, made), PATIENCE_S, **settings, prefill=1, decode=2) as cluster:
        cluster.wait_until(lambda: len(cluster.ready_instances()) == 3, "all nodes to be there", PATIENCE_S)
        yield cluster


def test_nodes_are_spread_over_it_and_outlive_one_of_its_nodes_under_load(cluster: Cluster, made: Made, reference: Reference) -> None:
    assert sorted(made.agents()) == [1, 2]
    before = placed_nodes()
    with ThreadPoolExecutor(4) as threads:
        load = Load(cluster, threads, range(10, 13))
        load.wait_begun()
        made.remove_first()
        load.check(reference)
    cluster.wait_until(lambda: made.agents() == [3], "the other one to have all nodes", PATIENCE_S)
    cluster.wait_until(lambda: all_serve(placement_of(cluster)), "the placer to have found them", PATIENCE_S)
    assert placed_nodes() == before, "the same processes, which nobody has started anew"
    prompt = prompt_of(30)
    assert generate(cluster.grpc_address, "placed", prompt, OUTPUT_TOKENS).token_ids == reference.greedy(prompt, OUTPUT_TOKENS)
