"""The one model of all families: a decoder-only transformer whose layers are put together from the parts that its ModelConfig asks for."""

from __future__ import annotations

import torch

from engine.attention.base import AttentionPass
from engine.base import LayerHooks
from engine.linear import Linear
from engine.models.config import ModelConfig
from engine.models.feed_forward import FeedForward, SparseFeedForward
from engine.models.gguf_config import ROPE_FREQUENCIES
from engine.models.module_weights import ModuleWeights
from engine.models.rope import Rotary
from engine.models.self_attention import SelfAttention
from engine.weights.base import Weights


class DecoderLayer:
    def __init__(self, weights: ModuleWeights, index: int) -> None:
        """`index` counts from the model's first layer."""
        config = weights.config
        weights = weights.below(f"model.layers.{index}")
        self._attention_norm = weights.norm("input_layernorm", config.hidden_size)
        self._attention = SelfAttention(weights.below("self_attn"))
        self._feed_forward_norm = weights.norm("post_attention_layernorm", config.hidden_size)
        mlp = weights.below("mlp")
        self._feed_forward = SparseFeedForward(mlp) if config.has_experts(index) else FeedForward(mlp, config.intermediate_size)

    def __call__(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionPass, index: int) -> torch.Tensor:
        """[rows, hidden] to the same; `index` counts from this stage's first layer."""
        hidden = hidden + self._attention(self._attention_norm(hidden), cos, sin, attention, index)
        return hidden + self._feed_forward(self._feed_forward_norm(hidden))


class Decoder:
    """See engine.models.base.Model."""

    def __init__(self, config: ModelConfig, weights: Weights, dtype: torch.dtype, begin: int, end: int) -> None:
        self.config, self.dtype, self.begin, self.end = config, dtype, begin, end
        whole = ModuleWeights(weights, config, dtype)
        self._layers = [DecoderLayer(whole, index) for index in range(begin, end)]
        self._rotary = Rotary(config.rope, config.head_dim, _rope_divisors(config, weights))
        self._embedding: torch.Tensor | None = None
        self._head: Linear | None = None
        if begin == 0:
            embedding = whole.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
            # In the weights' dtype, as transformers rounds the scale.
            self._embedding = embedding * torch.tensor(config.embedding_scale, dtype=dtype)
        if end == config.layers:
            self._norm = whole.norm("model.norm", config.hidden_size)
            head = "model.embed_tokens" if config.tied_embeddings else "lm_head"
            self._head = whole.linear({head: config.vocab_size}, config.hidden_size)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        assert self._embedding is not None, "only the first stage embeds"
        return self._embedding[token_ids]

    def run_layers(self, hidden: torch.Tensor, attention: AttentionPass, hooks: LayerHooks | None) -> torch.Tensor:
        cos, sin = self._rotary(attention.positions, self.dtype)
        for index, layer in enumerate(self._layers):
            if hooks is not None:
                hooks.before(index)
            hidden = layer(hidden, cos, sin, attention, index)
            if hooks is not None:
                hooks.after(index)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self._head is not None, "only the last stage has the output head"
        return self._head(self._norm(hidden)).float()


def _rope_divisors(config: ModelConfig, weights: Weights) -> torch.Tensor | None:
    if ROPE_FREQUENCIES not in weights:
        return None
    return weights.tensor(ROPE_FREQUENCIES, (config.head_dim // 2,), torch.float32)
