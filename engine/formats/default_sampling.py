"""How a model's files recommend to sample it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.formats.gguf_file import GGUFFile
from engine.formats.hf_files import read_json
from springtide.errors import ConfigError
from springtide.protocol.sampling import SamplingParams

DEMO_SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""What SmolLM2's makers recommend; its file says nothing."""
_HF_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def hf_default_sampling(directory: Path) -> dict[str, float]:
    """By the names of SamplingParams' fields, what generation_config.json has of them. Raises ConfigError when a value cannot be."""
    path = directory / "generation_config.json"
    if not path.exists():
        return {}
    config = read_json(path)
    return _checked({name: config[name] for name in _HF_NAMES if config.get(name) is not None}, path)


def gguf_default_sampling(file: GGUFFile) -> dict[str, float]:
    """The same of a GGUF file. Raises ConfigError."""
    return _checked({name: file.number(key) for key, name in _GGUF_KEYS.items() if key in file.metadata}, file.path)


def _checked(values: Mapping[str, Any], source: Path) -> dict[str, float]:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{source}: {name} must be a number, not {value!r}")
    given: dict[str, Any] = {name: max(0, int(value)) if name == "top_k" else float(value) for name, value in values.items()}
    try:
        SamplingParams(**given)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    return given
