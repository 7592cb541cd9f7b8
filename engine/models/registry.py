"""Which model families there are. A new one is an entry here, a reader of its configuration and a module with its model. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from engine.gguf_file import GGUFFile
from engine.models.config import ModelConfig
from engine.models.gguf_config import llama_from_gguf
from engine.models.hf_config import HFConfig, llama_from_hf
from springtide.errors import UnsupportedModel

if TYPE_CHECKING:
    from engine.models.base import ModelFamily


@dataclass(frozen=True, slots=True)
class Architecture:
    """`name` is the one in `config.json`, `gguf` the one in a GGUF file, `module` holds the family's code (engine.models.base)."""

    name: str
    model_type: str
    gguf: str
    from_hf: Callable[[HFConfig, str], ModelConfig]
    from_gguf: Callable[[GGUFFile, str], ModelConfig]
    module: str

    def family(self) -> ModelFamily:
        """Imports torch."""
        family: ModelFamily = import_module(self.module).FAMILY
        return family


ARCHITECTURES = (Architecture("LlamaForCausalLM", "llama", "llama", llama_from_hf, llama_from_gguf, "engine.models.llama"),)


def for_name(name: str) -> Architecture:
    """Of a ModelInfo. Raises UnsupportedModel."""
    return _only([a for a in ARCHITECTURES if a.name == name], f"architecture {name!r}", [a.name for a in ARCHITECTURES])


def for_hf(config: HFConfig) -> Architecture:
    """From `architectures`, or `model_type` where there is none. Raises UnsupportedModel."""
    names = config.fields.get("architectures") or []
    if names:
        return _only(
            [a for a in ARCHITECTURES if a.name in names], f"{config.path}: architecture {names[0]!r}", [a.name for a in ARCHITECTURES]
        )
    kind = config.fields.get("model_type")
    return _only(
        [a for a in ARCHITECTURES if a.model_type == kind], f"{config.path}: model_type {kind!r}", [a.model_type for a in ARCHITECTURES]
    )


def for_gguf(file: GGUFFile) -> Architecture:
    """From `general.architecture`. Raises UnsupportedModel."""
    kind = file.architecture
    return _only(
        [a for a in ARCHITECTURES if a.gguf == kind], f"{file.path}: general.architecture {kind!r}", [a.gguf for a in ARCHITECTURES]
    )


def _only(found: list[Architecture], what: str, known: list[str]) -> Architecture:
    if not found:
        raise UnsupportedModel(f"{what} is not supported; supported: {', '.join(known)}")
    return found[0]
