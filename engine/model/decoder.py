"""The one model of all families: a decoder-only transformer whose layers are put together from the parts that its ModelConfig asks for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from engine.backends.base import AttentionPass, Backend, DenseLayer, HeadNorms, LastRows, LayersPass, StartLayers
from engine.batch import LayerHooks
from engine.formats.gguf_config import ROPE_FREQUENCIES
from engine.formats.weights import Weights
from engine.layers.linear import Product
from engine.layers.rope import Rotary, Rotation
from engine.model.feed_forward import FeedForward, SparseFeedForward
from engine.model.module_weights import ModuleWeights
from engine.model_config import ModelConfig
from engine.shard import Ranks


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


class DecoderLayer:
    def __init__(self, weights: ModuleWeights, ranks: Ranks, index: int) -> None:
        """`index` counts from the model's first layer."""
        self._ranks = ranks
        config = weights.config
        weights = weights.below(f"model.layers.{index}")
        self._ops = weights.backend.ops
        self._attention_norm = weights.norm("input_layernorm", config.hidden_size)
        self._attention = SelfAttention(weights.below("self_attn"))
        self._feed_forward_norm = weights.norm("post_attention_layernorm", config.hidden_size)
        mlp = weights.below("mlp")
        self._feed_forward = SparseFeedForward(mlp) if config.has_experts(index) else FeedForward(mlp, config.intermediate_size)

    def dense(self) -> DenseLayer | None:
        """The layer's parts, or None where it is more than that."""
        feed_forward, attention = self._feed_forward, self._attention
        if self._ranks.shard.size > 1 or not isinstance(feed_forward, FeedForward):
            return None
        norms = self._attention_norm, self._feed_forward_norm
        return DenseLayer(norms[0], attention.qkv, attention.norms, attention.output, norms[1], feed_forward.gated, feed_forward.down)

    def __call__(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, rotation: Rotation, attention: AttentionPass, index: int
    ) -> torch.Tensor:
        """Adds `delta`, what the layer before has left to be added, and this layer's attention to `hidden` [rows, hidden] in place; returns
        what its feed-forward leaves to be added. `index` counts from this stage's first layer."""
        ops = self._ops
        x = ops.norm(hidden, self._attention_norm) if delta is None else ops.add_norm(hidden, delta, self._attention_norm)
        attended = self._ranks.add(self._attention(x, rotation, attention, index))
        return self._ranks.add(self._feed_forward(ops.add_norm(hidden, attended, self._feed_forward_norm)))


class LayerByLayer(LayersPass):
    """Runs one layer after another: for every backend, and for every kind of layer."""

    def __init__(self, layers: Sequence[DecoderLayer], stream: torch.Tensor, rotation: Rotation, attention: AttentionPass) -> None:
        self._layers, self._stream, self._rotation, self._attention = layers, stream, rotation, attention
        self._delta: torch.Tensor | None = None

    def run(self, begin: int, end: int, keys_only: bool = False) -> None:
        assert not keys_only, "only fused layers leave anything out"
        for index in range(begin, end):
            self._delta = self._layers[index](self._stream, self._delta, self._rotation, self._attention, index)

    def finish(self) -> torch.Tensor:
        return self._stream if self._delta is None else self._stream.add_(self._delta)


class DecoderModel:
    """See engine.model.base.Model."""

    def __init__(
        self, config: ModelConfig, weights: Weights, dtype: torch.dtype, backend: Backend, ranks: Ranks, begin: int, end: int
    ) -> None:
        self.config, self.dtype, self.backend, self.ranks, self.begin, self.end = config, dtype, backend, ranks, begin, end
        whole = ModuleWeights(weights, config, dtype, backend, ranks.shard)
        self._layers = [DecoderLayer(whole, ranks, index) for index in range(begin, end)]
        fused = _fused(backend, self._layers)
        self._start: StartLayers = fused or partial(LayerByLayer, self._layers)
        self._narrows = fused is not None and end == config.layers
        """Its layers can leave out what nobody wants of the model's last one."""
        divisors = _rope_divisors(config, weights)
        self._rotary = Rotary(config.rope, config.head_dim, divisors, backend.torch_device, config.context_length)
        self._embedding: torch.Tensor | None = None
        self._head: Product | None = None
        if begin == 0:
            embedding = whole.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
            # In the weights' dtype, as transformers rounds the scale.
            self._embedding = embedding * torch.tensor(config.embedding_scale, dtype=dtype)
        if end == config.layers:
            self._norm = whole.norm("model.norm", config.hidden_size)
            head = "model.embed_tokens" if config.tied_embeddings else "lm_head"
            self._head = whole.linear({head: config.vocab_size}, config.hidden_size, split="outputs")

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        assert self._embedding is not None, "only the first stage embeds"
        return self._embedding.index_select(0, token_ids)

    def run_layers(self, hidden: torch.Tensor, attention: AttentionPass, hooks: LayerHooks | None) -> torch.Tensor:
        layers, count = self._begin(hidden, attention), len(self._layers)
        last = attention.last if self._narrows else None
        if hooks is None:
            layers.run(0, count, keys_only=last is not None)
            self._run_last(hidden, last)
        else:
            for index in range(count):
                hooks.before(index)
                ends = index == count - 1
                layers.run(index, index + 1, keys_only=ends and last is not None)
                if ends:
                    self._run_last(hidden, last)
                hooks.after(index)
        return layers.finish()

    def _begin(self, hidden: torch.Tensor, attention: AttentionPass) -> LayersPass:
        return self._start(hidden, self._rotary(attention.positions), attention)

    def _run_last(self, hidden: torch.Tensor, last: LastRows | None) -> None:
        """The last layer, of what it takes in, for these rows."""
        if last is None or not last.rows:
            return
        rows = torch.tensor(last.rows)
        layers = self._begin(hidden[rows], last.plan())
        layers.run(len(self._layers) - 1, len(self._layers))
        hidden[rows] = layers.finish()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self._head is not None, "only the last stage has the output head"
        logits = self._head(self.backend.ops.norm(hidden, self._norm))
        return self.ranks.join(logits, self.config.vocab_size).float()


def _fused(backend: Backend, layers: Sequence[DecoderLayer]) -> StartLayers | None:
    dense = [parts for layer in layers if (parts := layer.dense()) is not None]
    return backend.fuse(dense) if backend.fuse is not None and len(dense) == len(layers) else None


def _rope_divisors(config: ModelConfig, weights: Weights) -> torch.Tensor | None:
    if ROPE_FREQUENCIES not in weights:
        return None
    return weights.tensor(ROPE_FREQUENCIES, (config.head_dim // 2,), torch.float32)
