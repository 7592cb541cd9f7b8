"""The weights of one module of a model, from which its norms and matrix products are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from engine.backends.base import Backend, Norm
from engine.formats.weights import Weights
from engine.layers.linear import Product
from engine.model_config import ModelConfig
from engine.shard import Shard

Split = Literal["outputs", "inputs"]


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """What is below `prefix` (`model.layers.0.mlp.`, or empty for the whole model), asked for in `dtype`.

    The methods raise ConfigError when a tensor is missing or has another shape.
    """

    weights: Weights
    config: ModelConfig
    dtype: torch.dtype
    backend: Backend
    shard: Shard
    prefix: str = ""

    def below(self, name: str) -> ModuleWeights:
        return replace(self, prefix=f"{self.prefix}{name}.")

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor, on the device where there is one: of a model's weights no more than one tensor is ever in the host's memory."""
        return self._read(name, *shape).to(self.backend.torch_device)

    def linear(self, outputs: Mapping[str, int], inputs: int, has_bias: bool = False, split: Split | None = None) -> Product:
        """Projections of the same input as one product; `outputs` are their names and sizes, in the order of the result's columns.

        Split by `outputs`, a rank computes its part of each projection's columns; by `inputs`, from its part of the input's columns what
        is to be added to the other ranks' results."""
        return self.backend.ops.linear(*self._projections(outputs, inputs, has_bias, split))

    def gated(self, outputs: int, inputs: int, has_bias: bool) -> Product:
        """`activation(gate_proj(x)) * up_proj(x)`, of which a rank computes its part of the columns."""
        both = self._projections({"gate_proj": outputs, "up_proj": outputs}, inputs, has_bias, "outputs")
        return self.backend.ops.gated(*both, self.config.activation)

    def _projections(
        self, outputs: Mapping[str, int], inputs: int, has_bias: bool, split: Split | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        weights, biases = [], []
        for name, size in outputs.items():
            rows = self.shard.of(size) if split == "outputs" else slice(None)
            columns = self.shard.of(inputs) if split == "inputs" else slice(None)
            weights.append(self._read(f"{name}.weight", size, inputs)[rows, columns].to(self.backend.torch_device))
            # What is added up has its bias from one rank.
            if has_bias and not (split == "inputs" and self.shard.rank > 0):
                biases.append(self.tensor(f"{name}.bias", size)[rows])
        return torch.cat(weights), torch.cat(biases) if biases else None

    def norm(self, name: str, size: int) -> Norm:
        name = f"{self.prefix}{name}.weight"
        if self.config.norms_add_one:
            scale = 1 + self.weights.tensor(name, (size,), torch.float32)
        else:
            scale = self.weights.tensor(name, (size,), self.dtype)
        return self.backend.ops.prepared(Norm(scale.to(self.backend.torch_device), self.config.norm_eps))

    def _read(self, name: str, *shape: int) -> torch.Tensor:
        return self.weights.tensor(self.prefix + name, shape, self.dtype)
