"""What surrounds attention in a layer: the projections."""

from __future__ import annotations

import torch

from engine.backends.base import AttentionPass, HeadNorms
from engine.layers.rope import Rotation
from engine.model.module_weights import ModuleWeights


class SelfAttention:
    """Q, K and V are one matrix. A rank has its own heads, and returns what is to be added to the other ranks' results."""

    def __init__(self, weights: ModuleWeights) -> None:
        config = weights.config
        self._head_dim = config.head_dim
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.qkv = weights.linear({"q_proj": queries, "k_proj": keys, "v_proj": keys}, config.hidden_size, config.qkv_bias, "outputs")
        self.output = weights.linear({"o_proj": config.hidden_size}, queries, config.output_bias, "inputs")
        self.norms = (
            HeadNorms(weights.norm("q_norm", config.head_dim), weights.norm("k_norm", config.head_dim)) if config.head_norms else None
        )

    def __call__(self, x: torch.Tensor, rotation: Rotation, attention: AttentionPass, index: int) -> torch.Tensor:
        """[rows, hidden] to the same; `index` is the attention's number of the layer."""
        qkv = self.qkv(x).view(len(x), -1, self._head_dim)
        return self.output(attention.run(index, qkv, rotation, self.norms).view(len(x), -1))
