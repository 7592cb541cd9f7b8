"""ModelConfig from a Hugging Face `config.json`, refusing by name what the engine would otherwise compute wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from engine.model_config import ROPE_KINDS, Activation, ModelConfig, RopeConfig, RopeKind
from springtide.errors import ConfigError, UnsupportedModel

_Item = TypeVar("_Item")

_ABSENT = object()
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


NAMES = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "context_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "windows": "sliding_window",
    "experts.count": "the number of experts",
    "experts.per_token": "num_experts_per_tok",
    "experts.intermediate_size": "moe_intermediate_size",
    "rope.theta": "rope_theta",
    "rope.factor": "the rotation's factor",
    "rope.original_context": "original_max_position_embeddings",
}
"""What fields of ModelConfig are called in `config.json`, where that is not their own name."""


class HFConfig:
    """Typed access to the fields of `config.json`; every error names the file and the field."""

    def __init__(self, fields: Mapping[str, Any], path: Path) -> None:
        self.fields = fields
        self.path = path

    def with_defaults(self, defaults: Mapping[str, Any]) -> HFConfig:
        """The configuration with what the fields that the file does not have stand for. A field that is null stays null."""
        return HFConfig({**defaults, **self.fields}, self.path)

    def integer(self, name: str, default: int | object = _ABSENT, least: int = 1) -> int:
        value = self._field(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise ConfigError(f"{self.path}: {name} must be {kind}, not {value!r}")
        return value

    def strings(self, name: str) -> list[str] | None:
        return self._list(name, str, "names")

    def integers(self, name: str) -> list[int] | None:
        return self._list(name, int, "integers")

    def number(self, name: str, default: float | object = _ABSENT) -> float:
        value = self._field(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise ConfigError(f"{self.path}: {name} must be a finite number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A flag that is null is none: families differ in what they would take it for."""
        value = self.fields.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.path}: {name} must be true or false, not {value!r}")
        return value

    def refuse(self, name: str, value: Any, supported: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.path}: {name} {value!r} is not supported; {supported}")

    def _list(self, name: str, kind: type[_Item], what: str) -> list[_Item] | None:
        value = self.fields.get(name)
        if value is not None and not (isinstance(value, list) and all(type(item) is kind for item in value)):
            raise ConfigError(f"{self.path}: {name} must be a list of {what}, not {value!r}")
        return value

    def _field(self, name: str, default: Any) -> Any:
        value = self.fields.get(name)
        if value is not None:
            return value
        if default is _ABSENT:
            raise ConfigError(f"{self.path}: {name} is missing")
        return default


def decoder_from_hf(config: HFConfig, architecture: str) -> ModelConfig:
    """What the families have in common. Raises ConfigError for missing and wrong fields, UnsupportedModel for what the engine lacks."""
    _refuse_unknown(config)
    heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    if config.fields.get("head_dim") is None and hidden_size % heads:
        names = f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({heads})"
        raise ConfigError(f"{config.path}: {names}, or head_dim be given")
    context = config.integer("max_position_embeddings")
    rope = rope_from_hf(config, context)
    return ModelConfig(
        architecture=architecture,
        layers=config.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", hidden_size // heads),
        vocab_size=config.integer("vocab_size"),
        context_length=max(context, int(rope.factor * rope.original_context)) if rope.kind == "yarn" else context,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope,
        activation=_activation(config),
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


def windows_from_hf(config: HFConfig, decoder: ModelConfig, is_windowed: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window of each layer that has one; none where it reaches over the whole context."""
    if config.fields.get("sliding_window") is None:
        return ()
    window = config.integer("sliding_window")
    if window >= decoder.context_length:
        return ()
    return tuple(window if is_windowed(layer) else None for layer in range(decoder.layers))


def rope_from_hf(config: HFConfig, context: int) -> RopeConfig:
    """The rotation by `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (before)."""
    name = "rope_scaling" if config.fields.get("rope_scaling") else "rope_parameters"
    values = config.fields.get(name) or {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{config.path}: {name} must be an object, not {values!r}")
    nested = [key for key, value in values.items() if isinstance(value, Mapping)]
    if nested:
        raise config.refuse(f"{name}.{nested[0]}", values[nested[0]], "one rotation for all layers is")
    # The base may stand beside the scaling, or in the other object.
    beside = config.fields.get("rope_parameters")
    beside = beside if isinstance(beside, Mapping) else {}
    rope = HFConfig({"rope_theta": beside.get("rope_theta"), **values}, config.path)
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise config.refuse(f"{name}.rope_type", kind, f"{', '.join(ROPE_KINDS)} are")
    partial = values.get("partial_rotary_factor", config.fields.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise config.refuse("partial_rotary_factor", partial, "only whole heads are rotated")
    original = config.fields.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
    original = context if original is None else HFConfig({name: original}, config.path).integer(name)
    # Only yarn may leave it out.
    implied = {"default": 1.0, "yarn": context / original}.get(kind, _ABSENT)
    return RopeConfig(
        kind=cast(RopeKind, kind),
        theta=rope.number("rope_theta", config.number("rope_theta", 10_000.0)),
        factor=rope.number("factor", implied),
        original_context=original,
        low_freq_factor=rope.number("low_freq_factor") if kind == "llama3" else 1.0,
        high_freq_factor=rope.number("high_freq_factor") if kind == "llama3" else 4.0,
        attention_factor=_optional(rope, "attention_factor"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=_optional(rope, "mscale"),
        mscale_all_dim=_optional(rope, "mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def _is_finite(value: int | float) -> bool:
    """JSON as Python reads it has NaN, infinities, and integers that no float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _optional(config: HFConfig, name: str) -> float | None:
    return None if config.fields.get(name) is None else config.number(name)


def _activation(config: HFConfig) -> Activation:
    activation = config.fields.get("hidden_act", "silu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise config.refuse("hidden_act", activation, f"{', '.join(_ACTIVATIONS)} are")
    return _ACTIVATIONS[activation]


def _refuse_unknown(config: HFConfig) -> None:
    if config.fields.get("use_bidirectional_attention"):
        raise config.refuse("use_bidirectional_attention", True, "causal attention is")
    quantization = config.fields.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise config.refuse("quantization_config.quant_method", method, "give the unquantised weights, or a GGUF file")
