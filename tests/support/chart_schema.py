"""What the chart's values.schema.json says of `config`: `python -m tests.support.chart_schema` writes it, from the settings themselves."""

from __future__ import annotations

import json
from typing import Any

from springtide.config import ClusterConfig
from tests.support.chart import CHART

FILE = CHART / "values.schema.json"
OF_THE_CHART = {
    "": (
        *("model", "cluster", "cluster_secret", "redis_url", "valkey_port", "drain_s", "metrics_port", "tls", "observe"),
        *("address", "join_port", "run_dir", "instances", "prefill", "decode"),
    ),
    "server": ("host", "port", "grpc_port", "separate_gateway"),
    "conductor": ("replicas",),
    "kv": ("hugepages",),
    "prefill_node": ("threads",),
    "decode_node": ("threads",),
}
"""By section, the settings that follow from other values, whatever `config` says of them."""
_SIZE = {"type": ["integer", "string"], "pattern": "^\\s*[0-9]+([.][0-9]+)?\\s*([KMGTkmgt][iI]?[bB]?|[bB])?\\s*$"}
_OF_PYDANTIC = ("title", "default", "format", "writeOnly")


def schema_of_config() -> dict[str, Any]:
    described = ClusterConfig.model_json_schema()

    def plain(part: Any, section: str | None = None) -> Any:
        if isinstance(part, list):
            return [plain(each) for each in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return plain(described["$defs"][part["$ref"].removeprefix("#/$defs/")], section)
        if "gt" in part or "ge" in part:  # so is a number described that is made of a text
            return _SIZE | {name: part[name] for name in ("description",) if name in part}
        kept = {name: plain(inner) for name, inner in part.items() if name not in (*_OF_PYDANTIC, "properties")}
        if "properties" in part:
            others = {name: inner for name, inner in part["properties"].items() if name not in OF_THE_CHART.get(section or "", ())}
            kept["properties"] = {name: plain(inner, name) for name, inner in others.items()}
        return kept

    found = plain(described)
    del found["$defs"]
    return {**found, "description": "settings of the cluster (docs/configuration.md), but for those that follow from other values"}


def main() -> None:
    schema = json.loads(FILE.read_text())
    schema["properties"]["config"] = schema_of_config()
    FILE.write_text(json.dumps(schema, indent=2) + "\n")


if __name__ == "__main__":
    main()
