"""The interface of what a layer is made of beside attention: matrix products and norms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from engine.linear import Product
from engine.models.config import Activation


@dataclass(frozen=True, slots=True)
class Norm:
    """A root mean square norm (Zhang and Sennrich, arXiv 1910.07467) over the last dimension: `scale` [size] in the dtype that it is
    computed in, the input's own or float32."""

    scale: torch.Tensor
    eps: float


class Ops(ABC):
    """Rows are tokens. Results have the dtype of the inputs. Weights are laid out once, when a model is loaded."""

    @abstractmethod
    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """`x @ weight.T + bias` with `weight` [outputs, inputs]."""

    @abstractmethod
    def gated(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> Product:
        """`activation(gate) * up`, gate and up being the two halves of the product with `weight` [2 * outputs, inputs]."""

    def prepared(self, norm: Norm) -> Norm:
        """As `norm` and `add_norm` want it."""
        return norm

    @abstractmethod
    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """[rows, size] to the same, anew."""

    @abstractmethod
    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Adds `delta` to `residual`, both [rows, size], in place; returns the norm of the sum."""
