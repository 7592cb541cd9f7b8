"""The Helm chart's commands, executed with the values of a cluster that answers none but those whom it knows, at gateways with TLS."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import Authority
from tests.support.chart import Object, rendered
from tests.support.chart_pods import PROFILE, Cluster, cluster_of

KEY = "sk-of-the-test"
VALUES: dict[str, Any] = {
    "config": {
        "kv": {"arena_size": "64MiB"},
        "dtype": "float32",
        "profile": PROFILE,
        "server": {"require_api_keys": True, "api_keys": {f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}": "acme"}},
    },
    "gateway": {"replicas": 1, "preStopSeconds": 0, "drainSeconds": 1, "tls": {"existingSecret": "certificate", "clientCa": True}},
    "instance": {"replicas": 1, "threads": 1, "drainSeconds": 1},
    "test": {"existingSecret": "client"},
}
pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="wants root"), pytest.mark.timeout(400)]


def secret(name: str, content: dict[str, bytes]) -> Object:
    return {"kind": "Secret", "metadata": {"name": name}, "data": {key: base64.b64encode(value).decode() for key, value in content.items()}}


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    """Those that the values name."""
    directory = tmp_path_factory.mktemp("certificates")
    authority = Authority(directory)

    def certificate() -> dict[str, bytes]:
        authority.sign(directory / "tls.crt", directory / "tls.key", "springtide.example")
        return {name: (directory / name).read_bytes() for name in ("tls.crt", "tls.key")}

    return [
        secret("certificate", {**certificate(), "ca.crt": authority.path.read_bytes()}),
        secret("client", {**certificate(), "api-key": KEY.encode()}),
    ]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, secrets: list[Object]) -> Iterator[Cluster]:
    with cluster_of([*rendered(VALUES), *secrets], tmp_path_factory.mktemp("pods")) as cluster:
        cluster.start("valkey-0")
        cluster.start("conductor-0", "instance-0", "gateway-0")
        yield cluster


def of_test_pod(cluster: Cluster, name: str) -> tuple[int, str]:
    """How it ends, and what it says."""
    cluster.start(name)
    container = cluster.pods[name].containers["request"]
    return container.wait(), container.log.read_text()


def test_helm_test_is_answered(cluster: Cluster) -> None:
    code, said = of_test_pod(cluster, "test-0")
    assert code == 0 and said, said


@pytest.mark.parametrize(("kept", "said"), [(("tls.crt", "tls.key"), "api_key"), (("api-key",), "disconnected")])
def test_helm_test_says_what_it_lacks(cluster: Cluster, secrets: list[Object], kept: tuple[str, ...], said: str) -> None:
    client = {**secrets[1], "data": {name: secrets[1]["data"][name] for name in kept}}
    cluster.upgrade([*rendered(VALUES), secrets[0], client])
    code, text = of_test_pod(cluster, f"test-{said.replace('_', '-')}")
    assert code != 0 and said in text


def test_helm_test_finds_out_gateways_with_another_certificate(cluster: Cluster, secrets: list[Object], tmp_path: Path) -> None:
    Authority(tmp_path).sign(tmp_path / "tls.crt", tmp_path / "tls.key")
    other = secret("certificate", {"tls.crt": (tmp_path / "tls.crt").read_bytes()})
    cluster.upgrade([*rendered(VALUES), other, secrets[1]])
    code, text = of_test_pod(cluster, "test-other")
    assert code != 0 and "CERTIFICATE_VERIFY_FAILED" in text
