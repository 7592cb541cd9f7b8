"""Traces of requests as block ids, in the format of the traces that the Mooncake project has published.

One JSON object a line: `timestamp` (ms), `input_length` and `output_length` (tokens), `hash_ids` (one id for each block of the prompt;
requests whose ids begin alike have that prefix in common).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from springtide.blocks import block_keys, namespace_root
from springtide.errors import ConfigError
from springtide.ids import BlockKey

_ROOT = namespace_root("trace", "", 1)
_MAX_ID = 1 << 32


@dataclass(frozen=True, slots=True)
class Request:
    timestamp_ms: float
    keys: list[BlockKey]
    """Chained, as those of real prompts are: equal up to where the ids differ for the first time."""


def read_trace(path: Path) -> list[Request]:
    """In order of time. Raises ConfigError, naming the line and the field, where the file is not such a trace."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a trace: it is not text") from None
    requests = [_request(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise ConfigError(f"{path} is an empty trace")
    return sorted(requests, key=lambda request: request.timestamp_ms)


def _request(line: str, where: str) -> Request:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: a request is a JSON object, not {_shown(record)}")
    timestamp = _field(record, "timestamp", where, "a number of milliseconds", lambda value: _is_number(value) and value >= 0)
    for name in ("input_length", "output_length"):
        _field(record, name, where, "a number of tokens", lambda value: _is_integer(value) and value >= 0)
    ids = _field(
        record,
        "hash_ids",
        where,
        f"a list of at least one integer from 0 to {_MAX_ID - 1}",
        lambda value: isinstance(value, list) and bool(value) and all(_is_integer(number) and 0 <= number < _MAX_ID for number in value),
    )
    return Request(timestamp, block_keys(_ROOT, ids, 1))


def _field(record: dict[str, Any], name: str, where: str, meaning: str, is_right: Callable[[Any], bool]) -> Any:
    if name not in record:
        raise ConfigError(f"{where}: there is no {name}, which should be {meaning}")
    if not is_right(record[name]):
        raise ConfigError(f"{where}: {name} should be {meaning}, not {_shown(record[name])}")
    return record[name]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or isinstance(value, float)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
