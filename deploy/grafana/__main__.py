"""`python -m deploy.grafana` writes the dashboards' JSON beside this file."""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.grafana.machines import hosts
from deploy.grafana.nodes import decode, pool, prefill
from deploy.grafana.serving import conductor, overview, request, tenants

DIRECTORY = Path(__file__).with_name("dashboards")
DASHBOARDS = (overview, conductor, prefill, decode, pool, request, tenants, hosts)


def written() -> dict[str, str]:
    """The files, by name."""
    files = {}
    for make in DASHBOARDS:
        made = make().build()
        for number, panel in enumerate(made.panels or (), 1):
            panel.id_val = number
        plain = json.loads(JSONEncoder().encode(made))
        for variable in plain["templating"]["list"]:
            # The SDK gives every variable what is an interval's alone.
            for name in ("auto", "auto_count", "auto_min"):
                variable.pop(name)
        files[f"{made.uid}.json"] = json.dumps(plain, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
    return files


def main() -> None:
    for path in DIRECTORY.glob("*.json"):
        path.unlink()
    for name, text in written().items():
        (DIRECTORY / name).write_text(text)


if __name__ == "__main__":
    main()
