"""Which tokens end an output: those that the files name and, for chat models, every end-of-turn token of their template. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.formats.gguf_file import GGUFFile
from engine.formats.hf_files import read_chat_template, read_json
from springtide.errors import ConfigError

_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>", "<|endofturn|>", "<EOT>")
_GGUF_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def hf_end_tokens(directory: Path, vocab_size: int) -> set[int]:
    """The end tokens by generation_config.json, config.json and the tokenizer. Raises ConfigError for an id outside the vocabulary."""
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (directory / name).exists():
            ends |= _ids(read_json(directory / name).get("eos_token_id"), directory / name)
    for end in ends:
        if not 0 <= end < vocab_size:
            raise ConfigError(f"{directory}: eos_token_id {end} is outside the vocabulary of {vocab_size}")
    added = {entry["content"]: entry["id"] for entry in read_json(directory / "tokenizer.json").get("added_tokens", [])}
    tokenizer_config = directory / "tokenizer_config.json"
    eos = read_json(tokenizer_config).get("eos_token") if tokenizer_config.exists() else None
    eos = eos.get("content") if isinstance(eos, Mapping) else eos
    template = read_chat_template(directory) or ""
    named = {added[token] for token in (eos, *_of_template(template)) if token in added}
    # A tokenizer may have tokens that the model has not: these are never drawn.
    return ends | {token_id for token_id in named if token_id < vocab_size}


def gguf_end_tokens(file: GGUFFile, vocab_size: int) -> set[int]:
    """Raises ConfigError for an id outside the vocabulary."""
    keys = [key for name in _GGUF_KEYS if (key := f"tokenizer.ggml.{name}") in file.metadata]
    ends = {file.integer(key, least=0): key for key in keys}
    for end, key in ends.items():
        if end >= vocab_size:
            raise ConfigError(f"{file.path}: {key} {end} is outside the vocabulary of {vocab_size}")
    named = _of_template(file.text("tokenizer.chat_template", ""))
    tokens = file.texts("tokenizer.ggml.tokens")
    return set(ends) | {tokens.index(token) for token in named if token in tokens}


def _of_template(template: str) -> list[str]:
    return [token for token in _END_OF_TURN if token in template]


def _ids(value: Any, source: Path) -> set[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) for item in values):
        raise ConfigError(f"{source}: eos_token_id must be an integer or a list of integers, not {value!r}")
    return set(values)
