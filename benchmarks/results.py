"""The file that every benchmark writes."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deploy.machine import describe_machine

RESULTS = Path(__file__).parent / "results"
WIDTH = 140
"""Columns of a table that does not go to a terminal."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `ratio` is above one when ours is the better; peer, ratio, wanted and met are None where nothing was compared."""

    row: str
    unit: str
    ours: float
    spread: tuple[float, float] | None = None
    """Least and greatest of the runs whose median `ours` is."""
    peer: float | None = None
    peer_name: str | None = None
    ratio: float | None = None
    wanted: float | None = None
    met: bool | None = None
    case: str = ""
    """What the figure was measured under, where a benchmark takes the same figures under several: a column of its table."""


def write(name: str, command: str, rows: Sequence[Row], notes: str = "") -> Path:
    """Writes `benchmarks/results/NAME.json` and returns its path."""
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent, check=False)
    document = {
        "machine": describe_machine(),
        "date": datetime.date.today().isoformat(),
        "commit": revision.stdout.strip(),
        "command": command,
        "notes": notes,
        "rows": [asdict(row) for row in rows],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def show(title: str, rows: Sequence[Row]) -> None:
    """Prints the rows as a table."""
    table = Table("", "unit", "ours", "spread", "peer", "", "ratio", "wanted", "met", title=title)
    for row in rows:
        spread = "" if row.spread is None else f"{row.spread[0]:.3g} - {row.spread[1]:.3g}"
        met = {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[row.met]
        optional = ("" if value is None else f"{value:.3g}" for value in (row.peer, row.ratio, row.wanted))
        peer, ratio, wanted = optional
        name = f"{row.row}: {row.case}" if row.case else row.row
        table.add_row(name, row.unit, f"{row.ours:.3g}", spread, peer, row.peer_name or "", ratio, wanted, met)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
