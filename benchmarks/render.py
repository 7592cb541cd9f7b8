"""Renders `benchmarks/results/*.json` into docs/performance.md (`make performance`). No figure there is typed by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.provenance import changed_since, trees
from benchmarks.results import RESULTS, ratio_in_words

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
HEADER = """# Performance

Rendered by `make performance` from `benchmarks/results/*.json`, which the command of each section writes. A ratio above one means that ours
is the better; one of .95 to 1.05 to a peer is called parity. Nothing has been run on a GPU yet, neither the tests nor `make bench-gpu`:
every figure is of a CPU.

In the column of the state, *stale* means that packages which the figures depend on have changed since, as of this page's rendering, and
*dirty* that the files measured were not as committed.
"""
MET = {None: "", True: "yes", False: "**no**"}


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread_of(spread: Sequence[float] | None) -> str:
    return f" [{number(spread[0])} … {number(spread[1])}]" if spread else ""


def figure(row: Mapping[str, Any]) -> str:
    return number(row["ours"]) + spread_of(row["spread"])


def label(row: Mapping[str, Any]) -> str:
    return f"{row['row']}: {row['case']}" if row["case"] else str(row["row"])


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)) + "\n"


# ---- the summary ----


def summary(documents: Mapping[str, Mapping[str, Any]], now: Mapping[str, str]) -> str:
    """A line or a few for each benchmark: the figures that stand for it, how many of those wanted are met, and what to hold of them."""
    lines = []
    for name, document in documents.items():
        wanted = [row for row in document["rows"] if row["wanted"] is not None]
        met = f"{sum(row['met'] for row in wanted)} of {len(wanted)}" if wanted else ""
        for index, row in enumerate(headlines(document)):
            beside = f"{number(row['peer'])} {row['peer_name']}" if row["peer"] is not None else ""
            ratio = ratio_in_words(row["ratio"], row["peer_name"])
            first = (f"[{name}](#{name})", met, state(document, now)) if index == 0 else ("", "", "")
            ours = f"{number(row['ours'])} {row['unit']}".replace(" 1/", "/").rstrip()
            lines.append([first[0], label(row), ours, beside, ratio, number(row["wanted"]), MET[row["met"]], *first[1:]])
    return table(["", "figure", "ours", "beside", "ratio", "wanted", "met", "all met", "state"], lines)


def headlines(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows that the benchmark names, each beside the peer to which it is nearest to missing what was wanted; where it names none, the
    one that is nearest of all, or the first."""
    rows: list[Mapping[str, Any]] = document["rows"]
    nearest: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if label(row) in document["headlines"]:
            nearest[label(row)] = min(nearest.get(label(row), row), row, key=_margin)
    return list(nearest.values()) or sorted((row for row in rows if _margin(row) < math.inf), key=_margin)[:1] or rows[:1]


def _margin(row: Mapping[str, Any]) -> float:
    return math.inf if row["wanted"] is None or row["ratio"] is None else float(row["ratio"] / row["wanted"])


def state(document: Mapping[str, Any], now: Mapping[str, str]) -> str:
    changed = changed_since(document["trees"], now)
    marks = ["dirty"] if document["dirty"] else []
    if changed is None:
        marks.append("not known")
    elif changed:
        marks.append("stale")
    return ", ".join(marks)


# ---- the sections ----


def figures(rows: Sequence[Mapping[str, Any]]) -> str:
    return table(["", "unit", "ours"], [[row["row"], row["unit"], figure(row)] for row in rows])


def comparison(rows: Sequence[Mapping[str, Any]]) -> str:
    in_cases = any(row["case"] for row in rows)
    head = ["", *(["case"] if in_cases else []), "unit", "ours", "peer", "", "ratio", "wanted", "met", "rounds"]
    lines = []
    for row in rows:
        peer = number(row["peer"]) + spread_of(row["peer_spread"])
        lines.append(
            [
                *(row["row"], *([row["case"]] if in_cases else []), row["unit"], figure(row), peer, row["peer_name"] or ""),
                *(ratio_in_words(row["ratio"], row["peer_name"]), number(row["wanted"]), MET[row["met"]], str(row["rounds"])),
            ]
        )
    return table(head, lines)


def by_case(rows: Sequence[Mapping[str, Any]]) -> str:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    names = dict.fromkeys((row["row"], row["unit"]) for row in rows)
    cells = {(row["row"], row["case"]): figure(row) for row in rows}
    return table(["", "unit", *cases], [[name, unit, *(cells.get((name, case), "") for case in cases)] for name, unit in names])


def section(name: str, document: Mapping[str, Any], now: Mapping[str, str]) -> str:
    rows = document["rows"]
    compared = [row for row in rows if row["peer"] is not None or row["wanted"] is not None]
    others = [row for row in rows if row["peer"] is None and row["wanted"] is None]
    plain, in_cases = [row for row in others if not row["case"]], [row for row in others if row["case"]]
    about = f"`{document['command']}` · {document['machine']} · {document['date']} · {source(document)}"
    fold = f"<details><summary>What is timed, and {len(rows)} figures: medians, with the least and the greatest run in brackets</summary>"
    tables = [render(part) for render, part in ((comparison, compared), (figures, plain), (by_case, in_cases)) if part]
    return "\n".join([f"## {name}", "", about + since(document, now), "", fold, "", document["notes"], "", *tables, "</details>", ""])


def source(document: Mapping[str, Any]) -> str:
    if not document["commit"]:
        return "commit not known"
    about = {True: " with uncommitted changes", False: "", None: ", whether with uncommitted changes is not known"}
    return f"commit {document['commit']}{about[document['dirty']]}"


def since(document: Mapping[str, Any], now: Mapping[str, str]) -> str:
    changed = changed_since(document["trees"], now)
    if changed is None:
        return " · whether it is stale is not known"
    return f" · **stale**: {', '.join(changed)} changed since" if changed else ""


def page(documents: Mapping[str, Mapping[str, Any]], now: Mapping[str, str]) -> str:
    """`documents` by name, `now` as of benchmarks.provenance.trees."""
    return "\n".join([HEADER, summary(documents, now), *(section(name, document, now) for name, document in documents.items())])


def main() -> None:
    documents = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    PAGE.write_text(page(documents, trees()))
    print(PAGE)


if __name__ == "__main__":
    main()
