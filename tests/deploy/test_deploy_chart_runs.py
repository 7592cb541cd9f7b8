"""The Helm chart's commands, executed: what Kubernetes would start serves requests and is scraped, pools are scaled by what Prometheus then
knows, and an upgrade to other values replaces every pod under load without an answer being lost."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import ssl
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deploy.ca.authority import Authority
from deploy.ca.identity import Identity, issue_to
from springtide.config import LOOPBACK, TlsConfig
from springtide.valkey import UNREACHABLE, ValkeyClient, with_certificates
from tests.support.chart import NAMESPACE, RELEASE, Object, of_kind, pods, rendered, selected
from tests.support.chart_pods import PATIENCE_S, PROFILE, Cluster, Pod, cluster_of
from tests.support.clients import WORKERS, Load, Questions
from tests.support.cluster import metric_at
from tests.support.prometheus import prometheus
from tests.support.waiting import wait_until

VALUES = {
    "config": {"kv": {"arena_size": "64MiB"}, "dtype": "float32", "profile": PROFILE},
    "monitoring": {"podMonitor": {"enabled": True}},
    "gateway": {"replicas": 1, "preStopSeconds": 1, "drainSeconds": 110},
    "prefill": {"threads": 1, "drainSeconds": 1},
    "decode": {"threads": 1, "drainSeconds": 1},
}
OTHER_VALUES = {
    **VALUES,
    "config": {"kv": {"arena_size": "96MiB"}, "dtype": "float32", "profile": PROFILE, "log": {"format": "json"}},
    "tls": {"renewSeconds": 3600},
    "gateway": {"replicas": 1, "preStopSeconds": 0, "drainSeconds": 30},
}
AUTHORITY = f"{RELEASE}-springtide-authority"
PROMPTS = ("Once upon a time", "The capital of France is", "def fibonacci(n):", "The tides of the sea are")
OUTPUT_TOKENS = 120
pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="wants root"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_of(rendered(VALUES), tmp_path_factory.mktemp("pods")) as cluster:
        cluster.start("valkey-0")
        cluster.start("conductor-0", "prefill-0", "decode-0", "gateway-0")
        yield cluster


def model_of(gateway: Pod) -> str:
    (model,) = httpx.get(f"http://{gateway.address}:8000/v1/models", timeout=60, trust_env=False).json()["data"]
    return str(model["id"])


def stream(gateway: Pod, num_tokens: int) -> Iterator[str]:
    """The lines of an answer of so many tokens."""
    body = {"model": model_of(gateway), "prompt": "Once", "max_tokens": num_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    with (
        httpx.Client(timeout=60, trust_env=False) as client,
        client.stream("POST", f"http://{gateway.address}:8000/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200, response.read()
        yield from (line for line in response.iter_lines() if line)


def is_whole(lines: list[str]) -> bool:
    return lines[-1] == "data: [DONE]" and any('"finish_reason":"length"' in line for line in lines)


def test_a_request_is_served_by_what_the_pods_run(cluster: Cluster) -> None:
    assert is_whole(list(stream(cluster.pods["gateway-0"], 5)))


def test_helm_test_is_a_request(cluster: Cluster) -> None:
    cluster.start("test-0")
    request = cluster.pods["test-0"].containers["request"]
    assert request.wait() == 0, request.log.read_text()


SERVING = {
    "valkey-0": ("valkey", "relay"),
    "conductor-0": ("conductor",),
    "prefill-0": ("store", "prefill"),
    "decode-0": ("store", "decode"),
    "gateway-0": ("gateway",),
}


def test_none_is_ended_that_serves(cluster: Cluster) -> None:
    assert [(pod, name) for pod, names in SERVING.items() for name in names if not cluster.pods[pod].lives(name)] == []


@pytest.mark.parametrize(("pod", "name", "module"), [("prefill-0", "store", "kvstore"), ("decode-0", "decode", "mixed_node")])
def test_who_hangs_is_ended(cluster: Cluster, pod: str, name: str, module: str) -> None:
    there = cluster.pods[pod]
    process = psutil.Process(there.containers[name].pid)
    process.suspend()
    try:
        there.execute(name, "touch", "--date", "1 minute ago", f"/run/springtide/{module}.beat")
        assert not there.lives(name)
    finally:
        process.resume()
    wait_until(lambda: there.lives(name), f"{name} to show life", PATIENCE_S)
    assert is_whole(list(stream(cluster.pods["gateway-0"], 5)))


def as_prometheus(cluster: Cluster, directory: Path) -> ssl.SSLContext:
    """With the certificate that the chart has made for it."""
    for name, content in cluster.secret(f"{RELEASE}-springtide-prometheus").items():
        (directory / name).write_bytes(content)
    context = ssl.create_default_context(cafile=directory / "ca.crt")
    context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    return context


def test_prometheus_and_nobody_else_reads_the_metrics_of_every_process(cluster: Cluster, tmp_path: Path) -> None:
    prometheus = as_prometheus(cluster, tmp_path)
    nobody = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    for pod, port, series in (
        ("conductor-0", 9400, 'springtide_conductor_instances{ready="true",role="decode"} 1.0'),
        ("gateway-0", 9400, "springtide_gateway_ttft_seconds_bucket"),
        ("prefill-0", 9400, "springtide_prefill_queue_seconds"),
        ("prefill-0", 9401, "springtide_store_slots"),
        ("decode-0", 9400, "springtide_decode_step_seconds_bucket"),
        ("decode-0", 9401, "springtide_store_slots"),
    ):
        url = f"https://{cluster.pods[pod].address}:{port}/metrics"
        assert series in httpx.get(url, verify=prometheus, trust_env=False).text, url
        with pytest.raises(httpx.TransportError):
            httpx.get(url, verify=nobody, trust_env=False)


def scraped(monitor: Object, cluster: Cluster, objects: Sequence[Object], certificate: Path) -> Iterator[dict[str, Any]]:
    """How Prometheus scrapes the pods, as prometheus-operator has it do for a PodMonitor."""
    job = f"{NAMESPACE}/{monitor['metadata']['name']}"
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        targets = []
        for pod in cluster.pods.values():
            (described,) = selected({"app.kubernetes.io/component": pod.name.partition("-")[0]}, objects)
            if monitor["spec"]["selector"]["matchLabels"].items() <= described.labels.items() and endpoint["port"] in described.ports():
                known = {"name": pod.name, "label_app_kubernetes_io_component": described.component()}
                labels = {f"__meta_kubernetes_pod_{name}": value for name, value in known.items()}
                targets.append({"targets": [f"{pod.address}:{described.ports()[endpoint['port']]}"], "labels": labels})
        own = [{"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"}]
        own += [{"target_label": name, "replacement": value} for name, value in (("namespace", NAMESPACE), ("job", job))]
        names = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
        own += [{names.get(name, name): value for name, value in one.items()} for one in endpoint["relabelings"]]
        files = {name: str(certificate / file) for name, file in (("ca_file", "ca.crt"), ("cert_file", "tls.crt"), ("key_file", "tls.key"))}
        yield {
            "job_name": f"podMonitor/{job}/{endpoint['port']}",
            "metrics_path": endpoint["path"],
            "scheme": endpoint["scheme"],
            "tls_config": files,
            "static_configs": targets,
            "relabel_configs": own,
        }


def as_keda_reads(answer: Sequence[dict[str, Any]]) -> float | None:
    """One series, and a number; else it is an error."""
    values = [float(series["value"][1]) for series in answer]
    return values[0] if len(values) == 1 and math.isfinite(values[0]) else None


def test_pools_are_scaled_by_what_prometheus_knows_of_the_pods(cluster: Cluster, tmp_path: Path) -> None:
    """Which is a number for each trigger, whether somebody asks or nobody does; and none where it knows nothing."""
    scaling = {"enabled": True, "latencySeconds": 2.5}
    objects = rendered({**VALUES, "prefill": {"autoscaling": {**scaling, "queuedTokens": 1000}}, "decode": {"autoscaling": scaling}})
    queries = {
        f"{found['metadata']['name']} {trigger['name']}": trigger["metadata"]["query"]
        for found in of_kind(objects, "ScaledObject")
        for trigger in found["spec"]["triggers"]
    }
    assert len(queries) == 8
    as_prometheus(cluster, tmp_path)
    (monitor,) = of_kind(objects, "PodMonitor")
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": list(scraped(monitor, cluster, objects, tmp_path))}
    with prometheus(tmp_path, config) as asked:

        def read() -> dict[str, float | None]:
            return {name: as_keda_reads(asked.query(query)) for name, query in queries.items()}

        def latencies() -> list[float]:
            return [value or 0.0 for name, value in read().items() if name.endswith("latency")]

        wait_until(lambda: None not in read().values(), "each to be a number", more=lambda: str(read()), poll_s=0.5)
        assert latencies() == [0.0, 0.0]
        assert is_whole(list(stream(cluster.pods["gateway-0"], 50)))
        wait_until(lambda: min(latencies()) > 0, "what was asked to be known", more=lambda: str(read()), poll_s=0.5)
        assert None not in read().values()
        before = str(time.time() - 3600)
        assert not any(asked.get("/api/v1/query", query=query, time=before)["data"]["result"] for query in queries.values())


def test_valkey_lets_in_who_has_a_certificate_and_the_password(cluster: Cluster, tmp_path: Path) -> None:
    for name, content in cluster.secret(f"{RELEASE}-springtide-prometheus").items():
        (tmp_path / name).write_bytes(content)
    word = cluster.secret(f"{RELEASE}-springtide-cluster")["valkey-password"].decode()
    place = f"{cluster.pods['valkey-0'].address}:6379/0"
    certified = with_certificates("", *(str(tmp_path / name) for name in ("tls.crt", "tls.key", "ca.crt")))

    async def answers(url: str) -> bool:
        async with ValkeyClient.from_url(url, socket_timeout=5.0, socket_connect_timeout=5.0) as client:
            try:
                return bool(await client.ping())
            except UNREACHABLE:
                return False

    assert asyncio.run(answers(f"rediss://:{word}@{place}{certified}"))
    for other in (f"redis://:{word}@{place}", f"rediss://:{word}@{place}?ssl_ca_certs={tmp_path}/ca.crt", f"rediss://{place}{certified}"):
        assert not asyncio.run(answers(other)), other


def test_commands_of_the_cluster_are_given_in_a_pod(cluster: Cluster) -> None:
    def springtide(*command: str) -> str:
        ended = cluster.pods["gateway-0"].execute("gateway", "python", "/etc/springtide/scripts/command.py", *command)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    said = springtide("status")
    assert re.search(r"prefill-0 +ready", said) and re.search(r"decode-0 +ready", said)
    springtide("keys", "ls")


def test_another_authority_takes_the_place_of_one_while_a_stream_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "authority.pem").write_bytes(cluster.secret(AUTHORITY)["authority.pem"])

    def follow() -> None:
        """Has all pods know of what is in the directory."""
        cluster.change_secret(AUTHORITY, "authority.pem", (tmp_path / "authority.pem").read_bytes())
        believed, shown = Authority.open(tmp_path).bundle.decode(), ("certificates", "cat", "/run/springtide/tls/ca.crt")
        for name in SERVING:
            wait_until(lambda pod=cluster.pods[name]: pod.execute(*shown).stdout == believed, name, PATIENCE_S, poll_s=0.5)

    before = as_prometheus(cluster, tmp_path)
    url = f"https://{cluster.pods['prefill-0'].address}:9400/metrics"
    lines = stream(cluster.pods["gateway-0"], 400)
    first = next(lines)
    with ThreadPoolExecutor() as client:
        rest = client.submit(list, lines)
        Authority.open(tmp_path).rotate()
        follow()
        assert httpx.get(url, verify=before, trust_env=False).status_code == 200
        assert is_whole(list(stream(cluster.pods["gateway-0"], 5)))
        Authority.open(tmp_path).retire()
        follow()
        assert is_whole([first, *rest.result()])
    with pytest.raises(httpx.TransportError):
        httpx.get(url, verify=before, trust_env=False)
    cluster.start("gateway-2")
    assert is_whole(list(stream(cluster.pods["gateway-2"], 5)))


def with_a_certificate(cluster: Cluster, directory: Path) -> TlsConfig:
    """Of the authority that the cluster has now."""
    (directory / "authority.pem").write_bytes(cluster.secret(AUTHORITY)["authority.pem"])
    identity = Identity(directory / "tls")
    issue_to(identity, Authority.open(directory), "a test", (LOOPBACK,))
    return identity.settings


def test_an_upgrade_to_other_values_replaces_every_pod_under_load_and_loses_no_answer(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At once, as Kubernetes does it; each answer is compared with what it is in calm. Who asks while there is no Conductor may be told to
    come again, and nobody else."""
    old, new = ({each.component(): each.template for each in pods(rendered(values))} for values in (VALUES, OTHER_VALUES))
    assert {name for name in old if old[name] != new[name]} == {"valkey", "conductor", "prefill", "decode", "gateway"}
    gateways = [name for name in cluster.pods if name.startswith("gateway-")]
    url, tls = f"http://{cluster.address(f'{RELEASE}-springtide')}:8000/v1", with_a_certificate(cluster, tmp_path)
    calm = Questions(model_of(cluster.pods["gateway-0"]), PROMPTS.__getitem__)
    calm.learn_in_calm(url, [(number, OUTPUT_TOKENS) for number in range(len(PROMPTS))])
    cluster.upgrade(rendered(OTHER_VALUES))
    old_decode = f"{cluster.pods['decode-0'].address}:9400"
    with Load(calm, [url], logs=cluster.logs) as load, ThreadPoolExecutor() as kubelets:
        load.wait_under_way()  # by connections that they keep, to gateways of before
        cluster.start("prefill-1", "decode-1", "gateway-1")
        load.wait_under_way()
        wait_until(lambda: metric_at(old_decode, "springtide_decode_attempts_running", None, tls) > 0, "streams there", PATIENCE_S)
        deployments = kubelets.submit(cluster.stop, "prefill-0", "decode-0", *gateways)
        ended = cluster.stop("valkey-0")
        cluster.start("valkey-0")
        answered = len(load.answers)
        ended |= cluster.stop("conductor-0")
        cluster.start("conductor-0")
        back = time.monotonic()
        ended |= deployments.result()
        load.wait_answered(WORKERS)
    with capsys.disabled():
        print(f"\n{load.summary()}")
    load.check(but=[answer for answer in load.answers[answered:] if answer.refused_with == 503 and answer.began < back])
    assert ended == {
        "valkey-0": {"relay": 128 + signal.SIGTERM},
        "conductor-0": {"conductor": 0},
        "prefill-0": {"prefill": 0, "store": 0},
        "decode-0": {"decode": 0, "store": 0},
        **{name: {"gateway": 0} for name in gateways},
    }
    for pod in ("conductor-0", "prefill-1", "decode-1", "gateway-1"):
        for name in ended[pod.replace("1", "0")]:
            assert cluster.pods[pod].containers[name].log.read_text().startswith("{"), f"{pod}/{name} has the settings of before"
