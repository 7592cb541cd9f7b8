"""Reads a trace of either format, whichever it is."""

from __future__ import annotations

from pathlib import Path

from simulator.workload.csv import CsvColumns, read_csv
from simulator.workload.mooncake import read_mooncake
from simulator.workload.records import read_lines
from simulator.workload.request import Workload

_SUFFIXES = {".jsonl": True, ".csv": False}
"""Whether a file is of JSON lines, where its name says."""


def read_trace(path: Path, block_tokens: int = 512, columns: CsvColumns | None = None) -> Workload:
    """`.jsonl` is the Mooncake format and `.csv` is CSV; another file is the former if it begins with a brace. `columns` are those of a
    CSV file. Raises ConfigError, naming what is wrong with the file and where."""
    json_lines = _SUFFIXES.get(path.suffix.lower())
    if json_lines is None:
        _, first = next(read_lines(path), ("", "{"))
        json_lines = first.lstrip().startswith("{")
    return read_mooncake(path, block_tokens) if json_lines else read_csv(path, block_tokens, columns)
