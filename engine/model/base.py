"""What the runner needs of a model."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.backends.base import AttentionPass, Backend
from engine.batch import LayerHooks
from engine.model_config import ModelConfig
from engine.shard import Ranks


class Model(Protocol):
    """The layers [begin, end) of a model, or one rank's part of them; the embedding with the first of all, the output head with the
    last."""

    config: ModelConfig
    dtype: torch.dtype
    backend: Backend
    ranks: Ranks
    begin: int
    end: int

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [rows] to [rows, hidden]. Only where begin is 0."""
        ...

    def run_layers(self, hidden: torch.Tensor, attention: AttentionPass, hooks: LayerHooks | None) -> torch.Tensor:
        """[rows, hidden] to the same, in the same memory; where the attention's batch wants no logits, what comes of the model's last layer
        need not be right. Layers are numbered from `begin`, for the attention and for the hooks."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to float32 [rows, vocab], at rank 0. Only where end is the last layer."""
        ...
