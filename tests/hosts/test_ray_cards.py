"""Which cards the nodes have that Ray places, as their processes see it: Ray is told that there are some."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.cluster import Cluster
from tests.support.ray_nodes import RayMachines, cards_of_nodes, cluster_on, placed_nodes, title_of

pytest.importorskip("ray")

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(400)]
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def machines() -> Iterator[RayMachines]:
    with RayMachines() as machines:
        machines.start_head().wait_started()
        machines.add(4, "--num-gpus=2").wait_started()
        yield machines


@pytest.fixture(scope="module")
def cluster(machines: RayMachines, model: Path) -> Iterator[Cluster]:
    settings: dict[str, Any] = {"model": str(model), "served_model_name": "placed", "dtype": "float32"}
    settings["kv"] = {"block_tokens": 16, "arena_size": "64MiB", "transports": ["tcp"]}
    cards = {"prefill": {"gpus": 1}, "decode": {"gpus": 1}}
    with cluster_on(machines, PATIENCE_S, cards, **settings, prefill=1, decode=1) as cluster:
        yield cluster


def test_a_new_node_has_no_card_of_one_that_was_found_again(cluster: Cluster, machines: RayMachines) -> None:
    """The agents that find the nodes again have their cards from Ray in another order than the first ones had."""
    log = Path(cluster.record.run_dir, "logs", "placer.log")
    node, names = machines.nodes[1], ("decode-0", "prefill-0")
    cluster.wait_until(lambda: all(f"{name} is serving" in log.read_text() for name in names), "the placer to see them serve", PATIENCE_S)
    before = cards_of_nodes()
    assert sorted(before) == sorted(names) and sorted(before.values()) == ["0", "1"]
    agents = {pid for pid in node.pids if "NodeAgent" in title_of(pid)}
    assert len(agents) == 2
    for pid in agents:
        os.kill(pid, signal.SIGKILL)
    cluster.wait_until(lambda: all(found_again(log, name) for name in names), "both to be found again", PATIENCE_S)
    assert cards_of_nodes() == before
    pid = placed_nodes()["decode-0"]
    psutil.Process(pid).parent().terminate()
    cluster.wait_until(lambda: new_decode_node(cluster, pid), "another decode node", PATIENCE_S)
    after = cards_of_nodes()
    (decode,) = (card for name, card in after.items() if name.startswith("decode-"))
    assert (after.get("prefill-0"), decode) == (before["prefill-0"], before["decode-0"]), f"{after}\n{cluster.logs()}"


def found_again(log: Path, name: str) -> bool:
    _, adopting, after = log.read_text().partition(f"{name} is adopting")
    return bool(adopting) and f"{name} is serving" in after


def new_decode_node(cluster: Cluster, before: int) -> bool:
    there = {name: pid for name, pid in placed_nodes().items() if name.startswith("decode-")}
    return len(there) == 1 and before not in there.values() and there.keys() <= cluster.ready_instances()
