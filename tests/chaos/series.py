"""`python -m tests.chaos.series DIRECTORY`: a run of each shape of `shapes.SERIES`, one after the other, and their table.

Every run counts as it went: none is repeated, and all are of one commit. The directory, which has to be new, takes a log and a report of
each, named after their seeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from tests.chaos.report import commit
from tests.chaos.shapes import SERIES
from tests.chaos.summary import summary

MINUTES = 8.0
"""Of each run: with all shapes that is an hour of rounds."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos-series", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"of each run (default: {MINUTES:g}, in sum an hour of rounds)")
    parser.add_argument("--first-seed", type=int, default=int(time.time()), help="the others follow it; default: the time")
    arguments = parser.parse_args()
    if commit().endswith("-dirty"):
        parser.error("there are changes that are not committed: the table is to be a commit's")
    try:
        arguments.directory.mkdir(parents=True)
    except FileExistsError:
        parser.error(f"{arguments.directory}: exists already, and may hold other outcomes")
    return run(arguments.directory, arguments.minutes, arguments.first_seed)


def run(directory: Path, minutes: float, first_seed: int) -> int:
    """0: every run was good."""
    codes: dict[int, int] = {}
    for seed, shape in enumerate(SERIES, first_seed):
        report = directory / f"{seed}.json"
        command = [sys.executable, "-m", "tests.chaos", "--seed", str(seed), "--shape", shape, "--minutes", str(minutes)]
        with (directory / f"{seed}.log").open("w") as log:
            codes[seed] = subprocess.run([*command, "--report", str(report)], stdout=log, stderr=log, check=False).returncode
        told = "" if report.exists() else f"; it has no report, see {directory / f'{seed}.log'}"
        print(f"{time.strftime('%H:%M:%S')} seed {seed}, {shape}: exit code {codes[seed]}{told}", flush=True)
    reports = sorted(directory.glob("*.json"), key=lambda path: int(path.stem))
    try:
        print(summary([json.loads(path.read_text()) for path in reports]))
    except ValueError as error:
        print(error)
        return 1
    return int(any(codes.values()) or len(reports) != len(SERIES))


if __name__ == "__main__":
    sys.exit(main())
