"""The chart's RayCluster with Ray's own autoscaler, and a KubeRay that is played: a pool that grows has a pod made for its node, and
one that shrinks has it taken away."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest
import yaml

from deploy.local.logs import last_lines
from tests.hosts.test_ray_scaling import AT_A_TIME, LONG, OUTPUT_TOKENS, SCALING, Load, prefill_nodes, prompt_of, settings_of
from tests.support.certificates import Authority
from tests.support.chart import rendered
from tests.support.cluster import Cluster
from tests.support.generate import generate
from tests.support.kuberay_operator import Autoscaler, KubeRay
from tests.support.kubernetes_api import KubernetesApi
from tests.support.ray_nodes import RayMachines, cluster_on
from tests.support.reference import Reference

pytest.importorskip("ray")

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]
PATIENCE_S = 300.0
IDLE_S = 5
"""In which a pod has to be without a node until it goes; the chart takes half a minute at least."""
VALUES = {
    "mode": "ray",
    "config": {"kv": {"arena_size": "64MiB"}},
    "prefill": {"autoscaling": {"enabled": True, "minReplicas": 1, "maxReplicas": 2}},
    "decode": {"replicas": 1},
}


@dataclass(frozen=True)
class World:
    cluster: Cluster
    kuberay: KubeRay


@pytest.fixture(scope="module")
def world(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    scratch = tmp_path_factory.mktemp("kuberay")
    objects = rendered(VALUES)
    found = deepcopy(next(each for each in objects if each["kind"] == "RayCluster"))
    found["spec"]["autoscalerOptions"]["idleTimeoutSeconds"] = IDLE_S
    settings = yaml.safe_load(next(each["data"]["head.yaml"] for each in objects if "head.yaml" in each.get("data", ())))
    authority = Authority(scratch)
    files = {"certificate": scratch / "api.crt", "key": scratch / "api.key", "authority": authority.path}
    authority.sign(files["certificate"], files["key"])
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(files["certificate"], files["key"])
    api, log = KubernetesApi(tls), scratch / "autoscaler.log"
    try:
        with RayMachines() as machines:
            machines.start_head().wait_started()
            with KubeRay(api, found, machines) as kuberay, Autoscaler(api, found["metadata"]["name"], machines.address, files, log):
                ray = {**settings["ray"], **SCALING}
                ray.pop("address", None)
                with cluster_on(machines, PATIENCE_S, ray, **settings_of(model)) as cluster:
                    yield World(cluster, kuberay)
    finally:
        print(f"--- Ray's autoscaler\n{last_lines(log, 60)}")
        api.close()


def test_a_pod_is_made_for_a_node_that_finds_no_room_and_is_taken_away_when_it_has_none(world: World, reference: Reference) -> None:
    cluster, kuberay = world.cluster, world.kuberay
    assert len(prefill_nodes(cluster)) == len(kuberay.pods("prefill")) == 1
    with ThreadPoolExecutor(AT_A_TIME + 1) as threads:
        load, begun = Load(cluster, threads), Event()
        try:
            cluster.wait_until(lambda: len(prefill_nodes(cluster)) == 2, "a second prefill node under load", PATIENCE_S)
            assert kuberay.replicas("prefill") == len(kuberay.pods("prefill")) == 2
            stream = threads.submit(
                generate, cluster.grpc_address, "placed", prompt_of(9_999), LONG, on_token=lambda _: begun.set(), timeout_s=PATIENCE_S
            )
            assert begun.wait(PATIENCE_S)
        finally:
            answers = load.end()
        cluster.wait_until(lambda: len(prefill_nodes(cluster)) == 1, "the second node to leave after the load", PATIENCE_S)
        cluster.wait_until(lambda: len(kuberay.pods("prefill")) == 1, "its pod to go", PATIENCE_S)
        assert kuberay.replicas("prefill") == 1 and len(kuberay.pods("decode")) == 1
        answers.append((9_999, stream.result()))
    for seed, answer in answers[:: max(1, len(answers) // 8)]:
        assert answer.token_ids == reference.greedy(prompt_of(seed), len(answer.token_ids))
    assert {len(answer.token_ids) for _, answer in answers} == {OUTPUT_TOKENS, LONG}
    assert len(prefill_nodes(cluster)) == 1
