"""`python -m tests.chaos.summary REPORT ...`: what several runs came to (`make chaos`'s `--report`), as docs/reliability.md has it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.chaos import shapes
from tests.chaos.history import OUTCOMES
from tests.chaos.report import DECIDED_BY_ROUNDING

_COLUMNS = ("requests", *OUTCOMES, DECIDED_BY_ROUNDING, "pieces", "faults", "minutes of rounds")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.summary", description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path)
    try:
        print(summary([json.loads(path.read_text()) for path in parser.parse_args().reports]))
    except ValueError as error:
        parser.error(str(error))


def summary(reports: Sequence[dict[str, Any]]) -> str:
    """Markdown: the runs, why requests were not completed, then the faults of all runs. Of shapes in which requests wait for room, no gaps.
    Raises ValueError for runs that do not belong together."""
    commits = sorted({report["run"]["commit"] for report in reports})
    if len(commits) != 1:
        raise ValueError(f"these are runs of {len(commits)} commits, of which no one table tells: {', '.join(commits)}")
    lines = [f"Commit {commits[0]}.", "", *_runs(reports), "", *_reasons(reports), "", *_faults(reports)]
    return "\n".join(lines)


def _runs(reports: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield from _head("shape", "seed", *_COLUMNS, "violations")
    for report in reports:
        run, totals = report["run"], report["totals"]
        yield _line(run["shape"], run["seed"], *(_number(totals[name]) for name in _COLUMNS), len(report["violations"]))
    together = [_number(sum(report["totals"][name] for report in reports)) for name in _COLUMNS]
    yield _line("together", "", *together, sum(len(report["violations"]) for report in reports))


def _reasons(reports: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield from _head("outcome", "reason", *(report["run"]["seed"] for report in reports), "together")
    for outcome in OUTCOMES:
        of_each = [report["reasons"].get(outcome, {}) for report in reports]
        for reason in sorted({reason for reasons in of_each for reason in reasons}):
            counts = [reasons.get(reason, 0) for reasons in of_each]
            yield _line(outcome, reason, *counts, sum(counts))


def _faults(reports: Sequence[dict[str, Any]]) -> Iterator[str]:
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
    yield from _head("fault", "of", "times", "requests in flight", "longest gap (s)", "of it unexcused (s)", "failed", "wrong")
    for (fault, target), row in sorted(merged.items()):
        gaps_s = (f"{row['longest_gap_s']:.1f}", f"{row['unexcused_gap_s']:.1f}")
        yield _line(fault, target, row["injected"], row["requests"], *gaps_s, row["failed"], row["wrong"])


def _head(*names: object) -> Iterator[str]:
    yield _line(*names)
    yield _line(*["---"] * len(names))


def _line(*cells: object) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _number(value: float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
