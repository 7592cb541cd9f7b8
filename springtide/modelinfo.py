"""What everybody but the engine needs to know of a model, and the geometry of its KV cache (docs/architecture.md, section 4): read from its
files by `engine.formats.files.describe`, passed on as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

KVDtype = Literal["bfloat16", "float16", "float32"]
ITEM_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class KVSpec:
    """A slab is `[2, block_tokens, kv_heads, head_dim]` (K then V), a slot its layers' slabs in order."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: KVDtype
    block_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"KVSpec.{name} must be at least 1, not {getattr(self, name)}")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"KVSpec.dtype must be one of {', '.join(ITEM_BYTES)}, not {self.dtype!r}")

    @property
    def bytes_per_slab(self) -> int:
        return 2 * self.block_tokens * self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def bytes_per_slot(self) -> int:
        return self.layers * self.bytes_per_slab

    @property
    def bytes_per_token(self) -> int:
        return self.bytes_per_slot // self.block_tokens


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
    default_sampling: Mapping[str, float] = field(default_factory=dict, hash=False)
    """How its files recommend to sample it: SamplingParams' fields by name."""

    def kv_spec(self, dtype: KVDtype, block_tokens: int) -> KVSpec:
        return KVSpec(self.layers, self.kv_heads, self.head_dim, dtype, block_tokens)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> ModelInfo:
        fields = json.loads(path.read_text())
        return cls(**{**fields, "eos_token_ids": tuple(fields["eos_token_ids"])})
