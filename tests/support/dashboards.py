"""The committed dashboards, and what their panels ask for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parents[2] / "deploy/grafana/dashboards"
DASHBOARDS = sorted(DIRECTORY.glob("*.json"))
EXTERNAL = ("node_", "DCGM_")
"""Metrics of node_exporter and dcgm-exporter, which are not Springtide's."""


def panels(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions(dashboard: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of each panel that asks Prometheus: its title and what it asks for."""
    for panel in panels(dashboard):
        for target in panel["targets"]:
            if panel["datasource"]["type"] == "prometheus":
                yield panel["title"], target["expr"]


def substituted(expr: str, interval: str = "1m") -> str:
    """As Grafana asks it where everything is chosen."""
    return re.sub(r"\$(cluster|namespace|instance|role|host)\b", ".*", expr.replace("$__rate_interval", interval))
