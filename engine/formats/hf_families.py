"""What tells the families apart in `config.json`: one reader and one set of defaults for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.formats.hf_config import NAMES, HFConfig, decoder_from_hf, windows_from_hf
from engine.model_config import ExpertsConfig, ModelConfig, WrongGeometry
from springtide.errors import ConfigError

_GELU = "gelu_pytorch_tanh"
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class HFFamily:
    """`defaults` are those of the family's configuration class in transformers, which a `config.json` need not repeat."""

    defaults: Mapping[str, Any]
    reader: Callable[[HFConfig, str], ModelConfig]

    def read(self, config: HFConfig, architecture: str) -> ModelConfig:
        """Raises ConfigError for missing and wrong fields, UnsupportedModel for what the engine would otherwise compute wrongly."""
        try:
            return self.reader(config.with_defaults(self.defaults), architecture)
        except WrongGeometry as error:
            raise ConfigError(f"{config.path}: {error.told(NAMES)}") from None


def _llama(config: HFConfig, architecture: str) -> ModelConfig:
    decoder = decoder_from_hf(config, architecture)
    _refuse_windows(config, decoder)
    return replace(_with_attention_bias(config, decoder), mlp_bias=config.flag("mlp_bias", False))


def _mistral(config: HFConfig, architecture: str) -> ModelConfig:
    decoder = decoder_from_hf(config, architecture)
    _refuse_layer_types(config)
    return replace(decoder, windows=windows_from_hf(config, decoder, lambda layer: True))


def _qwen2(config: HFConfig, architecture: str) -> ModelConfig:
    decoder = decoder_from_hf(config, architecture)
    return replace(decoder, qkv_bias=True, windows=_qwen_windows(config, decoder))


def _qwen3(config: HFConfig, architecture: str) -> ModelConfig:
    decoder = decoder_from_hf(config, architecture)
    return replace(_with_attention_bias(config, decoder), head_norms=True, windows=_qwen_windows(config, decoder))


def _qwen3_moe(config: HFConfig, architecture: str) -> ModelConfig:
    decoder = decoder_from_hf(config, architecture)
    _refuse_layer_types(config)
    windows = windows_from_hf(config, decoder, lambda layer: True) if config.flag("use_sliding_window", False) else ()
    return replace(_with_attention_bias(config, decoder), head_norms=True, windows=windows, experts=_qwen_experts(config, decoder.layers))


def _gemma(config: HFConfig, architecture: str) -> ModelConfig:
    # transformers 4 went by `hidden_activation`, where there is one, and version 5 goes by `hidden_act`: they must not differ. Either takes
    # the `gelu` of the first releases for its tanh approximation.
    if config.fields.get("hidden_act") == "gelu":
        config = HFConfig({**config.fields, "hidden_act": _GELU}, config.path)
    named, activation = config.fields.get("hidden_activation"), config.fields["hidden_act"]
    if named not in (None, activation):
        raise config.refuse("hidden_activation", named, f"hidden_act is {activation!r}, and both must be the same")
    decoder = decoder_from_hf(config, architecture)
    _refuse_windows(config, decoder)
    return replace(_with_attention_bias(config, decoder), norms_add_one=True, embedding_scale=decoder.hidden_size**0.5)


def _with_attention_bias(config: HFConfig, decoder: ModelConfig) -> ModelConfig:
    has_bias = config.flag("attention_bias", False)
    return replace(decoder, qkv_bias=has_bias, output_bias=has_bias)


def _qwen_windows(config: HFConfig, decoder: ModelConfig) -> tuple[int | None, ...]:
    """In the layers that `layer_types` names, or else in those from `max_window_layers` on."""
    kinds = config.strings("layer_types")
    if kinds is None:
        first = config.integer("max_window_layers", decoder.layers + 1, least=0)
        kinds = [_SLIDING if layer >= first else _FULL for layer in range(decoder.layers)]
    elif len(kinds) != decoder.layers:
        raise ConfigError(f"{config.path}: layer_types must name the kind of each of the {decoder.layers} layers, not {kinds!r}")
    elif unknown := [kind for kind in kinds if kind not in (_FULL, _SLIDING)]:
        raise config.refuse("layer_types", unknown[0], f"{_FULL!r} and {_SLIDING!r} are")
    if not config.flag("use_sliding_window", False):
        return ()
    return windows_from_hf(config, decoder, lambda layer: kinds[layer] == _SLIDING)


def _qwen_experts(config: HFConfig, layers: int) -> ExpertsConfig | None:
    dense, step = config.integers("mlp_only_layers") or [], config.integer("decoder_sparse_step")
    # transformers 5 writes `num_local_experts`, versions before it `num_experts`.
    count = config.integer("num_local_experts", config.integer("num_experts"))
    return ExpertsConfig(
        layers=frozenset(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0),
        count=count,
        per_token=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("moe_intermediate_size"),
        normalised=config.flag("norm_topk_prob", False),
    )


def _refuse_windows(config: HFConfig, decoder: ModelConfig) -> None:
    """For families that have none."""
    _refuse_layer_types(config)
    if config.flag("use_sliding_window", True) and windows_from_hf(config, decoder, lambda layer: True):
        raise config.refuse("sliding_window", config.fields["sliding_window"], f"{decoder.architecture} attends to the whole context")


def _refuse_layer_types(config: HFConfig) -> None:
    """For families whose layers attend alike."""
    others = sorted(set(config.strings("layer_types") or ()) - {_FULL})
    if others:
        raise config.refuse("layer_types", others[0], f"{_FULL!r} is")


LLAMA = HFFamily(
    {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    _llama,
)
MISTRAL = HFFamily(
    {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    _mistral,
)
_QWEN = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
QWEN2 = HFFamily(_QWEN, _qwen2)
QWEN3 = HFFamily({**_QWEN, "head_dim": 128}, _qwen3)
QWEN3_MOE = HFFamily(
    {
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
    _qwen3_moe,
)
GEMMA = HFFamily(
    {
        "num_hidden_layers": 28,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": _GELU,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    _gemma,
)
