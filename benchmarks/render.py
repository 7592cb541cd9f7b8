"""Renders `benchmarks/results/*.json` into docs/performance.md (`make performance`). No figure there is typed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.results import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
HEADER = """# Performance

Rendered by `make performance` from `benchmarks/results/*.json`, which the commands below write. Figures are medians, with the least and
the greatest run in brackets where there were several; a ratio above one means that ours is the better.
"""


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def section(name: str, document: dict[str, Any]) -> str:
    rows = document["rows"]
    compared = any(row["peer"] is not None for row in rows)
    head = ["", "unit", "ours"] + (["peer", "", "ratio", "wanted", "met"] if compared else [])
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        spread = f" [{number(row['spread'][0])} … {number(row['spread'][1])}]" if row["spread"] else ""
        cells = [row["row"], row["unit"], number(row["ours"]) + spread]
        if compared:
            met = {None: "", True: "yes", False: "no"}[row["met"]]
            cells += [number(row["peer"]), row["peer_name"] or "", number(row["ratio"]), number(row["wanted"]), met]
        lines.append(f"| {' | '.join(cells)} |")
    about = f"`{document['command']}` · {document['machine']} · {document['date']} · commit {document['commit']}"
    return "\n".join([f"## {name}", "", about, "", document["notes"], "", *lines, ""])


def main() -> None:
    documents = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    PAGE.write_text("\n".join([HEADER, *(section(name, document) for name, document in documents.items())]))
    print(PAGE)


if __name__ == "__main__":
    main()
