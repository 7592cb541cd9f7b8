"""What the engine needs to know of a decoder-only transformer, whatever file it came from. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)
Activation = Literal["silu", "gelu_tanh"]


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
class ExpertsConfig:
    """The sparse feed-forward layers: a router sends each token to a few of many small feed-forwards."""

    layers: frozenset[int]
    """Those that have experts; the others are dense."""
    count: int
    per_token: int
    intermediate_size: int
    """Of one expert."""
    normalised: bool
    """Whether the weights of a token's experts are scaled to sum to 1."""

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise ValueError(f"a token cannot go to {self.per_token} of {self.count} experts")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry of one model, and in what its layers differ from those of other families. The norms are RMS."""

    architecture: str
    layers: int
    hidden_size: int
    intermediate_size: int
    """Of the dense feed-forward layers."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope: RopeConfig
    activation: Activation = "silu"
    """Of the feed-forwards' gates."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Of the attention's output projection."""
    mlp_bias: bool = False
    tied_embeddings: bool = False
    head_norms: bool = False
    """Whether each head's query and key are normalised before they are rotated."""
    norms_add_one: bool = False
    """Whether the norms scale by 1 + weight, in float32."""
    embedding_scale: float = 1.0
    windows: tuple[int | None, ...] = ()
    """To how many tokens, itself included, a token attends in each layer; None or no entry: to all before it."""
    experts: ExpertsConfig | None = None

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer in self.experts.layers
