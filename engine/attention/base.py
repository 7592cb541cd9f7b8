"""The interface of an attention backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from engine.base import SequenceChunk


class AttentionPass(ABC):
    """Attention in one forward pass. Rows are the batch's tokens, sequence after sequence."""

    positions: torch.Tensor
    """int64 [rows]: of each token in its sequence."""

    @abstractmethod
    def run(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Writes `key` and `value` [rows, kv_heads, head_dim] into the batch's slots and lets `query` [rows, heads, head_dim], already
        rotated, attend to its sequence up to itself, as far back as the layer's window reaches. Returns [rows, heads, head_dim],
        contiguous."""


class AttentionBackend(ABC):
    """Owns no memory: it reads and writes the slots that each chunk names, which are the caller's until the pass has ended."""

    @abstractmethod
    def plan(self, batch: Sequence[SequenceChunk]) -> AttentionPass:
        """What is the same in all layers is worked out here, once a pass."""
