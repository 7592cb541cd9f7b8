"""What everybody but the engine needs to know of a model: read from its files by `engine.formats.files.describe`, passed on as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from springtide.kvspec import KVDtype, KVSpec


@dataclass(frozen=True, slots=True)
class ModelInfo:
    path: str
    name: str
    architecture: str
    fingerprint: str
    """Changes when weights or configuration do: part of every block key."""
    context_length: int
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def kv_spec(self, dtype: KVDtype, block_tokens: int) -> KVSpec:
        return KVSpec(self.layers, self.kv_heads, self.head_dim, dtype, block_tokens)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> ModelInfo:
        fields = json.loads(path.read_text())
        return cls(**{**fields, "eos_token_ids": tuple(fields["eos_token_ids"])})
