"""The Llama family: Llama 1 to 3, SmolLM2 and whatever else is `LlamaForCausalLM`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.attention.base import AttentionPass
from engine.base import LayerHooks
from engine.linear import Linear
from engine.models.base import ModelFamily
from engine.models.config import ModelConfig
from engine.models.gguf_config import ROPE_FREQUENCIES
from engine.models.rope import Rotary, rotate
from engine.weights.base import Weights
from engine.weights.gguf import unpermute_rotary


class LlamaLayer:
    """Projections that read the same input are one matrix: Q, K and V; gate and up."""

    def __init__(self, config: ModelConfig, weights: Weights, dtype: torch.dtype, index: int) -> None:
        self._config = config
        self._weights, self._dtype, self._prefix = weights, dtype, f"model.layers.{index}."
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        parts = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
        self._qkv = self._linear(parts, hidden, config.qkv_bias)
        self._output = self._linear({"self_attn.o_proj": hidden}, queries, config.output_bias)
        self._gate_up = self._linear({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, config.mlp_bias)
        self._down = self._linear({"mlp.down_proj": hidden}, inner, config.mlp_bias)
        self._input_norm = self._tensor("input_layernorm.weight", hidden)
        self._post_norm = self._tensor("post_attention_layernorm.weight", hidden)
        del self._weights

    def __call__(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionPass, index: int) -> torch.Tensor:
        """[rows, hidden] to the same."""
        config = self._config
        qkv = self._qkv(self._norm(hidden, self._input_norm)).view(len(hidden), -1, config.head_dim)
        rotated = rotate(qkv[:, : config.heads + config.kv_heads], cos, sin)
        query, key = rotated[:, : config.heads], rotated[:, config.heads :]
        attended = attention.run(index, query, key, qkv[:, config.heads + config.kv_heads :])
        hidden = hidden + self._output(attended.view(len(hidden), -1))
        gate, up = self._gate_up(self._norm(hidden, self._post_norm)).chunk(2, -1)
        return hidden + self._down(F.silu(gate) * up)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self._config.norm_eps)

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self._weights.tensor(self._prefix + name, shape, self._dtype)

    def _linear(self, outputs: dict[str, int], inputs: int, has_bias: bool) -> Linear:
        weight = torch.cat([self._tensor(f"{name}.weight", size, inputs) for name, size in outputs.items()])
        bias = torch.cat([self._tensor(f"{name}.bias", size) for name, size in outputs.items()]) if has_bias else None
        return Linear(weight, bias)


class LlamaModel:
    """See engine.models.base.Model."""

    def __init__(self, config: ModelConfig, weights: Weights, dtype: torch.dtype, begin: int, end: int) -> None:
        self.config, self.dtype, self.begin, self.end = config, dtype, begin, end
        self._layers = [LlamaLayer(config, weights, dtype, index) for index in range(begin, end)]
        self._rotary = Rotary(config.rope, config.head_dim, _rope_divisors(config, weights))
        matrix = (config.vocab_size, config.hidden_size)
        self._embedding: torch.Tensor | None = None
        self._head: Linear | None = None
        if begin == 0:
            self._embedding = weights.tensor("model.embed_tokens.weight", matrix, dtype)
        if end == config.layers:
            self._norm = weights.tensor("model.norm.weight", (config.hidden_size,), dtype)
            name = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
            self._head = Linear(weights.tensor(name, matrix, dtype))

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
        return self._head(F.rms_norm(hidden, self._norm.shape, self._norm, self.config.norm_eps)).float()


def _rope_divisors(config: ModelConfig, weights: Weights) -> torch.Tensor | None:
    if ROPE_FREQUENCIES not in weights:
        return None
    return weights.tensor(ROPE_FREQUENCIES, (config.head_dim // 2,), torch.float32)


def _restore_gguf(config: ModelConfig, name: str, weight: torch.Tensor) -> torch.Tensor:
    if ".q_proj." in name:
        return unpermute_rotary(weight, config.heads)
    if ".k_proj." in name:
        return unpermute_rotary(weight, config.kv_heads)
    return weight


FAMILY = ModelFamily(
    build=LlamaModel,
    gguf_names={
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    },
    restore_gguf=_restore_gguf,
)
