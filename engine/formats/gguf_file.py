"""The layout of a GGUF file: its metadata and where its tensors lie. No torch.

Written out here because `gguf.GGUFReader` takes seconds over the vocabulary's arrays. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from springtide.errors import ConfigError, UnsupportedModel

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_MOST_NESTED = 4
"""Arrays in arrays: far beyond any file, and short of Python's own limit."""
_ABSENT = object()
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """`shape` is row-major (outermost dimension first), `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A parsed header. Arrays of numbers are numpy arrays, arrays of strings are lists.

    What reads a key raises ConfigError, which names the file and the key, when it is missing and has no default, or is of another type.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    data_offset: int
    """Where the header ends and the tensors begin."""

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def text(self, key: str, default: str | object = _ABSENT) -> str:
        value = self._value(key, default)
        if isinstance(value, str):
            return value
        raise self._wrong(key, "a string")

    def texts(self, key: str) -> list[str]:
        value = self._value(key, _ABSENT)
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        raise self._wrong(key, "an array of strings")

    def numbers(self, key: str, count: int) -> Sequence[float]:
        """A list of so many numbers."""
        value = self._value(key, _ABSENT)
        if isinstance(value, np.ndarray) and len(value) == count:
            return cast(Sequence[float], value)
        raise self._wrong(key, f"an array of {count} numbers")

    def integer(self, key: str, default: int | object = _ABSENT, least: int = 1) -> int:
        value = self._value(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        raise self._wrong(key, "a positive integer" if least == 1 else f"an integer of at least {least}")

    def number(self, key: str, default: float | object = _ABSENT) -> float:
        value = self._value(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        raise self._wrong(key, "a finite number")

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if isinstance(value, bool):
            return value
        raise self._wrong(key, "true or false")

    def _value(self, key: str, default: Any) -> Any:
        value = self.metadata.get(key, default)
        if value is _ABSENT:
            raise ConfigError(f"{self.path}: the GGUF key {key!r} is missing")
        return value

    def _wrong(self, key: str, what: str) -> ConfigError:
        return ConfigError(f"{self.path}: the GGUF key {key!r} must be {what}, not {self.metadata[key]!r:.80}")


def read_gguf(path: Path) -> GGUFFile:
    """Raises ConfigError when `path` cannot be read as GGUF, UnsupportedModel for a version or tensor type that is not known."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except OSError as error:
        raise ConfigError(f"cannot read the model file {path}: {error.strerror}") from None
    except (struct.error, ValueError, OverflowError) as error:
        raise ConfigError(f"{path} is not a whole GGUF file: {error}") from None


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self._data, self.position)[0]
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        data, position, unpack_length = self._data, self.position, struct.Struct("<Q").unpack_from
        values = []
        for _ in range(count):
            start = position + 8
            position = start + unpack_length(data, position)[0]
            values.append(data[start:position].decode("utf-8"))
        if position > len(data):
            raise ValueError("it ends in the middle of a string")
        self.position = position
        return values

    def value(self, kind: int, nested: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_code(kind))
        if nested == _MOST_NESTED:
            raise ValueError(f"arrays are nested more than {_MOST_NESTED} deep")
        item_kind, count = self.scalar("I"), self.scalar("Q")
        if item_kind == _STRING:
            return self.strings(count)
        if item_kind == _ARRAY:
            return [self.value(_ARRAY, nested + 1) for _ in range(count)]
        dtype = np.dtype("<" + _code(item_kind))
        values = np.frombuffer(self._data, dtype, count, self.position).copy()
        self.position += values.nbytes
        return values


def _code(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"there is no value type {kind}")
    return _SCALARS[kind]


def _parse(path: Path, data: mmap.mmap) -> GGUFFile:
    cursor = _Cursor(data)
    if data[:4] != _MAGIC:
        raise ConfigError(f"{path} is not a GGUF file: it starts with {bytes(data[:4])!r}")
    cursor.position = 4
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise UnsupportedModel(f"{path}: GGUF version {version} is not supported; versions {_VERSIONS[0]} and {_VERSIONS[1]} are")
    num_tensors, num_entries = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(num_entries):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"the key {key!r} is there twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    relative = [_tensor_entry(path, cursor) for _ in range(num_tensors)]
    if twice := [name for name, count in Counter(entry.name for entry in relative).items() if count > 1]:
        raise ValueError(f"tensor {twice[0]!r} is there twice")
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment % 8:
        raise ValueError(f"general.alignment must be a positive multiple of 8, not {alignment!r}")
    data_offset = -(-cursor.position // alignment) * alignment
    tensors = {
        entry.name: TensorEntry(entry.name, entry.shape, entry.quantization, data_offset + entry.offset, entry.num_bytes)
        for entry in relative
    }
    for entry in tensors.values():
        if entry.offset + entry.num_bytes > len(data):
            raise ValueError(f"it ends before tensor {entry.name!r} does")
        if entry.offset % alignment:
            raise ValueError(f"tensor {entry.name!r} does not begin at a multiple of {alignment} bytes")
    return GGUFFile(path, metadata, tensors, data_offset)


def _tensor_entry(path: Path, cursor: _Cursor) -> TensorEntry:
    name = cursor.string()
    num_dimensions = cursor.scalar("I")
    if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions; 1 to {_MOST_DIMENSIONS} are possible")
    shape = tuple(cursor.scalar("Q") for _ in range(num_dimensions))[::-1]
    kind, offset = cursor.scalar("I"), cursor.scalar("Q")
    try:
        quantization = GGMLQuantizationType(kind)
    except ValueError:
        raise UnsupportedModel(f"{path}: tensor {name!r} has the unknown GGML type {kind}") from None
    block_items, block_bytes = GGML_QUANT_SIZES[quantization]
    if 0 in shape or shape[-1] % block_items:
        raise ValueError(f"tensor {name!r} has shape {list(shape)}; {quantization.name} has rows of a multiple of {block_items}")
    return TensorEntry(name, shape, quantization, offset, prod(shape) // block_items * block_bytes)
