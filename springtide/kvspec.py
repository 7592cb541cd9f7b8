"""The geometry of a KV cache (docs/architecture.md, section 4)."""

from __future__ import annotations

from dataclasses import dataclass
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
