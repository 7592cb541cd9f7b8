"""The file that every benchmark writes."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from deploy.machine import describe_machine

RESULTS = Path(__file__).parent / "results"


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
