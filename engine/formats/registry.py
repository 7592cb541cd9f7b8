"""Which model families there are. A new one is an entry here and a reader of its configuration (docs/packages/models.md). No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from engine.formats import gguf_config, hf_families
from engine.formats.gguf_config import GGUFFamily
from engine.formats.gguf_file import GGUFFile
from engine.formats.hf_config import HFConfig
from engine.formats.hf_families import HFFamily
from springtide.errors import UnsupportedModel

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Architecture:
    """`name` and `model_type` are those in `config.json`; `gguf` is the GGUF architecture whose files are of this family, if any are."""

    name: str
    model_type: str
    hf: HFFamily
    gguf: GGUFFamily | None = None


ARCHITECTURES = (
    Architecture("LlamaForCausalLM", "llama", hf_families.LLAMA, gguf_config.LLAMA),
    # Converted to GGUF, Mistral models are `llama`.
    Architecture("MistralForCausalLM", "mistral", hf_families.MISTRAL),
    Architecture("Qwen2ForCausalLM", "qwen2", hf_families.QWEN2, gguf_config.QWEN2),
    Architecture("Qwen3ForCausalLM", "qwen3", hf_families.QWEN3, gguf_config.QWEN3),
    Architecture("Qwen3MoeForCausalLM", "qwen3_moe", hf_families.QWEN3_MOE, gguf_config.QWEN3_MOE),
    Architecture("GemmaForCausalLM", "gemma", hf_families.GEMMA, gguf_config.GEMMA),
)


def for_hf(config: HFConfig) -> Architecture:
    """The architecture by `architectures`, or `model_type` where there is none. Raises UnsupportedModel."""
    names = config.strings("architectures") or []
    if names:
        return _only(
            [a for a in ARCHITECTURES if a.name in names], f"{config.path}: architecture {names[0]!r}", [a.name for a in ARCHITECTURES]
        )
    kind = config.fields.get("model_type")
    return _only(
        [a for a in ARCHITECTURES if a.model_type == kind], f"{config.path}: model_type {kind!r}", [a.model_type for a in ARCHITECTURES]
    )


def for_gguf(file: GGUFFile) -> tuple[Architecture, GGUFFamily]:
    """The architecture by `general.architecture`. Raises UnsupportedModel."""
    kind = file.architecture
    known = [(a, a.gguf) for a in ARCHITECTURES if a.gguf is not None]
    return _only(
        [pair for pair in known if pair[1].name == kind],
        f"{file.path}: general.architecture {kind!r}",
        [gguf.name for _, gguf in known],
    )


def _only(found: list[_Found], what: str, known: list[str]) -> _Found:
    if not found:
        raise UnsupportedModel(f"{what} is not supported; supported: {', '.join(known)}")
    return found[0]
