"""The lines of a trace in the format that the Mooncake project has published its traces in.

One JSON object a line: `timestamp` (ms), `input_length` and `output_length` (tokens), `hash_ids` (one id for each block of the prompt;
requests whose ids begin alike have that prefix in common).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from springtide.errors import ConfigError

_MAX_ID = 1 << 32


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines of a file, each that is not blank, and its place as `file:number`. Raises ConfigError where the file cannot be read or is
    not text."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", line
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a trace: it is not text") from None


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The requests of the trace, each with its four fields right and its place. Raises ConfigError, naming line, field and value, where one
    is wrong, and for a trace without requests."""
    empty = True
    for where, line in read_lines(path):
        empty = False
        yield where, _record(line, where)
    if empty:
        raise ConfigError(f"{path} is an empty trace")


def field(record: dict[str, Any], name: str, where: str, meaning: str, is_right: Callable[[Any], bool]) -> Any:
    """Raises ConfigError where the record lacks it or has it wrong."""
    if name not in record:
        raise ConfigError(f"{where}: there is no {name}, which should be {meaning}")
    if not is_right(record[name]):
        raise ConfigError(f"{where}: {name} should be {meaning}, not {_shown(record[name])}")
    return record[name]


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return is_integer(value) or isinstance(value, float)


def are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(is_integer(number) and 0 <= number < _MAX_ID for number in value)


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: a request is a JSON object, not {_shown(record)}")
    # Not below 0, which NaN is not either; JSON in Python's reading has it.
    field(record, "timestamp", where, "a number of milliseconds", lambda value: is_number(value) and 0 <= value < float("inf"))
    for name in ("input_length", "output_length"):
        field(record, name, where, "a number of tokens", lambda value: is_integer(value) and value >= 0)
    field(
        record,
        "hash_ids",
        where,
        f"a list of at least one integer from 0 to {_MAX_ID - 1}",
        lambda value: bool(value) and are_ids(value),
    )
    return record


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
