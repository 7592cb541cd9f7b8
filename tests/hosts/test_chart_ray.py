"""The chart's mode for KubeRay, executed: what its pods run makes a Ray of four nodes, has the cluster's nodes placed there, and serves.
Neither the loss of a pool's pod nor that of the head's costs a stream, and another head finds the nodes as they are."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.deploy.test_deploy_chart_runs import as_prometheus, is_whole, stream
from tests.support.chart import rendered
from tests.support.chart_pods import Cluster, cluster_of
from tests.support.kuberay import made_by_kuberay
from tests.support.waiting import wait_until

pytest.importorskip("ray")

PATIENCE_S = 400.0
"""Ray alone has a dozen processes, and starts as many in each pod."""
ENGINES = """
import json
from deploy.local.rundir import running_clusters
here = {name: pid for record in running_clusters() for name, pid in record.processes.items()}
pools = ("instance-", "prefill-", "decode-")
print(json.dumps({name: pid for name, pid in here.items() if name.startswith(pools) and not name.endswith("-store")}))
"""
RAYS_TIMES = [{"name": "RAY_raylet_start_wait_time_s", "value": "120"}, {"name": "RAY_gcs_rpc_server_reconnect_timeout_s", "value": "4"}]
"""A machine of few processors is slow to start it; and a Ray without its head gives up soon."""
VALUES = {
    "mode": "ray",
    "config": {"kv": {"arena_size": "64MiB"}, "dtype": "float32"},
    "monitoring": {"podMonitor": {"enabled": True}},
    "gateway": {"replicas": 1, "preStopSeconds": 1, "drainSeconds": 110},
    "prefill": {"threads": 1, "drainSeconds": 1, "extraEnv": RAYS_TIMES},
    "decode": {"replicas": 2, "threads": 1, "drainSeconds": 1, "extraEnv": RAYS_TIMES},
    "ray": {"head": {"extraEnv": RAYS_TIMES}},
}
pytestmark = [pytest.mark.hosts, pytest.mark.skipif(os.geteuid() != 0, reason="wants root"), pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patched, cluster_of(made_by_kuberay(rendered(VALUES)), tmp_path_factory.mktemp("pods")) as cluster:
        patched.setattr("tests.support.chart_pods.PATIENCE_S", PATIENCE_S)
        cluster.start("valkey-0")
        cluster.start("head-0", "conductor-0", "prefill-0", "decode-0", "decode-1", "gateway-0")
        yield cluster


def ready(cluster: Cluster) -> list[str]:
    """The roles of the nodes that take requests."""
    ended = cluster.pods["gateway-0"].execute("gateway", "python", "/etc/springtide/scripts/command.py", "status")
    assert ended.returncode == 0, ended.stderr
    return sorted(re.findall(r"(instance|prefill|decode)-\d+ +ready", ended.stdout))


def engines(cluster: Cluster, pod: str) -> dict[str, int]:
    """The processes of the engines that were placed in a pod, by the names of their nodes."""
    ended = cluster.pods[pod].execute("ray", "python", "-c", ENGINES)
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(ended.stdout))


def test_a_request_is_served_by_nodes_that_ray_has_placed(cluster: Cluster) -> None:
    assert is_whole(list(stream(cluster.pods["gateway-0"], 5)))
    wait_until(lambda: ready(cluster) == ["decode", "decode", "prefill"], "all nodes to be there", PATIENCE_S, poll_s=1.0)
    assert [len(engines(cluster, pod)) for pod in ("head-0", "prefill-0", "decode-0", "decode-1")] == [0, 1, 1, 1]


def test_prometheus_reads_the_metrics_of_every_process(cluster: Cluster, tmp_path: Path) -> None:
    prometheus = as_prometheus(cluster, tmp_path)
    for pod, port, series in (
        ("head-0", 9400, "springtide_conductor_instances"),
        ("prefill-0", 9400, "springtide_prefill_queue_seconds"),
        ("prefill-0", 9401, "springtide_store_slots"),
        ("decode-1", 9400, "springtide_decode_step_seconds_bucket"),
        ("decode-1", 9401, "springtide_store_slots"),
    ):
        url = f"https://{cluster.pods[pod].address}:{port}/metrics"
        assert series in httpx.get(url, verify=prometheus, trust_env=False).text, url


def test_a_pod_of_a_pool_goes_without_a_stream_being_lost_and_another_takes_its_place(cluster: Cluster) -> None:
    lines = stream(cluster.pods["gateway-0"], 300)
    first = next(lines)
    with ThreadPoolExecutor() as client:
        rest = client.submit(list, lines)
        assert cluster.stop("decode-0") == {"decode-0": {"ray": 0}}
        assert is_whole([first, *rest.result()])
    cluster.start("decode-2")
    assert len(engines(cluster, "decode-2")) == 1
    wait_until(lambda: ready(cluster) == ["decode", "decode", "prefill"], "the node to be there again", PATIENCE_S, poll_s=1.0)


def test_the_heads_pod_goes_while_a_stream_goes_on_and_another_finds_the_nodes_as_they_are(cluster: Cluster) -> None:
    pods = ("prefill-0", "decode-1", "decode-2")
    before = [engines(cluster, pod) for pod in pods]
    lines = stream(cluster.pods["gateway-0"], 300)
    first = next(lines)
    with ThreadPoolExecutor() as client:
        rest = client.submit(list, lines)
        assert cluster.stop("head-0") == {"head-0": {"ray": 0}}
        cluster.start("head-1")
        assert is_whole([first, *rest.result()])
    log = cluster.pods["head-1"].containers["ray"].log
    wait_until(
        lambda: len(re.findall(r"placer \S+ is serving at ", log.read_text())) >= 3, "another Ray to have the nodes", PATIENCE_S, poll_s=1.0
    )
    assert " is placing" not in log.read_text()
    assert [engines(cluster, pod) for pod in pods] == before
    assert is_whole(list(stream(cluster.pods["gateway-0"], 5)))
