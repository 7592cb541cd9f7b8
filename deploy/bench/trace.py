"""Traces of requests as the block keys of their prompts, read from the format that `simulator.workload.records` describes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from simulator.workload.records import read_records
from springtide.blocks import block_keys, namespace_root
from springtide.ids import BlockKey

_ROOT = namespace_root("trace", "", 1)


@dataclass(frozen=True, slots=True)
class TracedPrompt:
    timestamp_ms: float
    keys: list[BlockKey]
    """Chained, as those of real prompts are: equal up to where the ids differ for the first time."""


def read_trace(path: Path) -> list[TracedPrompt]:
    """In order of time. Raises ConfigError, naming the line and the field, where the file is not such a trace."""
    requests = [TracedPrompt(record["timestamp"], block_keys(_ROOT, record["hash_ids"], 1)) for _, record in read_records(path)]
    return sorted(requests, key=lambda request: request.timestamp_ms)
