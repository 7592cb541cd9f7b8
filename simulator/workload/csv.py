"""Workloads from CSV files: one request a line, its arrival and its two lengths. Nothing in them says that prompts share a prefix."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, get_args

from simulator.workload.draft import Draft
from simulator.workload.records import read_lines
from simulator.workload.request import Workload
from springtide.errors import ConfigError

ArrivalUnit = Literal["s", "ms", "us", "datetime"]
_PER_S: dict[str, float] = {"s": 1.0, "ms": 1e3, "us": 1e6}


@dataclass(frozen=True, slots=True)
class CsvColumns:
    """The names of the three columns that are read; others are passed over. The arrival is a number in a unit, or a date and time in
    ISO 8601 (without a zone: UTC). Either way the earliest request arrives at 0."""

    arrival: str = "arrival_s"
    prompt: str = "prompt_tokens"
    output: str = "output_tokens"
    arrival_unit: ArrivalUnit = "s"

    @classmethod
    def parse(cls, text: str) -> CsvColumns:
        """The columns named by `ARRIVAL:UNIT,PROMPT,OUTPUT`, such as `start:ms,in,out`; without the unit, s. Raises ConfigError for
        anything else."""
        names = [name.strip() for name in text.split(",")]
        if len(names) != 3 or not all(names):
            raise ConfigError(f"the columns of a CSV trace are ARRIVAL:UNIT,PROMPT,OUTPUT, not {text!r}")
        arrival, colon, unit = names[0].rpartition(":")
        if not colon:
            return cls(names[0], names[1], names[2])
        if unit not in get_args(ArrivalUnit) or not arrival:
            raise ConfigError(f"the unit of the arrival column is one of {', '.join(get_args(ArrivalUnit))}, not {unit!r}")
        return cls(arrival, names[1], names[2], unit)  # type: ignore[arg-type]  # one of them, as was just seen


KNOWN_COLUMNS = (
    CsvColumns(),
    CsvColumns(arrival="arrival_ms", arrival_unit="ms"),
    # The traces of LLM inference that Azure has published (AzurePublicDataset, 2023 and 2024).
    CsvColumns("TIMESTAMP", "ContextTokens", "GeneratedTokens", "datetime"),
)


def read_csv(path: Path, block_tokens: int = 512, columns: CsvColumns | None = None) -> Workload:
    """Named after the file, in order of arrival, every prompt with blocks of its own. Without `columns`, the header says which of
    KNOWN_COLUMNS are meant. Raises ConfigError, naming file, line, column and value, where the file is not such a trace."""
    lines = read_lines(path)
    _, header = next(lines, ("", ""))
    if not header:
        raise ConfigError(f"{path} is an empty trace")
    names = [name.strip() for name in next(csv.reader([header]))]
    columns = columns or _known(names, path)
    missing = [name for name in (columns.arrival, columns.prompt, columns.output) if name not in names]
    if missing:
        raise ConfigError(f"{path}:1: there is no column {missing[0]} among {', '.join(names)}")
    rows = sorted(_rows(lines, names, columns))
    if not rows:
        raise ConfigError(f"{path} is an empty trace")
    draft = Draft(block_tokens)
    for arrival_s, input_tokens, output_tokens in rows:
        draft.add_alone(arrival_s - rows[0][0], input_tokens, output_tokens)
    return draft.workload(path.stem)


def _known(names: list[str], path: Path) -> CsvColumns:
    for columns in KNOWN_COLUMNS:
        if {columns.arrival, columns.prompt, columns.output} <= set(names):
            return columns
    known = " or ".join(f"{c.arrival},{c.prompt},{c.output}" for c in KNOWN_COLUMNS)
    raise ConfigError(f"{path}:1: the columns {','.join(names)} are not known ({known}): say which they are")


def _rows(lines: Iterable[tuple[str, str]], names: list[str], columns: CsvColumns) -> Iterable[tuple[float, int, int]]:
    places = [names.index(name) for name in (columns.arrival, columns.prompt, columns.output)]
    for where, line in lines:
        values = [value.strip() for value in next(csv.reader([line]))]
        if len(values) != len(names):
            raise ConfigError(f"{where}: {len(values)} values for {len(names)} columns")
        arrival, prompt, output = (values[place] for place in places)
        yield _arrival_s(arrival, columns, where), _tokens(prompt, columns.prompt, where), _tokens(output, columns.output, where)


def _arrival_s(text: str, columns: CsvColumns, where: str) -> float:
    if columns.arrival_unit == "datetime":
        try:
            # Python 3.11 reads six digits of a second's fraction; Azure writes seven.
            moment = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text))
        except ValueError:
            raise ConfigError(f"{where}: {columns.arrival} should be a date and time in ISO 8601, not {text!r}") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < float("inf"):
        raise ConfigError(f"{where}: {columns.arrival} should be a number of {columns.arrival_unit}, not {text!r}")
    return value / _PER_S[columns.arrival_unit]


def _tokens(text: str, column: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ConfigError(f"{where}: {column} should be a number of tokens, 1 or more, not {text!r}")
    return int(text)
