"""Grafana's own types of dashboards as JSON schemas: `python -m tests.support.grafana_types` writes them, out of its package of
npm, of which the tests need nothing."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs

FILE = Path(__file__).parents[1] / "deploy/grafana-types.json"
PACKAGES = ("@grafana/schema@11.6.0", "ts-json-schema-generator@2.4.0", "typescript@7.0.2")
RAW = "@grafana/schema/dist/esm/raw"
PANELS = {"timeseries": "TimeSeries", "stat": "Stat", "table": "Table", "logs": "Logs"}
"""By the name in a dashboard, the types' file."""


def problems(dashboard: Any) -> Iterator[str]:
    """What is wrong with a dashboard, its panels' options and fields included."""
    schemas = _schemas()
    yield from _problems("", schemas["dashboard"], dashboard)
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            continue
        of_its_kind = schemas[panel["type"]]
        yield from _problems(f"{panel['title']}: options", of_its_kind["options"], panel.get("options", {}))
        if "fields" in of_its_kind:
            custom = panel.get("fieldConfig", {}).get("defaults", {}).get("custom", {})
            yield from _problems(f"{panel['title']}: custom fields", of_its_kind["fields"], custom)


def _problems(where: str, schema: Any, value: Any) -> Iterator[str]:
    for error in jsonschema_rs.Draft7Validator(schema).iter_errors(value):
        yield f"{where}{error.instance_path}: {error.message:.200}"


@cache
def _schemas() -> dict[str, Any]:
    return dict(json.loads(FILE.read_text()))


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", scratch, *PACKAGES], check=True)
        made = {
            "dashboard": _schema(
                directory, f'import {{ Dashboard }} from "{RAW}/dashboard/x/dashboard_types.gen"; export type It = Dashboard;'
            )
        }
        for name, kind in PANELS.items():
            types = f"{RAW}/composable/{name}/panelcfg/x/{kind}PanelCfg_types.gen"
            made[name] = {"options": _schema(directory, f'import {{ Options }} from "{types}"; export type It = Partial<Options>;')}
            if name in ("timeseries", "table"):
                made[name]["fields"] = _schema(
                    directory, f'import {{ FieldConfig }} from "{types}"; export type It = Partial<FieldConfig>;'
                )
    FILE.write_text(json.dumps(_bare(made), sort_keys=True) + "\n")


def _schema(directory: Path, text: str) -> Any:
    entry = directory / "entry.ts"
    entry.write_text(text)
    command = [directory / "node_modules/.bin/ts-json-schema-generator", "--path", entry, "--type", "It", "--no-type-check"]
    return json.loads(subprocess.run(command, cwd=directory, capture_output=True, check=True).stdout)


def _bare(schema: Any) -> Any:
    """Without the descriptions."""
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: _bare(inner) for name, inner in schema.items() if not (name == "description" and isinstance(inner, str))}


if __name__ == "__main__":
    main()
