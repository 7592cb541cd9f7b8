"""`python -m tests.chaos.summary REPORT ...`: what several runs came to (`make chaos`'s `--report`), as docs/reliability.md has it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos import shapes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.summary", description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path)
    print(summary([json.loads(path.read_text()) for path in parser.parse_args().reports]))


def summary(reports: Sequence[dict[str, Any]]) -> str:
    """Markdown: the runs, then the faults of all of them. Of shapes in which requests wait for room, no gaps."""
    return "\n".join([*_runs(reports), "", *_faults(reports)])


def _runs(reports: Sequence[dict[str, Any]]) -> list[str]:
    columns = ("requests", "completed", "aborted", "refused", "pieces", "faults")
    lines = [_line("shape", "seed", "minutes", *columns, "violations"), _line(*["---"] * (len(columns) + 4))]
    for report in reports:
        run, totals = report["run"], report["totals"]
        lines.append(
            _line(run["shape"], run["seed"], f"{run['minutes']:g}", *(totals[name] for name in columns), len(report["violations"]))
        )
    together = [sum(report["totals"][name] for report in reports) for name in columns]
    minutes = sum(report["run"]["minutes"] for report in reports)
    return [*lines, _line("together", "", f"{minutes:g}", *together, sum(len(report["violations"]) for report in reports))]


def _faults(reports: Sequence[dict[str, Any]]) -> list[str]:
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for report in reports:
        gaps = ("longest_gap_s", "unexcused_gap_s")
        scarce = shapes.named(report["run"]["shape"]).scarce
        for row in report["rows"]:
            row = {**row, **dict.fromkeys(gaps, 0.0)} if scarce else row
            sums = merged.setdefault((row["fault"], row["target"]), {})
            for name, value in row.items():
                if isinstance(value, int | float):
                    sums[name] = max(sums.get(name, 0.0), value) if name in gaps else sums.get(name, 0) + value
    lines = [_line("fault", "of", "times", "requests in flight", "longest gap (s)", "of it unexcused (s)", "failed", "wrong")]
    lines.append(_line(*["---"] * 8))
    for (fault, target), row in sorted(merged.items()):
        gaps_s = (f"{row['longest_gap_s']:.1f}", f"{row['unexcused_gap_s']:.1f}")
        lines.append(_line(fault, target, row["injected"], row["requests"], *gaps_s, row["failed"], row["wrong"]))
    return lines


def _line(*cells: object) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


if __name__ == "__main__":
    main()
