"""The dashboards: what is committed is what the code makes, Grafana knows every field of it, and each panel asks for what there is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.commands.metrics_reference import Described, all_metrics
from tests.support.dashboards import DASHBOARDS, EXTERNAL, expressions, panels, substituted
from tests.support.grafana_types import problems
from tests.support.prometheus import REPOSITORY, accepts, rules

OF_EVERY_TARGET = {"cluster", "namespace", "instance", "springtide_role", "job", "le"}
OF_PROMETHEUS = {"up", "ALERTS"}
SOURCES = {"datasource": "prometheus", "logs": "loki", "traces": "tempo"}
"""Variables by which whoever looks says where to ask, and of what kind that is."""
ANNOTATION = re.compile(r"\['annotations', 'list', 0\]: Additional properties are not allowed \('expr' was unexpected\)")
"""Of an annotation's query the types know the part alone that all sources have in common."""


@pytest.fixture(params=DASHBOARDS, ids=lambda path: path.stem)
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(json.loads(request.param.read_text()))


def test_dashboards_are_as_the_code_makes_them() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="wants grafana-foundation-sdk, which makes the dashboards")
    from deploy.grafana.__main__ import written

    assert {path.name: path.read_text() for path in DASHBOARDS} == written(), "python -m deploy.grafana"


def test_grafana_knows_every_field(dashboard: dict[str, Any]) -> None:
    assert [problem for problem in problems(dashboard) if not ANNOTATION.match(problem)] == []
    first = panels(dashboard)[0]
    assert list(problems({**dashboard, "colour": "blue"})) and list(
        problems({**dashboard, "panels": [{**first, "options": {"colour": "blue"}}]})
    )


def test_panels_have_a_place_and_say_what_they_show(dashboard: dict[str, Any]) -> None:
    taken = set()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids)) and dashboard["uid"].startswith("springtide-")
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    for panel in panels(dashboard):
        assert panel["title"] and len(panel["description"]) > 10 and panel["targets"], panel["title"]
        if panel["type"] in ("timeseries", "stat"):
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        if panel["datasource"]["type"] == "prometheus":
            assert {link["title"] for link in panel["links"]} == {"Logs", "Traces"}, panel["title"]


def test_variables_are_there_and_used(dashboard: dict[str, Any]) -> None:
    made = {variable["name"] for variable in dashboard["templating"]["list"]}
    text = json.dumps([dashboard["panels"], dashboard["templating"], dashboard["annotations"]])
    used = {name for pair in re.findall(r"\$(\w+)|\$\{(\w+)", text) for name in pair if name and not name.startswith("__")}
    assert used == made
    assert SOURCES.keys() | {"cluster", "namespace", "role", "instance"} <= made
    for variable in dashboard["templating"]["list"]:
        if variable["name"] in SOURCES:
            assert (variable["type"], variable["query"]) == ("datasource", SOURCES[variable["name"]])
        elif variable["type"] == "query":
            # What it offers is asked of a live Prometheus in tests/watching/test_watching_panels.py.
            assert variable["datasource"]["uid"] == "${datasource}", variable["name"]
            assert (variable["multi"], variable["includeAll"], variable["allValue"]) == (True, True, ".*"), variable["name"]


def in_use() -> Iterator[tuple[str, str]]:
    """Every expression, with where it stands."""
    for path in DASHBOARDS:
        for title, expr in expressions(json.loads(path.read_text())):
            yield f"{path.stem}: {title}", expr
    for group in rules()["groups"]:
        for rule in group["rules"]:
            yield rule.get("alert", rule.get("record")), rule["expr"]


def selectors(expr: str) -> Iterator[tuple[str, set[str]]]:
    """The metrics that an expression asks for, each with the labels by which."""
    plain = re.sub(r'"(?:[^"\\]|\\.)*"', '""', expr)
    words = {"and", "or", "on", "by", "without", "unless", "group_left", "group_right", "bool", "ignoring", "offset"}
    plain = re.sub(r"\b(by|on|without|ignoring|group_left|group_right)\s*\([^)]*\)", " ", plain)
    for found in re.finditer(r"([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})?(?!\s*\()(?![\w:{(])", plain):
        name, matchers = found[1], found[2] or ""
        inside = plain[: found.start()].count("{") > plain[: found.start()].count("}")
        if not inside and name not in words and not re.match(r"\d", plain[found.start() - 1 : found.start()] or " "):
            yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))


def samples() -> dict[str, Described]:
    return {sample: described for described in all_metrics().values() for sample in described.samples}


def test_every_metric_and_label_that_is_asked_for_is_there() -> None:
    known = samples()
    recorded = {rule["record"]: rule["expr"] for group in rules()["groups"] for rule in group["rules"] if "record" in rule}
    for where, expr in in_use():
        for name, labels in selectors(substituted(expr)):
            if name in OF_PROMETHEUS or name.startswith(EXTERNAL):
                continue
            if name in recorded:
                assert all(label in recorded[name] for label in labels - {"cluster", "namespace"}), (where, name, labels)
                continue
            assert name in known, (where, name)
            assert labels <= {*known[name].labels, *OF_EVERY_TARGET}, (where, name, labels)


def test_counters_are_asked_for_their_rise_and_quantiles_for_that_of_buckets() -> None:
    known = samples()
    for where, expr in in_use():
        for name, _ in selectors(substituted(expr)):
            counts = name in known and (known[name].type == "counter" or known[name].type == "histogram")
            risen = re.search(rf"(rate|increase)\({re.escape(name)}(\{{[^}}]*\}})?\[", substituted(expr))
            assert bool(risen) == (counts or name.startswith(("node_cpu", "node_network", "node_pressure"))) or not known.get(name), (
                where,
                name,
            )
        for asked in re.findall(r"histogram_quantile\([^,]*, (.*)", substituted(expr)):
            assert re.match(r"sum by \([^)]*\ble\b[^)]*\) \(rate\(\w+_bucket", asked), (where, asked)


def test_prometheus_can_read_every_expression(tmp_path: Path) -> None:
    found = [{"record": f"panel:{number}", "expr": substituted(expr)} for number, (_, expr) in enumerate(in_use())]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": found}]}))
    accepts("promtool", "check", "rules", "--lint=none", tmp_path / "rules.yaml")


def test_alerts_name_dashboards_and_pages_name_panels_that_there_are() -> None:
    made = [json.loads(path.read_text()) for path in DASHBOARDS]
    uids, titles = {each["uid"] for each in made}, {panel["title"] for each in made for panel in each["panels"]}
    for group in rules()["groups"]:
        for rule in group["rules"]:
            assert "alert" not in rule or rule["annotations"]["dashboard"].removeprefix("/d/") in uids
    for page in (REPOSITORY / "docs/runbooks").glob("*.md"):
        assert set(re.findall(r'"([^"]+)"', page.read_text())) <= titles, page.name
