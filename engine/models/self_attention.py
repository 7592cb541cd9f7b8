"""What surrounds attention in a layer: projections, norms of the heads, rotation."""

from __future__ import annotations

import torch

from engine.attention.base import AttentionPass
from engine.models.module_weights import ModuleWeights
from engine.models.rope import rotate


class SelfAttention:
    """Q, K and V are one matrix."""

    def __init__(self, weights: ModuleWeights) -> None:
        config = weights.config
        self._heads, self._kv_heads, self._head_dim = config.heads, config.kv_heads, config.head_dim
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self._qkv = weights.linear({"q_proj": queries, "k_proj": keys, "v_proj": keys}, config.hidden_size, config.qkv_bias)
        self._output = weights.linear({"o_proj": config.hidden_size}, queries, config.output_bias)
        self._norms = (weights.norm("q_norm", config.head_dim), weights.norm("k_norm", config.head_dim)) if config.head_norms else None

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionPass, index: int) -> torch.Tensor:
        """[rows, hidden] to the same; `cos` and `sin` as engine.models.rope has them, `index` is the attention's number of the layer."""
        qkv = self._qkv(x).view(len(x), -1, self._head_dim)
        positioned, value = qkv[:, : self._heads + self._kv_heads], qkv[:, self._heads + self._kv_heads :]
        if self._norms is not None:
            norm_query, norm_key = self._norms
            positioned = torch.cat((norm_query(positioned[:, : self._heads]), norm_key(positioned[:, self._heads :])), 1)
        rotated = rotate(positioned, cos, sin)
        attended = attention.run(index, rotated[:, : self._heads], rotated[:, self._heads :], value)
        return self._output(attended.view(len(x), -1))
