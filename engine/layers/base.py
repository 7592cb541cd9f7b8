"""The interface of whole layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.attention.base import AttentionPass, HeadNorms
from engine.linear import Product
from engine.models.rope import Rotation
from engine.ops.base import Norm


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A layer with one feed-forward for all tokens, and all of it."""

    attention_norm: Norm
    qkv: Product
    head_norms: HeadNorms | None
    output: Product
    feed_forward_norm: Norm
    gated: Product
    down: Product


class LayersPass(ABC):
    """One pass over consecutive layers, all of them in turn."""

    @abstractmethod
    def run(self, begin: int, end: int, keys_only: bool = False) -> None:
        """Layers [begin, end), counted from the first of them. `keys_only`: of the last one only the keys and values are wanted, and what
        comes in it is left in the memory of the stream. Fused layers can do it."""

    @abstractmethod
    def finish(self) -> torch.Tensor:
        """[rows, hidden] after the last one, or what came in it where only its keys were wanted, in the memory in which the first one's
        came."""


StartLayers = Callable[[torch.Tensor, Rotation, AttentionPass], LayersPass]
"""From [rows, hidden], which is overwritten."""

FuseLayers = Callable[[Sequence[DenseLayer]], StartLayers | None]
"""None where these layers have something that it cannot do."""
