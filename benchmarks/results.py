"""The file that every benchmark writes."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.provenance import provenance
from deploy.machine import describe_machine

RESULTS = Path(__file__).parent / "results"
LIMIT = "limit"
"""In the place of a peer's name: what the figure was not to exceed."""
PARITY = 0.95, 1.05
"""A ratio to a peer in here is called parity, whichever side it is on."""
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
    """What the figure was measured under, where a benchmark takes the same figures under several."""
    peer_spread: tuple[float, float] | None = None
    rounds: int = 1
    """Whose median it is; where there is a peer, both sides were measured in each."""

    def __post_init__(self) -> None:
        assert self.spread is None or self.rounds > 1 or self.spread[0] == self.spread[1], f"{self.label}: runs that differ are several"

    @property
    def label(self) -> str:
        """The row's name, and its case where it has one."""
        return f"{self.row}: {self.case}" if self.case else self.row


def write(name: str, command: str, rows: Sequence[Row], notes: str = "", headlines: Collection[str] = ()) -> Path:
    """Writes `benchmarks/results/NAME.json` and returns its path. `headlines`: labels of the rows that stand for all in a summary."""
    document = {
        "machine": describe_machine(),
        "date": datetime.date.today().isoformat(),
        **provenance(name),
        "command": command,
        "notes": notes,
        "headlines": list(headlines),
        "rows": [asdict(row) for row in rows],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def ratio_in_words(ratio: float | None, peer_name: str | None) -> str:
    """The ratio for a table, in which what lies within the noise is no victory and no defeat."""
    if ratio is None:
        return ""
    if peer_name != LIMIT and PARITY[0] <= ratio <= PARITY[1]:
        return f"{ratio:.2f}, parity"
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"


def show(title: str, rows: Sequence[Row]) -> None:
    """Prints the rows as a table."""
    table = Table("", "unit", "ours", "spread", "peer", "", "ratio", "wanted", "met", "rounds", title=title)
    for row in rows:
        spread = "" if row.spread is None else f"{row.spread[0]:.3g} - {row.spread[1]:.3g}"
        met = {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[row.met]
        peer, wanted = ("" if value is None else f"{value:.3g}" for value in (row.peer, row.wanted))
        ratio = ratio_in_words(row.ratio, row.peer_name)
        rounds = str(row.rounds)
        table.add_row(row.label, row.unit, f"{row.ours:.3g}", spread, peer, row.peer_name or "", ratio, wanted, met, rounds)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
