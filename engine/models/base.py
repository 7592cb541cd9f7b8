"""What the runner needs of a model."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.attention.base import AttentionPass
from engine.base import LayerHooks
from engine.models.config import ModelConfig


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
