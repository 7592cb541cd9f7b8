"""The weights of one module of a model, from which its norms and matrix products are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from engine.linear import Linear
from engine.models.config import ModelConfig
from engine.models.norm import RMSNorm
from engine.weights.base import Weights


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """What is below `prefix` (`model.layers.0.mlp.`, or empty for the whole model), asked for in `dtype`.

    The methods raise ConfigError when a tensor is missing or has another shape.
    """

    weights: Weights
    config: ModelConfig
    dtype: torch.dtype
    prefix: str = ""

    def below(self, name: str) -> ModuleWeights:
        return replace(self, prefix=f"{self.prefix}{name}.")

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self.weights.tensor(self.prefix + name, shape, self.dtype)

    def linear(self, outputs: Mapping[str, int], inputs: int, has_bias: bool = False) -> Linear:
        """Projections of the same input as one product; `outputs` are their names and sizes, in the order of the result's columns."""
        weight = torch.cat([self.tensor(f"{name}.weight", size, inputs) for name, size in outputs.items()])
        bias = torch.cat([self.tensor(f"{name}.bias", size) for name, size in outputs.items()]) if has_bias else None
        return Linear(weight, bias)

    def norm(self, name: str, size: int) -> RMSNorm:
        if not self.config.norms_add_one:
            return RMSNorm(self.tensor(f"{name}.weight", size), self.config.norm_eps)
        return RMSNorm(1 + self.weights.tensor(f"{self.prefix}{name}.weight", (size,), torch.float32), self.config.norm_eps)
