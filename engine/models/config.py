"""What the engine needs to know of a decoder-only transformer, whatever file it came from. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding and its scaling. The fields after `theta` mean what they mean in transformers' `rope_parameters`."""

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_context: int = 0
    """`original_max_position_embeddings`; used by llama3 and yarn."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry of one model. Attention is causal over the whole context, the activation SiLU, the norms RMS."""

    architecture: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    output_bias: bool = False
    """Of the attention's output projection."""
    mlp_bias: bool = False
    tied_embeddings: bool = False
