"""The operators in plain torch, for every device and dtype: the reference for the others."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.linear import GatedLinear, Linear, Product
from engine.models.config import Activation
from engine.ops.base import Norm, Ops


class PlainOps(Ops):
    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        return Linear(weight, bias)

    def gated(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> Product:
        return GatedLinear(weight, bias, activation)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return F.rms_norm(x.to(norm.scale.dtype), norm.scale.shape, norm.scale, norm.eps).to(x.dtype)

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self.norm(residual.add_(delta), norm)
