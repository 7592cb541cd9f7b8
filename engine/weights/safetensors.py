"""Weights of a Hugging Face directory, sharded or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.hf_files import weight_files
from engine.weights.base import Weights
from springtide.errors import ConfigError


class SafetensorsWeights(Weights):
    def __init__(self, directory: Path) -> None:
        self.path = directory
        self._file_of: dict[str, Any] = {}
        for path in weight_files(directory):
            try:
                file = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ConfigError(f"{path} is not a whole safetensors file: {error}") from None
            self._file_of.update(dict.fromkeys(file.keys(), file))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor
