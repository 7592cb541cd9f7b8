"""The geometry of a Llama-like transformer: what its times follow from."""

from __future__ import annotations

from dataclasses import dataclass

BF16_BYTES = 2
PRODUCTS_PER_LAYER = 4
"""Query, key and value in one; output; gate and up in one; down."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def layer_weights(self) -> int:
        """The weights of the matrix products of one layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.ffn

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights in bf16, the embedding and the LM head each on its own."""
        return BF16_BYTES * (self.layers * self.layer_weights + 2 * self.head_weights)

    @property
    def kv_bytes_per_token(self) -> int:
        return BF16_BYTES * self.layers * 2 * self.kv_heads * self.head_dim

    @property
    def flops_per_pair(self) -> int:
        """Attention of one token to one other: its score and its share of the sum, in every head of every layer."""
        return self.layers * 4 * self.heads * self.head_dim


LLAMA2_70B = ModelShape(layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, head_dim=128, vocab=32000)
LLAMA3_8B = ModelShape(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256)
