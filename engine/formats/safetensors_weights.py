"""Weights of a Hugging Face directory, sharded or not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.formats.hf_files import weight_files
from engine.formats.weights import Weights
from springtide.errors import ConfigError

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class SafetensorsWeights(Weights):
    def __init__(self, directory: Path) -> None:
        self.path = directory
        self._file_of: dict[str, Any] = {}
        for path in weight_files(directory):
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path} is not a whole safetensors file: {error}") from None
            self._file_of.update(dict.fromkeys(file.keys(), file))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of or self._fused(name) is not None

    def shape(self, name: str) -> list[int]:
        if name in self._file_of:
            shape: list[int] = self._file_of[name].get_slice(name).get_shape()
            return shape
        part = self._fused(name)
        assert part is not None, name
        stack, _, rows = part
        return [rows.stop - rows.start, *stack.get_shape()[2:]]

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor
        if name in self._file_of:
            tensor = self._file_of[name].get_tensor(name)
            return tensor
        part = self._fused(name)
        assert part is not None, name
        stack, index, rows = part
        tensor = stack[index, rows]
        return tensor

    def _fused(self, name: str) -> tuple[Any, int, slice] | None:
        """Of one expert's matrix the tensor that it is in, where the file has a layer's experts as one, the expert's index and its rows:
        transformers 5 keeps gate over up in `gate_up_proj` [experts, 2 * inner, hidden] and `down_proj` [experts, hidden, inner]."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return None
        experts, index, projection = match[1], int(match[2]), match[3]
        fused = f"{experts}.down_proj" if projection == "down" else f"{experts}.gate_up_proj"
        if fused not in self._file_of:
            return None
        stack = self._file_of[fused].get_slice(fused)
        shape = stack.get_shape()
        if len(shape) != 3 or index >= shape[0]:
            return None
        rows = shape[1]
        bounds = {"gate": (0, rows // 2), "up": (rows // 2, rows), "down": (0, rows)}[projection]
        return stack, index, slice(*bounds)
