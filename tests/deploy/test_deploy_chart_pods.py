"""The pods of the chart's tests are what Kubernetes would make of them."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.support.chart_environment import command_line, expanded, quantity, variables

POD = {
    "metadata": {"name": "a-0", "namespace": "models", "labels": {"example.com/part": "a"}},
    "spec": {"serviceAccountName": "ours"},
    "status": {"podIP": "198.18.0.5"},
}
OBJECTS = [
    {"kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"SIZE": "7", "COLOUR": "blue"}},
    {"kind": "Secret", "metadata": {"name": "hub"}, "data": {"TOKEN": base64.b64encode(b"word").decode()}},
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y2"),
        ("$(OTHER)", "$(OTHER)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A ${A} $(A", "$A ${A} $(A"),
        ("$(A)$", "1$"),
    ],
)
def test_a_name_in_brackets_is_replaced_where_it_is_known_and_not_escaped(text: str, expected: str) -> None:
    assert expanded(text, {"A": "1", "B": "2"}) == expected


def test_a_variable_knows_those_before_it_and_wins_over_what_comes_from_whole_objects() -> None:
    container = {
        "envFrom": [{"configMapRef": {"name": "settings"}}, {"prefix": "HUB_", "secretRef": {"name": "hub"}}],
        "env": [
            {"name": "SIZE", "value": "8"},
            {"name": "BOTH", "value": "$(SIZE) $(LATER) $(HUB_TOKEN)"},
            {"name": "LATER", "value": "9"},
            {"name": "NOTHING"},
        ],
    }
    found = variables(container, POD, OBJECTS)
    assert found == {"SIZE": "8", "COLOUR": "blue", "HUB_TOKEN": "word", "BOTH": "8 $(LATER) word", "LATER": "9", "NOTHING": ""}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"fieldRef": {"fieldPath": "status.podIP"}}, "198.18.0.5"),
        ({"fieldRef": {"fieldPath": "metadata.labels['example.com/part']"}}, "a"),
        ({"fieldRef": {"fieldPath": "spec.serviceAccountName"}}, "ours"),
        ({"secretKeyRef": {"name": "hub", "key": "TOKEN"}}, "word"),
        ({"configMapKeyRef": {"name": "settings", "key": "COLOUR"}}, "blue"),
        ({"resourceFieldRef": {"resource": "limits.cpu"}}, "2"),
        ({"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1m"}}, "500"),
        ({"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}, "2048"),
        ({"secretKeyRef": {"name": "hub", "key": "OTHER", "optional": True}}, None),
        ({"configMapKeyRef": {"name": "other", "key": "OTHER", "optional": True}}, None),
    ],
)
def test_a_value_comes_from_where_it_says(source: dict[str, Any], expected: str | None) -> None:
    resources = {"limits": {"cpu": "1500m", "memory": "2Gi"}, "requests": {"cpu": 0.5}}
    container = {"env": [{"name": "A", "valueFrom": source}], "resources": resources}
    assert variables(container, POD, OBJECTS).get("A") == expected


@pytest.mark.parametrize(
    "source", [{"secretKeyRef": {"name": "hub", "key": "OTHER"}}, {"secretKeyRef": {"name": "settings", "key": "SIZE"}}]
)
def test_what_is_not_there_is_missed(source: dict[str, Any]) -> None:
    with pytest.raises(LookupError):
        variables({"env": [{"name": "A", "valueFrom": source}]}, POD, OBJECTS)


def test_the_command_is_followed_by_its_arguments() -> None:
    assert command_line({"name": "a", "command": ["get", "$(A)"], "args": ["--to", "$(B)"]}, {"A": "1", "B": "2"}) == ["get", "1", "--to", "2"]
    with pytest.raises(ValueError, match="image"):
        command_line({"name": "a", "args": ["--to", "x"]}, {})


@pytest.mark.parametrize(("text", "expected"), [("500m", 0.5), ("2", 2), ("1.5Gi", 1.5 * 2**30), ("3k", 3000)])
def test_quantities_are_kubernetes_own(text: str, expected: float) -> None:
    assert quantity(text) == expected
