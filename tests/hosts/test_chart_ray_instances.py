"""The chart's mode for KubeRay with instances, executed: they are placed, one in each pod, and a pod that goes costs no stream."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.deploy.test_deploy_chart_runs import is_whole, stream
from tests.hosts.test_chart_ray import PATIENCE_S, RAYS_TIMES, VALUES, engines, ready
from tests.support.chart import rendered
from tests.support.chart_pods import Cluster, cluster_of
from tests.support.kuberay import made_by_kuberay
from tests.support.waiting import wait_until

pytest.importorskip("ray")

WITH_INSTANCES = {name: values for name, values in VALUES.items() if name not in ("prefill", "decode")} | {
    "instance": {"replicas": 2, "threads": 1, "drainSeconds": 1, "extraEnv": RAYS_TIMES}
}
pytestmark = [pytest.mark.hosts, pytest.mark.skipif(os.geteuid() != 0, reason="wants root"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = made_by_kuberay(rendered(WITH_INSTANCES))
    with pytest.MonkeyPatch.context() as patched, cluster_of(made, tmp_path_factory.mktemp("pods")) as cluster:
        patched.setattr("tests.support.chart_pods.PATIENCE_S", PATIENCE_S)
        cluster.start("valkey-0")
        cluster.start("head-0", "conductor-0", "instance-0", "instance-1", "gateway-0")
        yield cluster


def test_instances_serve_one_in_each_pod_and_a_pod_goes_without_a_stream_being_lost(cluster: Cluster) -> None:
    wait_until(lambda: ready(cluster) == ["instance", "instance"], "both to be there", PATIENCE_S, poll_s=1.0)
    assert [len(engines(cluster, pod)) for pod in ("head-0", "instance-0", "instance-1")] == [0, 1, 1]
    lines = stream(cluster.pods["gateway-0"], 300)
    first = next(lines)
    with ThreadPoolExecutor() as client:
        rest = client.submit(list, lines)
        assert cluster.stop("instance-0") == {"instance-0": {"ray": 0}}
        assert is_whole([first, *rest.result()])
    cluster.start("instance-2")
    wait_until(lambda: ready(cluster) == ["instance", "instance"], "another in its place", PATIENCE_S, poll_s=1.0)
