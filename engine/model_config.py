"""What the engine needs to know of a decoder-only transformer, whatever file it came from. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)
Activation = Literal["silu", "gelu_tanh"]
_MOST = 2**31 - 1
"""Of every size: kernels count in 32 bits."""
_MOST_LAYERS = 10_000
"""Far beyond any model, so that a file that says nonsense is refused before something is made for each layer."""


class WrongGeometry(ValueError):
    """Fields that are those of no model. `rule` says what would be right, with the fields in braces, `values` what they are."""

    def __init__(self, rule: str, values: Mapping[str, object]) -> None:
        self._rule, self._values = rule, values
        super().__init__(self.told({}))

    def told(self, names: Mapping[str, str]) -> str:
        """The message with what the model's file calls the fields."""
        text = self._rule
        for field, value in self._values.items():
            text = text.replace(f"{{{field}}}", f"{names.get(field, field)} ({value!r})")
        return text


def _require(holds: bool, rule: str, **values: object) -> None:
    """`__` in the name of a field stands for a dot."""
    if not holds:
        raise WrongGeometry(rule, {name.replace("__", "."): value for name, value in values.items()})


def _require_size(field: str, value: int, most: int = _MOST) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise WrongGeometry(f"{{{field}}} must be an integer between 1 and {most}", {field: value})


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

    def __post_init__(self) -> None:
        _require(0 < self.theta < math.inf, "{rope.theta} must be a positive number", rope__theta=self.theta)
        _require(0 < self.factor <= _MOST, f"{{rope.factor}} must be a positive number up to {_MOST}", rope__factor=self.factor)
        if self.kind in ("llama3", "yarn"):
            _require_size("rope.original_context", self.original_context)
        if self.kind == "llama3":
            low, high = self.low_freq_factor, self.high_freq_factor
            _require(
                0 < low < high < math.inf,
                "{rope.low_freq_factor} must be positive and less than {rope.high_freq_factor}",
                rope__low_freq_factor=low,
                rope__high_freq_factor=high,
            )
        if self.kind == "yarn":
            self._check_yarn()

    def _check_yarn(self) -> None:
        slow, fast = self.beta_slow, self.beta_fast
        _require(self.theta > 1, "{rope.theta} must be greater than 1 with yarn", rope__theta=self.theta)
        _require(
            0 < slow <= fast < math.inf,
            "{rope.beta_slow} must be positive and at most {rope.beta_fast}",
            rope__beta_slow=slow,
            rope__beta_fast=fast,
        )
        for field in ("attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, field)
            if value is not None and not 0 <= value < math.inf:
                raise WrongGeometry(f"{{rope.{field}}} must not be negative", {f"rope.{field}": value})


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
        for field in ("count", "per_token", "intermediate_size"):
            _require_size(f"experts.{field}", getattr(self, field))
        _require(
            self.per_token <= self.count,
            "{experts.per_token} must be at most {experts.count}",
            experts__per_token=self.per_token,
            experts__count=self.count,
        )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry of one model, and in what its layers differ from those of other families. The norms are RMS.

    Raises WrongGeometry for what no model can be: whoever has a ModelConfig need not ask again.
    """

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

    def __post_init__(self) -> None:
        _require_size("layers", self.layers, _MOST_LAYERS)
        for field in ("hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "vocab_size", "context_length"):
            _require_size(field, getattr(self, field))
        _require(self.heads % self.kv_heads == 0, "{heads} must be a multiple of {kv_heads}", heads=self.heads, kv_heads=self.kv_heads)
        _require(self.head_dim % 2 == 0, "{head_dim} must be even: rotary embeddings turn pairs of dimensions", head_dim=self.head_dim)
        _require(0 <= self.norm_eps < math.inf, "{norm_eps} must not be negative", norm_eps=self.norm_eps)
        assert len(self.windows) in (0, self.layers), "each layer has a window, or none"
        for window in self.windows:
            if window is not None:
                _require_size("windows", window)
        assert self.experts is None or self.experts.layers <= frozenset(range(self.layers)), "experts are in layers that there are"

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer in self.experts.layers
