"""What the chart has for Prometheus and Grafana: rules, dashboards, and the labels by which both know the processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.chart import RELEASE, Object, of_kind, rendered, selected
from tests.support.dashboards import DASHBOARDS
from tests.support.prometheus import accepts, alerts, rules

ALL: dict[str, Any] = {"podMonitor": {"enabled": True}, "rules": {"enabled": True}, "dashboards": {"enabled": True}}
ROLES = {"conductor", "gateway", "instance", "prefill", "decode", "store"}
COMPONENT = "__meta_kubernetes_pod_label_app_kubernetes_io_component"


def watched(**more: Any) -> list[Object]:
    monitoring = {name: {**values, **more.get(name, {})} for name, values in ALL.items()}
    return rendered({"monitoring": monitoring})


def rules_of(objects: list[Object]) -> dict[str, Any]:
    (found,) = of_kind(objects, "PrometheusRule")
    return dict(found["spec"])


def test_nothing_of_it_is_there_unasked() -> None:
    objects = rendered({})
    assert of_kind(objects, "PrometheusRule", "PodMonitor") == []
    assert not [found for found in of_kind(objects, "ConfigMap") if "grafana_dashboard" in found["metadata"]["labels"]]


def test_the_rules_are_the_repositorys() -> None:
    assert rules_of(watched()) == rules()


def test_the_rules_are_as_they_are_asked_for(tmp_path: Path) -> None:
    asked = {
        "objective": 0.999,
        "alertLabels": {"team": "ml"},
        "runbooks": "https://wiki.example/runbooks/",
        "grafana": "https://grafana.example",
    }
    found = rules_of(watched(rules=asked))
    assert found["groups"][0]["rules"][0]["expr"] == "vector(0.999)"
    for alert in alerts(found):
        assert alert["labels"]["team"] == "ml" and alert["labels"]["severity"] in ("critical", "warning")
        assert alert["annotations"]["runbook_url"].startswith("https://wiki.example/runbooks/Springtide")
        assert alert["annotations"]["dashboard"].startswith("https://grafana.example/d/springtide-")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(found))
    accepts("promtool", "check", "rules", tmp_path / "rules.yaml")


def test_grafanas_sidecar_finds_every_dashboard() -> None:
    objects = watched(dashboards={"annotations": {"grafana_folder": "Springtide"}})
    found = [each for each in of_kind(objects, "ConfigMap") if each["metadata"]["labels"].get("grafana_dashboard") == "1"]
    assert {name: text for each in found for name, text in each["data"].items()} == {path.name: path.read_text() for path in DASHBOARDS}
    assert len({each["metadata"]["name"] for each in found}) == len(DASHBOARDS)
    assert all(each["metadata"]["annotations"] == {"grafana_folder": "Springtide"} for each in found)


def relabelled(target: dict[str, str], relabelings: list[dict[str, Any]]) -> dict[str, str]:
    """As Prometheus does it."""
    labels = dict(target)
    for each in relabelings:
        value = ";".join(labels.get(name, "") for name in each.get("sourceLabels", []))
        if (matched := re.fullmatch(each.get("regex", "(.*)"), value)) is not None:
            labels[each["targetLabel"]] = matched.expand(each.get("replacement", "$1").replace("$1", r"\1"))
    return labels


@pytest.mark.parametrize(
    ("mode", "pools"), [("plain", ("prefill", "decode")), ("plain", ("instance",)), ("ray", ("prefill", "decode")), ("ray", ("instance",))]
)
def test_rules_and_dashboards_know_every_process(mode: str, pools: tuple[str, ...]) -> None:
    objects = rendered({"mode": mode, "monitoring": ALL, **{pool: {"replicas": 1} for pool in pools}})
    (monitor,) = of_kind(objects, "PodMonitor")
    known = {}
    for each in selected(monitor["spec"]["selector"]["matchLabels"], objects):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            if endpoint["port"] in each.ports():
                labels = relabelled({"__meta_kubernetes_pod_name": each.component(), COMPONENT: each.component()}, endpoint["relabelings"])
                assert labels["cluster"] == f"{RELEASE}-springtide" and labels["springtide_role"] in ROLES
                known[labels["instance"]] = labels["springtide_role"]
    stores = {f"{pool}-store": "store" for pool in pools}
    engines = {name: name for name in ("conductor", "gateway", *pools)}
    assert known == {**engines, **stores, **({"head": "conductor"} if mode == "ray" else {})}
