"""What the runner needs of a model, and the loader of a family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.base import AttentionPass
from engine.base import LayerHooks
from engine.models.config import ModelConfig
from engine.weights.base import Weights


class Model(Protocol):
    """The layers [begin, end) of a model; the embedding with the first of all, the output head with the last."""

    config: ModelConfig
    dtype: torch.dtype
    begin: int
    end: int

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [rows] to [rows, hidden]. Only where begin is 0."""
        ...

    def run_layers(self, hidden: torch.Tensor, attention: AttentionPass, hooks: LayerHooks | None) -> torch.Tensor:
        """[rows, hidden] to the same. Layers are numbered from `begin`, for the attention and for the hooks."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to float32 [rows, vocab]. Only where end is the last layer."""
        ...


class Build(Protocol):
    def __call__(self, config: ModelConfig, weights: Weights, dtype: torch.dtype, begin: int, end: int) -> Model: ...


class RestoreGGUF(Protocol):
    def __call__(self, config: ModelConfig, name: str, weight: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class ModelFamily:
    build: Build
    gguf_names: Mapping[str, str]
    """Hugging Face module names, without the layer, to GGUF's."""
    restore_gguf: RestoreGGUF
    """Undoes what the conversion to GGUF did to the tensor of that Hugging Face name."""
