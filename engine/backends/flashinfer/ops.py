"""The operators on CUDA: torch's matrix products, FlashInfer's kernels for what is between them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from engine.backends.base import Norm
from engine.backends.plain import PlainOps
from engine.layers.linear import Product
from engine.model_config import Activation

_GATED: dict[Activation, str] = {"silu": "silu_and_mul", "gelu_tanh": "gelu_tanh_and_mul"}
_TRIAL_WIDTH = 256


class FlashInferOps(PlainOps):
    """Norms that are computed in float32, beside an input in bfloat16, are left to torch."""

    def __init__(self, library: Any) -> None:
        """`library` is the module `flashinfer`."""
        self._library = library

    def gated(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> Product:
        gate = getattr(self._library, _GATED[activation])

        def product(x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = gate(F.linear(x, weight, bias))
            return result

        return product

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if norm.scale.dtype != x.dtype:
            return super().norm(x, norm)
        result: torch.Tensor = self._library.rmsnorm(x, norm.scale, norm.eps)
        return result

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor, norm: Norm) -> torch.Tensor:
        """`delta` is overwritten with the result."""
        if norm.scale.dtype != residual.dtype:
            return super().add_norm(residual, delta, norm)
        self._library.fused_add_rmsnorm(delta, residual, norm.scale, norm.eps)
        return delta


def try_out(library: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Tries the operators as engine.backends.flashinfer.attention.try_out does the attention."""
    x, weight = torch.zeros(2, _TRIAL_WIDTH, dtype=dtype, device=device), torch.ones(_TRIAL_WIDTH, dtype=dtype, device=device)
    library.rmsnorm(x, weight, 1e-6)
    library.fused_add_rmsnorm(x, x.clone(), weight, 1e-6)
    for gate in _GATED.values():
        getattr(library, gate)(x)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
