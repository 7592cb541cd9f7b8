"""ModelConfig from the metadata of a GGUF file, refusing by name what the engine would otherwise compute wrongly."""

from __future__ import annotations

from typing import Any

from engine.gguf_file import GGUFFile
from engine.models.config import ModelConfig, RopeConfig
from springtide.errors import ConfigError, UnsupportedModel

ROPE_FREQUENCIES = "rope_freqs.weight"
"""Divisors of the rotary frequencies, one a pair of dimensions: how GGUF writes down the llama3 scaling."""


def llama_from_gguf(file: GGUFFile, architecture: str) -> ModelConfig:
    """Of GGUF architecture `llama`."""

    def integer(name: str) -> int:
        value = file.require(f"llama.{name}")
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{file.path}: the GGUF key 'llama.{name}' must be a positive integer, not {value!r}")
        return value

    def integer_or(name: str, default: int) -> int:
        return integer(name) if f"llama.{name}" in file.metadata else default

    _refuse_unknown(file)
    heads, hidden_size, context = integer("attention.head_count"), integer("embedding_length"), integer("context_length")
    head_dim = integer_or("attention.key_length", hidden_size // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if integer_or(name, head_dim) != head_dim:
            raise UnsupportedModel(f"{file.path}: llama.{name} {integer(name)} is not supported; it must equal the head size, {head_dim}")
    return ModelConfig(
        architecture=architecture,
        layers=integer("block_count"),
        hidden_size=hidden_size,
        intermediate_size=integer("feed_forward_length"),
        heads=heads,
        kv_heads=integer_or("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=_vocab_size(file),
        context_length=context,
        norm_eps=float(file.require("llama.attention.layer_norm_rms_epsilon")),
        rope=_rope(file, context),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        tied_embeddings="output.weight" not in file.tensors,
    )


def _vocab_size(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{file.path}: tensor 'token_embd.weight' is missing; is the model split over several files?")
    return file.tensors["token_embd.weight"].shape[0]


def _rope(file: GGUFFile, context: int) -> RopeConfig:
    def value(name: str, default: Any) -> Any:
        return file.metadata.get(f"llama.rope.{name}", default)

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
            raise UnsupportedModel(f"{file.path}: llama.rope.scaling.type {kind!r} is not supported; none, linear and yarn are")


def _refuse_unknown(file: GGUFFile) -> None:
    for name, what in (("expert_count", "mixture of experts"), ("attention.sliding_window", "a sliding window")):
        if file.metadata.get(f"llama.{name}"):
            raise UnsupportedModel(f"{file.path}: llama.{name} {file.metadata[f'llama.{name}']} ({what}) is not supported")
    if file.metadata.get("split.count", 0) > 1:
        raise UnsupportedModel(f"{file.path}: split.count {file.metadata['split.count']}: GGUF files in several parts are not supported")
