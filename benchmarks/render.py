"""Renders `benchmarks/results/*.json` into docs/performance.md (`make performance`). No figure there is typed by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
HEADER = """# Performance

Rendered by `make performance` from `benchmarks/results/*.json`, which the commands below write. Figures are medians, with the least and
the greatest run in brackets where there were several; a ratio above one means that ours is the better.

Nothing has been run on a GPU yet, neither the tests nor `make bench-gpu`: every figure is of a CPU.
"""


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def figure(row: dict[str, Any]) -> str:
    spread = f" [{number(row['spread'][0])} … {number(row['spread'][1])}]" if row["spread"] else ""
    return number(row["ours"]) + spread


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)) + "\n"


def figures(rows: Sequence[dict[str, Any]]) -> str:
    return table(["", "unit", "ours"], [[row["row"], row["unit"], figure(row)] for row in rows])


def comparison(rows: Sequence[dict[str, Any]]) -> str:
    met = {None: "", True: "yes", False: "no"}
    return table(
        ["", "unit", "ours", "peer", "", "ratio", "wanted", "met"],
        [
            [
                *(row["row"], row["unit"], figure(row), number(row["peer"]), row["peer_name"] or ""),
                *(number(row["ratio"]), number(row["wanted"]), met[row["met"]]),
            ]
            for row in rows
        ],
    )


def by_case(rows: Sequence[dict[str, Any]]) -> str:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    names = dict.fromkeys((row["row"], row["unit"]) for row in rows)
    cells = {(row["row"], row["case"]): figure(row) for row in rows}
    return table(["", "unit", *cases], [[name, unit, *(cells.get((name, case), "") for case in cases)] for name, unit in names])


def section(name: str, document: dict[str, Any]) -> str:
    rows = document["rows"]
    compared = [row for row in rows if row["peer"] is not None]
    in_cases = [row for row in rows if row["case"] and row["peer"] is None]
    plain = [row for row in rows if not row["case"] and row["peer"] is None]
    about = f"`{document['command']}` · {document['machine']} · {document['date']} · commit {document['commit']}"
    tables = [render(part) for render, part in ((comparison, compared), (figures, plain), (by_case, in_cases)) if part]
    return "\n".join([f"## {name}", "", about, "", document["notes"], "", *tables])


def main() -> None:
    documents = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    PAGE.write_text("\n".join([HEADER, *(section(name, document) for name, document in documents.items())]))
    print(PAGE)


if __name__ == "__main__":
    main()
