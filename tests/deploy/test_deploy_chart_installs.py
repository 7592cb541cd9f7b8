"""The Helm chart, installed, upgraded, rolled back and removed by Helm itself, at an API that takes what Kubernetes' schemas take."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.ca.authority import Authority, name_of
from tests.support.chart import CHART, NAMESPACE, RELEASE, Object, rendered
from tests.support.chart_tools import HELM, helm
from tests.support.dashboards import DASHBOARDS
from tests.support.kubernetes_api import MOST_BYTES, KubernetesApi

WATCHED = {"podMonitor": {"enabled": True}, "rules": {"enabled": True}, "dashboards": {"enabled": True}}
VALUES: dict[str, Any] = {"monitoring": WATCHED, "prefill": {"kind": "StatefulSet", "ssd": {"enabled": True}}}
OTHER_VALUES = {
    **VALUES,
    "monitoring": {**WATCHED, "rules": {"enabled": True, "objective": 0.999}, "dashboards": {"enabled": True, "labels": {"shown": "yes"}}},
    "config": {"kv": {"arena_size": "1GiB"}},
    "conductor": {"replicas": 2},
    "gateway": {"pdb": {"enabled": False}, "route": {"enabled": True, "parentRefs": [{"name": "public"}]}},
    "decode": {"autoscaling": {"enabled": True}},
}
ON_RAY = {"mode": "ray", "config": {"kv": {"arena_size": "1GiB"}}, "decode": {"autoscaling": {"enabled": True}}}
KEPT = (f"{RELEASE}-springtide-cluster", f"{RELEASE}-springtide-authority")


class Helm:
    """One that speaks with an API of its own."""

    def __init__(self, version: int, directory: Path) -> None:
        self.api, self._version, self._directory = KubernetesApi(), version, directory
        self.api.write_kubeconfig(directory / "kubeconfig")

    def __call__(self, *command: str, values: Mapping[str, Any] | None = None) -> None:
        """Raises ValueError with what Helm says."""
        given = ("--values", "-") if values is not None else ()
        arguments = [
            str(helm(self._version)),
            *command,
            "--namespace",
            NAMESPACE,
            "--kubeconfig",
            str(self._directory / "kubeconfig"),
            *given,
        ]
        environment = {**os.environ, "HOME": str(self._directory)}
        ended = subprocess.run(arguments, input=yaml.safe_dump(values), capture_output=True, text=True, env=environment)
        if ended.returncode:
            raise ValueError(ended.stderr)

    def install(self, values: Mapping[str, Any]) -> None:
        self("install", RELEASE, str(CHART), "--disable-openapi-validation", values=values)

    def upgrade(self, values: Mapping[str, Any], chart: Path = CHART) -> None:
        self("upgrade", RELEASE, str(chart), "--disable-openapi-validation", *self._whole, values=values)

    def roll_back(self, revision: int) -> None:
        self("rollback", RELEASE, str(revision), *self._whole)

    @property
    def _whole(self) -> tuple[str, ...]:
        """Helm 4 applies on the server's side; Helm 3 sends differences, or with this whole objects."""
        return ("--force",) if self._version == 3 else ()

    def secrets(self) -> dict[str, Object]:
        """The data of those that are no release of Helm's, by name."""
        return {name: found["data"] for name, found in self.api.of_kind("Secret").items() if not name.startswith("sh.helm.")}

    def is_as_rendered(self, values: Mapping[str, Any]) -> bool:
        """Whether there is what the chart has with these values, and nothing else; hooks and Secrets apart."""
        objects = [found for found in rendered(values) if found["kind"] != "Secret" and found["kind"] != "Pod"]
        here = {(key.kind, key.name): found for key, found in self.api.objects.items() if key.kind != "Secret"}
        return {(each["kind"], each["metadata"]["name"]): content(each) for each in objects} == {
            key: content(found) for key, found in here.items()
        }


def content(found: Object) -> Object:
    own = {name: value for name, value in found.items() if name not in ("apiVersion", "kind", "metadata", "status")}
    return {**own, "labels": found["metadata"]["labels"]}


@pytest.fixture(params=HELM)
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Helm]:
    cluster = Helm(request.param, tmp_path)
    yield cluster
    cluster.api.close()


def test_an_upgrade_changes_what_the_values_change_and_no_secret(cluster: Helm) -> None:
    cluster.install(VALUES)
    assert cluster.is_as_rendered(VALUES)
    secrets = cluster.secrets()
    assert secrets.keys() == {*KEPT, f"{RELEASE}-springtide-prometheus"}
    cluster.upgrade(OTHER_VALUES)
    assert cluster.is_as_rendered(OTHER_VALUES)
    assert cluster.secrets() == secrets
    cluster.roll_back(1)
    assert cluster.is_as_rendered(VALUES)
    assert cluster.secrets() == secrets


def test_rules_and_dashboards_come_change_and_go_like_all_else(cluster: Helm) -> None:
    def dashboards(label: str) -> list[str]:
        return [name for name, found in cluster.api.of_kind("ConfigMap").items() if label in found["metadata"]["labels"]]

    def objective() -> str:
        (rules,) = cluster.api.of_kind("PrometheusRule").values()
        return str(rules["spec"]["groups"][0]["rules"][0]["expr"])

    cluster.install(VALUES)
    installed = dashboards("grafana_dashboard")
    assert len(installed) == len(DASHBOARDS) and objective() == "vector(0.99)"
    cluster.upgrade(OTHER_VALUES)
    assert dashboards("shown") == installed and objective() == "vector(0.999)"
    cluster.upgrade({**VALUES, "monitoring": {"podMonitor": {"enabled": True}}})
    assert dashboards("shown") == dashboards("grafana_dashboard") == [] and not cluster.api.of_kind("PrometheusRule")


def test_pools_on_ray_are_changed_like_all_else(cluster: Helm) -> None:
    cluster.install(ON_RAY)
    assert cluster.is_as_rendered(ON_RAY)
    secrets = cluster.secrets()
    cluster.upgrade({**ON_RAY, "prefill": {"replicas": 2}})
    (found,) = cluster.api.of_kind("RayCluster").values()
    assert found["spec"]["workerGroupSpecs"][0]["replicas"] == 2
    assert cluster.secrets() == secrets
    cluster.roll_back(1)
    assert cluster.is_as_rendered(ON_RAY)
    cluster("uninstall", RELEASE)
    assert len(cluster.api.objects) == len(KEPT)


def test_a_secret_that_was_deleted_is_another_after_the_next_upgrade(cluster: Helm) -> None:
    cluster.install(VALUES)
    secrets = cluster.secrets()
    cluster.api.delete("Secret", f"{RELEASE}-springtide-authority")
    cluster.upgrade(VALUES)
    changed = {name for name, data in cluster.secrets().items() if data != secrets[name]}
    assert changed == {f"{RELEASE}-springtide-authority", f"{RELEASE}-springtide-prometheus"}


def test_an_authority_that_was_replaced_stays_and_prometheus_has_a_certificate_of_it(cluster: Helm, tmp_path: Path) -> None:
    cluster.install(VALUES)
    name = f"{RELEASE}-springtide-authority"
    (tmp_path / "authority.pem").write_bytes(base64.b64decode(cluster.secrets()[name]["authority.pem"]))
    for change in (Authority.rotate, Authority.retire):
        authority = change(Authority.open(tmp_path))
        data = {"authority.pem": base64.b64encode((tmp_path / "authority.pem").read_bytes()).decode()}
        cluster.api.of_kind("Secret")[name]["data"] = data
        cluster.upgrade(VALUES)
        assert cluster.secrets()[name] == data
        of_prometheus = {key: base64.b64decode(text) for key, text in cluster.secrets()[f"{RELEASE}-springtide-prometheus"].items()}
        assert of_prometheus["ca.crt"].startswith(authority.bundle)
        assert authority.vouches_for(of_prometheus["tls.crt"]) is not None
    assert name_of(authority.roots[0]).startswith(f"{RELEASE}-springtide authority ")


def test_what_is_removed_leaves_its_secrets_to_who_comes_back(cluster: Helm) -> None:
    cluster.install(VALUES)
    secrets = cluster.secrets()
    cluster("uninstall", RELEASE)
    assert cluster.secrets() == {name: secrets[name] for name in KEPT}
    assert len(cluster.api.objects) == len(KEPT)
    cluster.install(OTHER_VALUES)
    assert {name: cluster.secrets()[name] for name in KEPT} == {name: secrets[name] for name in KEPT}


def test_a_newer_chart_follows_an_older_one(cluster: Helm, tmp_path: Path) -> None:
    cluster.install(VALUES)
    newer = shutil.copytree(CHART, tmp_path / "newer")
    described = yaml.safe_load((newer / "Chart.yaml").read_text())
    (newer / "Chart.yaml").write_text(yaml.safe_dump({**described, "version": "99.0.0", "appVersion": "99.0.0"}))
    cluster.upgrade(VALUES, newer)
    images = {
        container["image"]
        for kind in ("Deployment", "StatefulSet")
        for found in cluster.api.of_kind(kind).values()
        for container in found["spec"]["template"]["spec"]["containers"]
    }
    assert images == {"springtide:99.0.0-cpu"}


def test_the_volume_of_a_statefulset_is_as_it_was_made(cluster: Helm) -> None:
    cluster.install(VALUES)
    with pytest.raises(ValueError, match="volumeClaimTemplates: field is immutable"):
        cluster.upgrade({**VALUES, "prefill": {"kind": "StatefulSet", "ssd": {"enabled": True, "size": "1Ti"}}})


def test_the_api_takes_no_dashboard_that_has_no_room_in_a_configmap(cluster: Helm, tmp_path: Path) -> None:
    larger = shutil.copytree(CHART, tmp_path / "larger")
    (larger / "files/dashboards/springtide-larger.json").write_text(json.dumps({"title": "x" * MOST_BYTES}))
    with pytest.raises(ValueError, match="dashboard-larger: data: Too long"):
        cluster("install", RELEASE, str(larger), "--disable-openapi-validation", values=VALUES)


def test_the_api_takes_no_field_that_kubernetes_does_not_know(cluster: Helm) -> None:
    with pytest.raises(ValueError, match="colour"):
        cluster.install({"podSecurityContext": {"runAsUser": 1, "colour": "blue"}})
