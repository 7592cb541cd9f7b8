"""Weights of a GGUF file as the model wants them: under their Hugging Face names, and without what the conversion did to them."""

from __future__ import annotations

from functools import partial

import torch

from engine.gguf_file import GGUFFile
from engine.models.config import ModelConfig
from engine.models.gguf_config import GGUFFamily
from engine.weights.gguf import GGUFWeights, unpermute_rotary

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


def gguf_weights(file: GGUFFile, family: GGUFFamily, config: ModelConfig) -> GGUFWeights:
    return GGUFWeights(file, _NAMES, partial(_restore, family, config))


def _restore(family: GGUFFamily, config: ModelConfig, name: str, weight: torch.Tensor) -> torch.Tensor:
    if family.interleaves_rotary and ".q_proj." in name:
        return unpermute_rotary(weight, config.heads)
    if family.interleaves_rotary and ".k_proj." in name:
        return unpermute_rotary(weight, config.kv_heads)
    if family.adds_one_to_norms and name.endswith("norm.weight"):
        return weight - 1
    return weight
