"""The Helm chart's commands, executed with the values of a cluster that downloads its model, has two Conductors and blocks on SSD, and
trusts its network: nothing is encrypted, and a password is all that Valkey asks for."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from springtide.valkey import UNREACHABLE, ValkeyClient
from tests.deploy.test_deploy_chart_runs import is_whole, model_of, stream
from tests.support.chart import RELEASE, rendered
from tests.support.chart_pods import PATIENCE_S, Cluster, Pod, cluster_of
from tests.support.model_hub import model_hub
from tests.support.models import make_tiny_llama
from tests.support.waiting import wait_until

TOKEN = "hf_of-the-test"
CONDUCTORS = ("conductor-0", "conductor-1")
VALUES: dict[str, Any] = {
    "config": {"kv": {"arena_size": "64MiB", "ssd_size": "64MiB", "block_tokens": 16}, "dtype": "float32", "max_context": 2048},
    "tls": {"enabled": False},
    "conductor": {"replicas": 2},
    "gateway": {
        "replicas": 1,
        "preStopSeconds": 0,
        "drainSeconds": 30,
        "service": {"httpPort": 80},
        "files": {"persistentVolumeClaim": {"claimName": "files"}},
    },
    "prefill": {"threads": 1, "drainSeconds": 1, "kind": "StatefulSet", "ssd": {"enabled": True, "size": "1Gi"}},
    "decode": {"threads": 1, "drainSeconds": 1, "ssd": {"enabled": True, "size": "1Gi"}},
}
pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="wants root"), pytest.mark.timeout(400)]


def values(hub: str) -> dict[str, Any]:
    """`hub`: its URL."""
    download = {
        "enabled": True,
        "image": "springtide",
        "command": ["hf", "download"],
        "args": ["example/tiny", "--local-dir", "/models/$(MODEL_NAME)"],
        "env": [
            {"name": "HF_ENDPOINT", "value": hub},
            {"name": "HF_HOME", "value": "/models/.hf"},
            {"name": "MODEL_NAME", "value": "tiny"},
        ],
        "envFromSecrets": ["hub"],
    }
    return {**VALUES, "model": {"path": "/models/tiny", "servedName": "tiny", "download": download}}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = make_tiny_llama(tmp_path_factory.mktemp("model"))
    secret = {"kind": "Secret", "metadata": {"name": "hub"}, "data": {"HF_TOKEN": base64.b64encode(TOKEN.encode()).decode()}}
    with cluster_of([], tmp_path_factory.mktemp("pods")) as cluster, model_hub(cluster.here, "example/tiny", model, TOKEN) as hub:
        cluster.upgrade([*rendered(values(hub)), secret])
        cluster.start("valkey-0")
        cluster.start(*CONDUCTORS, "prefill-0", "decode-0", "gateway-0")
        yield cluster


def metrics(pod: Pod, port: int) -> str:
    return httpx.get(f"http://{pod.address}:{port}/metrics", timeout=60, trust_env=False).text


def leads(cluster: Cluster) -> list[str]:
    return [name for name in CONDUCTORS if "springtide_conductor_is_leader 1.0" in metrics(cluster.pods[name], 9400)]


def blocks_on_ssd(pod: Pod) -> float:
    (line,) = [line for line in metrics(pod, 9401).splitlines() if line.startswith('springtide_store_slots{state="cached",tier="ssd"}')]
    return float(line.split()[1])


def test_the_model_that_was_downloaded_is_served(cluster: Cluster) -> None:
    assert model_of(cluster.pods["gateway-0"]) == "tiny"
    assert is_whole(list(stream(cluster.pods["gateway-0"], 5)))


def test_files_of_clients_are_in_the_volume_of_all_gateways(cluster: Cluster) -> None:
    gateway = cluster.pods["gateway-0"]
    files = {"file": ("batch.jsonl", b"{}\n")}
    url = f"http://{gateway.address}:8000/v1/files"
    response = httpx.post(url, data={"purpose": "batch"}, files=files, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    assert response.json()["id"] in gateway.execute("gateway", "find", "/files").stdout


def test_helm_test_is_a_request_to_the_port_of_the_service(cluster: Cluster) -> None:
    cluster.start("test-0")
    request = cluster.pods["test-0"].containers["request"]
    assert request.wait() == 0, request.log.read_text()


def test_of_two_conductors_one_leads_and_the_other_takes_its_place_while_a_stream_goes_on(cluster: Cluster) -> None:
    (leader,) = leads(cluster)
    (other,) = {*CONDUCTORS} - {leader}
    lines = stream(cluster.pods["gateway-0"], 1500)
    first = next(lines)
    with ThreadPoolExecutor() as client:
        rest = client.submit(list, lines)
        assert cluster.stop(leader) == {leader: {"conductor": 0}}
        assert is_whole(list(stream(cluster.pods["gateway-0"], 5)))
        assert is_whole([first, *rest.result()])
    assert "springtide_conductor_is_leader 1.0" in metrics(cluster.pods[other], 9400)
    cluster.start(leader)
    assert leads(cluster) == [other]


def test_blocks_on_the_ssd_of_a_stateful_pod_are_there_for_the_next_of_its_name(cluster: Cluster) -> None:
    gateway = cluster.pods["gateway-0"]
    body = {"model": "tiny", "prompt": "the other then in " * 40, "max_tokens": 8, "temperature": 0}

    def answer() -> Any:
        response = httpx.post(f"http://{gateway.address}:8000/v1/completions", json=body, timeout=60, trust_env=False)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]

    before = answer()
    assert cluster.stop("prefill-0") == {"prefill-0": {"prefill": 0, "store": 0}}
    cluster.start("prefill-0")
    assert blocks_on_ssd(cluster.pods["prefill-0"]) > 0
    assert answer() == before


async def asked(url: str, command: Callable[[ValkeyClient], Any]) -> Any:
    """None: who asks is not let in."""
    async with ValkeyClient.from_url(url, socket_timeout=5.0, socket_connect_timeout=5.0) as client:
        try:
            return await command(client)
        except UNREACHABLE:
            return None


def test_valkey_wants_its_password_and_has_what_the_pod_before_it_had(cluster: Cluster) -> None:
    word = cluster.secret(f"{RELEASE}-springtide-cluster")["valkey-password"].decode()

    def url(word: str) -> str:
        return f"redis://:{word}@{cluster.pods['valkey-0'].address}:6379/0"

    assert asyncio.run(asked(url(word), lambda client: client.set("a", "b")))
    assert [asyncio.run(asked(url(other), lambda client: client.get("a"))) for other in ("", "other")] == [None, None]
    assert cluster.stop("valkey-0") == {"valkey-0": {"valkey": 0}}
    cluster.start("valkey-0")
    assert asyncio.run(asked(url(word), lambda client: client.get("a"))) == b"b"
    wait_until(lambda: len(leads(cluster)) == 1, "one Conductor to lead", PATIENCE_S)
    assert is_whole(list(stream(cluster.pods["gateway-0"], 5)))
