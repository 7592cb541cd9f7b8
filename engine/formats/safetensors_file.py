"""The layout of a safetensors file: where its tensors lie. No torch.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from springtide.errors import ConfigError

_MOST_HEADER_BYTES = 100_000_000
"""As the format has it."""
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A header that was checked: its tensors fill the rest of the file, one after another."""

    path: Path
    header: bytes
    """As it lies at the beginning of the file, with its length."""
    spans: tuple[tuple[int, int], ...]
    """(begin, number of bytes) of each tensor, in their order in the file."""


def read_safetensors(path: Path) -> SafetensorsFile:
    """Raises ConfigError when `path` cannot be read, or is not a whole safetensors file."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            header = file.read(length) if length <= min(_MOST_HEADER_BYTES, file_bytes - 8) else b""
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if not header.startswith(b"{"):
        raise ConfigError(f"{path} is not a safetensors file: it begins with {prefix!r}, which is no length of a header that it has")
    try:
        spans = _spans(json.loads(header), 8 + length, file_bytes)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a whole safetensors file: {error}") from None
    return SafetensorsFile(path, prefix + header, spans)


def _spans(document: Mapping[str, Any], begin: int, file_bytes: int) -> tuple[tuple[int, int], ...]:
    """Raises ValueError."""
    entries = {name: entry for name, entry in document.items() if name != "__metadata__"}
    offsets = sorted((*_offsets(name, entry), name) for name, entry in entries.items())
    end = 0
    for start, stop, name in offsets:
        if start != end:
            raise ValueError(f"tensor {name!r} begins at {start} and not where the one before it ends, {end}")
        end = stop
    if begin + end != file_bytes:
        raise ValueError(f"it has {file_bytes} bytes, and its header speaks of {begin + end}")
    return tuple((begin + start, stop - start) for start, stop, _ in offsets)


def _offsets(name: str, entry: Any) -> tuple[int, int]:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]} if all(type(size) is int for size in shape):
            pass
        case _:
            raise ValueError(f"tensor {name!r} needs dtype, shape and two data_offsets, not {entry!r:.80}")
    if dtype not in _BITS:
        raise ValueError(f"tensor {name!r} has the unknown dtype {dtype!r}")
    if min(shape, default=0) < 0 or 8 * (stop - start) != prod(shape) * _BITS[dtype]:
        raise ValueError(f"tensor {name!r} has {stop - start} bytes for {dtype} of shape {shape}")
    return start, stop
