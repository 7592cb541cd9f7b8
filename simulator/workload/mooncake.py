"""Workloads from and to the format of the Mooncake traces, see `records`.

Five fields more, that other readers pass over, carry what the format has no place for: `output_hash_ids`, `tenant`, `priority`,
`deadline_ms` and `idle`, each left out where it has its default.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simulator.workload.records import are_ids, field, is_integer, is_number, read_records
from simulator.workload.request import ID_TYPE, SimRequest, Workload, block_count, filled_by_output
from springtide.errors import ConfigError
from springtide.protocol.scheduling import MAX_DEADLINE_MS

TRACE_BLOCK_TOKENS = 512


def read_mooncake(path: Path, block_tokens: int = TRACE_BLOCK_TOKENS) -> Workload:
    """Named after the file, in order of time. `block_tokens` is what the trace was made with: 512 in all that are published.
    Raises ConfigError, naming file, line, field and value, where the file is not such a trace."""
    rows = [_row(record, where, block_tokens) for where, record in read_records(path)]
    rows.sort(key=lambda row: row[0])
    return Workload(path.stem, block_tokens, [SimRequest(number, *row) for number, row in enumerate(rows)])


def write_mooncake(workload: Workload, path: Path) -> None:
    """A file that `read_mooncake` makes the same requests of, given the same `block_tokens`. Raises OSError where it cannot be written."""
    with path.open("w", encoding="utf-8") as file:
        for request in workload.requests:
            record: dict[str, Any] = {
                "timestamp": request.arrival_s * 1e3,
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": list(request.blocks),
            }
            if request.output_blocks:
                record["output_hash_ids"] = list(request.output_blocks)
            if request.tenant:
                record["tenant"] = request.tenant
            if request.priority:
                record["priority"] = request.priority
            if request.deadline_ms:
                record["deadline_ms"] = request.deadline_ms
            if request.idle:
                record["idle"] = True
            file.write(json.dumps(record) + "\n")


_Row = tuple[float, int, int, Sequence[int], Sequence[int], str, int, float, bool]
"""The fields of a SimRequest after its id."""


def _row(record: dict[str, Any], where: str, block_tokens: int) -> _Row:
    for name in ("input_length", "output_length"):
        field(record, name, where, "a number of tokens, 1 or more", lambda value: value >= 1)
    input_tokens, output_tokens = record["input_length"], record["output_length"]
    expected = block_count(input_tokens, block_tokens)
    if len(record["hash_ids"]) != expected:
        ids = len(record["hash_ids"])
        raise ConfigError(f"{where}: hash_ids has {ids} ids, but input_length {input_tokens} is {expected} blocks of {block_tokens} tokens")
    return (
        record["timestamp"] / 1e3,
        input_tokens,
        output_tokens,
        array(ID_TYPE, record["hash_ids"]),
        _output_blocks(record, where, filled_by_output(input_tokens, output_tokens, block_tokens)),
        field(record, "tenant", where, "a string", lambda value: isinstance(value, str)) if "tenant" in record else "",
        field(record, "priority", where, "an integer", is_integer) if "priority" in record else 0,
        _deadline_ms(record, where),
        bool(field(record, "idle", where, "true or false", lambda value: isinstance(value, bool))) if "idle" in record else False,
    )


def _output_blocks(record: dict[str, Any], where: str, filled: int) -> Sequence[int]:
    if "output_hash_ids" not in record:
        return ()
    meaning = f"a list of {filled} ids, the blocks that the output fills"
    ids = field(record, "output_hash_ids", where, meaning, lambda value: are_ids(value) and len(value) == filled)
    return array(ID_TYPE, ids) if ids else ()


def _deadline_ms(record: dict[str, Any], where: str) -> float:
    if "deadline_ms" not in record:
        return 0.0
    meaning = f"a number of milliseconds, 0 to {MAX_DEADLINE_MS:.0f}"
    return float(field(record, "deadline_ms", where, meaning, lambda value: is_number(value) and 0 <= value <= MAX_DEADLINE_MS))
