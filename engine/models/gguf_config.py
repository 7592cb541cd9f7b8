"""ModelConfig from the metadata of a GGUF file, refusing by name what the engine would otherwise compute wrongly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from engine.gguf_file import GGUFFile
from engine.models.config import ExpertsConfig, ModelConfig, RopeConfig
from springtide.errors import ConfigError, UnsupportedModel

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
        return self.reader(GGUFKeys(file, self.name), architecture)


class GGUFKeys:
    """Typed access to the keys below `prefix`; every error names the file and the key."""

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self.file = file
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.file.metadata

    def key(self, name: str) -> str:
        return f"{self._prefix}.{name}"

    def value(self, name: str, default: Any) -> Any:
        return self.file.metadata.get(self.key(name), default)

    def integer(self, name: str) -> int:
        value = self.file.require(self.key(name))
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.file.path}: the GGUF key {self.key(name)!r} must be a positive integer, not {value!r}")
        return value

    def integer_or(self, name: str, default: int) -> int:
        return self.integer(name) if name in self else default

    def number(self, name: str) -> float:
        return float(self.file.require(self.key(name)))

    def refuse(self, name: str, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.file.path}: {self.key(name)} {self.value(name, None)!r}{what}")


def _decoder(keys: GGUFKeys, architecture: str) -> ModelConfig:
    """What the families have in common."""
    tensors = keys.file.tensors
    heads, hidden_size, context = keys.integer("attention.head_count"), keys.integer("embedding_length"), keys.integer("context_length")
    _refuse_unknown(keys, context)
    kv_heads = keys.integer_or("attention.head_count_kv", heads)
    if heads % kv_heads:
        names = keys.key("attention.head_count"), keys.key("attention.head_count_kv")
        raise ConfigError(f"{keys.file.path}: {names[0]} ({heads}) must be a multiple of {names[1]} ({kv_heads})")
    head_dim = keys.integer_or("attention.key_length", max(1, hidden_size // heads))
    if head_dim % 2:
        raise UnsupportedModel(f"{keys.file.path}: a head size of {head_dim} is not supported; rotary embeddings need an even one")
    for name in ("attention.value_length", "rope.dimension_count"):
        if keys.integer_or(name, head_dim) != head_dim:
            raise keys.refuse(name, f" is not supported; it must equal the head size, {head_dim}")
    return ModelConfig(
        architecture=architecture,
        layers=keys.integer("block_count"),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_vocab_size(keys.file),
        context_length=context,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(keys, context),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        tied_embeddings="output.weight" not in tensors,
    )


def _vocab_size(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{file.path}: tensor 'token_embd.weight' is missing; is the model split over several files?")
    return file.tensors["token_embd.weight"].shape[0]


def _rope(keys: GGUFKeys, context: int) -> RopeConfig:
    def value(name: str, default: Any) -> Any:
        return keys.value(f"rope.{name}", default)

    theta = float(value("freq_base", 10_000.0))
    kind = value("scaling.type", "none")
    # Files from before `rope.scaling.type` have linear scaling as `rope.scale_linear`.
    factor = float(value("scaling.factor", value("scale_linear", 1.0)))
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
                original_context=int(value("scaling.original_context_length", context)),
                beta_fast=float(value("scaling.yarn_beta_fast", 32.0)),
                beta_slow=float(value("scaling.yarn_beta_slow", 1.0)),
            )
        case _:
            raise keys.refuse("rope.scaling.type", " is not supported; none, linear and yarn are")


def _refuse_experts(keys: GGUFKeys) -> None:
    """For families that have none; Mixtral's files are `llama` too."""
    if keys.value("expert_count", 0):
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
        if keys.value(name, neutral[0]) not in neutral:
            raise keys.refuse(name, f" is not supported; {neutral[0]} is")
    if 0 < keys.value("attention.sliding_window", 0) < context:
        raise keys.refuse("attention.sliding_window", f" is not supported; attention over the whole context of {context} is")
    if keys.file.metadata.get("split.count", 0) > 1:
        count = keys.file.metadata["split.count"]
        raise UnsupportedModel(f"{keys.file.path}: split.count {count}: GGUF files in several parts are not supported")


def _dense(keys: GGUFKeys, architecture: str) -> ModelConfig:
    _refuse_experts(keys)
    return _decoder(keys, architecture)


def _qwen3(keys: GGUFKeys, architecture: str) -> ModelConfig:
    return replace(_dense(keys, architecture), head_norms=True)


def _qwen3_moe(keys: GGUFKeys, architecture: str) -> ModelConfig:
    decoder = _decoder(keys, architecture)
    count, per_token = keys.integer("expert_count"), keys.integer("expert_used_count")
    if per_token > count:
        names = keys.key("expert_used_count"), keys.key("expert_count")
        raise ConfigError(f"{keys.file.path}: {names[0]} ({per_token}) must be at most {names[1]} ({count})")
    experts = ExpertsConfig(
        layers=frozenset(layer for layer in range(decoder.layers) if f"blk.{layer}.ffn_gate_inp.weight" in keys.file.tensors),
        count=count,
        per_token=per_token,
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
