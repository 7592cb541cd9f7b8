"""ModelConfig from the metadata of a GGUF file, refusing by name what the engine would otherwise compute wrongly."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.formats.gguf_file import GGUFFile
from engine.model_config import ExpertsConfig, ModelConfig, RopeConfig, WrongGeometry
from springtide.errors import ConfigError, UnsupportedModel

_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
ROPE_FREQUENCIES = "rope_freqs.weight"
"""Divisors of the rotary frequencies, one a pair of dimensions: how GGUF writes down the llama3 scaling."""


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """Files of one `general.architecture`, and what the conversion to GGUF did to their tensors."""

    name: str
    reader: Callable[[GGUFKeys, str], ModelConfig]
    interleaves_rotary: bool = False
    """Whether the two halves of each head's rows of Q and K lie interleaved."""
    adds_one_to_norms: bool = False

    def read(self, file: GGUFFile, architecture: str) -> ModelConfig:
        """Raises ConfigError for missing and wrong keys, UnsupportedModel for what the engine would otherwise compute wrongly."""
        keys = GGUFKeys(file, self.name)
        try:
            return self.reader(keys, architecture)
        except WrongGeometry as error:
            raise ConfigError(f"{file.path}: {error.told({field: keys.key(name) for field, name in _KEYS.items()})}") from None


_KEYS = {
    "layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "context_length": "context_length",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "experts.count": "expert_count",
    "experts.per_token": "expert_used_count",
    "experts.intermediate_size": "expert_feed_forward_length",
    "rope.theta": "rope.freq_base",
    "rope.factor": "rope.scaling.factor",
    "rope.original_context": "rope.scaling.original_context_length",
    "rope.beta_fast": "rope.scaling.yarn_beta_fast",
    "rope.beta_slow": "rope.scaling.yarn_beta_slow",
}
"""Which keys say what the fields of ModelConfig are."""


class GGUFKeys:
    """The keys below `prefix`, by type, as GGUFFile has them."""

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self.file = file
        self._prefix = prefix

    def key(self, name: str) -> str:
        return f"{self._prefix}.{name}"

    def value(self, name: str, default: Any) -> Any:
        return self.file.metadata.get(self.key(name), default)

    def integer(self, name: str) -> int:
        return self.file.integer(self.key(name))

    def integer_or(self, name: str, default: int, least: int = 1) -> int:
        return self.file.integer(self.key(name), default, least)

    def number(self, name: str) -> float:
        return self.file.number(self.key(name))

    def number_or(self, name: str, default: float) -> float:
        return self.file.number(self.key(name), default)

    def refuse(self, name: str, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.file.path}: {self.key(name)} {self.value(name, None)!r}{what}")


def _decoder(keys: GGUFKeys, architecture: str) -> ModelConfig:
    """What the families have in common."""
    tensors = keys.file.tensors
    heads, hidden_size, context = keys.integer("attention.head_count"), keys.integer("embedding_length"), keys.integer("context_length")
    _refuse_unknown(keys, context)
    if keys.value("attention.key_length", None) is None and hidden_size % heads:
        names = f"{keys.key('embedding_length')} ({hidden_size}) must be a multiple of {keys.key('attention.head_count')} ({heads})"
        raise ConfigError(f"{keys.file.path}: {names}, or {keys.key('attention.key_length')} be given")
    head_dim = keys.integer_or("attention.key_length", hidden_size // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if keys.integer_or(name, head_dim) != head_dim:
            raise keys.refuse(name, f" is not supported; it must equal the head size, {head_dim}")
    layers = keys.integer("block_count")
    if beyond := [name for name in tensors if (block := _BLOCK.match(name)) and int(block[1]) >= layers]:
        raise ConfigError(f"{keys.file.path}: {keys.key('block_count')} is {layers}, but there is a tensor {beyond[0]!r}")
    return ModelConfig(
        architecture=architecture,
        layers=layers,
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        heads=heads,
        kv_heads=keys.integer_or("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=_vocab_size(keys.file, hidden_size),
        context_length=context,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(keys, context),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        tied_embeddings="output.weight" not in tensors,
    )


def _vocab_size(file: GGUFFile, hidden_size: int) -> int:
    """The rows of the embeddings, of which some may be no token's."""
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{file.path}: tensor 'token_embd.weight' is missing; is the model split over several files?")
    shape = file.tensors["token_embd.weight"].shape
    if len(shape) != 2 or shape[1] != hidden_size:
        raise ConfigError(f"{file.path}: tensor 'token_embd.weight' has shape {list(shape)}, embedding_length says [tokens, {hidden_size}]")
    tokens = file.texts("tokenizer.ggml.tokens")
    if len(tokens) > shape[0]:
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.tokens has {len(tokens)} tokens, and tensor 'token_embd.weight' rows for {shape[0]}"
        )
    return shape[0]


def _rope(keys: GGUFKeys, context: int) -> RopeConfig:
    theta = keys.number_or("rope.freq_base", 10_000.0)
    kind = keys.file.text(keys.key("rope.scaling.type"), "none")
    # Files from before `rope.scaling.type` have linear scaling as `rope.scale_linear`.
    factor = keys.number_or("rope.scaling.factor", keys.number_or("rope.scale_linear", 1.0))
    if kind == "none" and factor != 1.0:
        kind = "linear"
    match kind:
        case "none":
            return RopeConfig(theta=theta)
        case "linear":
            return RopeConfig(kind="linear", theta=theta, factor=factor)
        case "yarn":
            return RopeConfig(
                kind="yarn",
                theta=theta,
                factor=factor,
                original_context=keys.integer_or("rope.scaling.original_context_length", context),
                beta_fast=keys.number_or("rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=keys.number_or("rope.scaling.yarn_beta_slow", 1.0),
            )
        case _:
            raise keys.refuse("rope.scaling.type", " is not supported; none, linear and yarn are")


def _refuse_experts(keys: GGUFKeys) -> None:
    """For families that have none; Mixtral's files are `llama` too."""
    if keys.integer_or("expert_count", 0, least=0):
        raise keys.refuse("expert_count", " (mixture of experts) is not supported")


_NEUTRAL = {
    "attention.scale": (0.0,),
    "attention.causal": (True,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0,),
    "rope.scaling.attn_factor": (1.0,),
    "expert_shared_count": (0,),
    "expert_weights_scale": (1.0, 0.0),
    "expert_weights_norm": (True,),
}
"""What changes a model's results and is not computed here, with the values at which it changes nothing."""


def _refuse_unknown(keys: GGUFKeys, context: int) -> None:
    """A window that is shorter than the context is refused because the files do not say which layers have it."""
    for name, neutral in _NEUTRAL.items():
        value = keys.value(name, neutral[0])
        if isinstance(value, list | np.ndarray) or value not in neutral:
            raise keys.refuse(name, f" is not supported; {neutral[0]} is")
    if 0 < keys.integer_or("attention.sliding_window", 0, least=0) < context:
        raise keys.refuse("attention.sliding_window", f" is not supported; attention over the whole context of {context} is")
    count = keys.file.integer("split.count", 0, least=0)
    if count > 1:
        raise UnsupportedModel(f"{keys.file.path}: split.count {count}: GGUF files in several parts are not supported")


def _dense(keys: GGUFKeys, architecture: str) -> ModelConfig:
    _refuse_experts(keys)
    return _decoder(keys, architecture)


def _qwen3(keys: GGUFKeys, architecture: str) -> ModelConfig:
    return replace(_dense(keys, architecture), head_norms=True)


def _qwen3_moe(keys: GGUFKeys, architecture: str) -> ModelConfig:
    decoder = _decoder(keys, architecture)
    experts = ExpertsConfig(
        layers=frozenset(layer for layer in range(decoder.layers) if f"blk.{layer}.ffn_gate_inp.weight" in keys.file.tensors),
        count=keys.integer("expert_count"),
        per_token=keys.integer("expert_used_count"),
        intermediate_size=keys.integer("expert_feed_forward_length"),
        # The files do not say; every published model does, and llama.cpp takes it for granted.
        normalised=True,
    )
    return replace(decoder, head_norms=True, experts=experts)


def _gemma(keys: GGUFKeys, architecture: str) -> ModelConfig:
    decoder = _dense(keys, architecture)
    return replace(decoder, activation="gelu_tanh", norms_add_one=True, embedding_scale=decoder.hidden_size**0.5)


LLAMA = GGUFFamily("llama", _dense, interleaves_rotary=True)
QWEN2 = GGUFFamily("qwen2", _dense)
QWEN3 = GGUFFamily("qwen3", _qwen3)
QWEN3_MOE = GGUFFamily("qwen3moe", _qwen3_moe)
GEMMA = GGUFFamily("gemma", _gemma, adds_one_to_norms=True)
