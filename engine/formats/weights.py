"""Where a model gets its weights from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch

from springtide.errors import ConfigError


class Weights(ABC):
    """Named as in transformers' checkpoints, e.g. `model.layers.0.self_attn.q_proj.weight`, matrices [out, in]. Experts are named one by
    one (`model.layers.0.mlp.experts.7.down_proj.weight`), however the file has them."""

    path: Path

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def shape(self, name: str) -> Sequence[int]:
        """`name` is there; of its contents nothing is read."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The tensor in the dtype of the file, float32 where it is quantised. `name` is there."""

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of its own. Raises ConfigError when it is missing or has another shape."""
        if name not in self:
            raise ConfigError(f"{self.path}: tensor {name!r} is missing")
        if tuple(self.shape(name)) != tuple(shape):
            raise ConfigError(f"{self.path}: tensor {name!r} has shape {list(self.shape(name))}, the configuration says {list(shape)}")
        tensor = self.read(name)
        if not tensor.is_floating_point():
            raise ConfigError(f"{self.path}: tensor {name!r} is of {tensor.dtype}, not of floating-point numbers")
        return tensor.to(dtype).contiguous()
