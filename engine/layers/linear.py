"""Matrix products with weights, laid out once for oneDNN where torch can do it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine.model_config import Activation

Product = Callable[[torch.Tensor], torch.Tensor]
"""From [rows, inputs] to [rows, outputs]."""

_PACKED_FOR_ROWS = {torch.bfloat16: 16, torch.float32: 512}
"""The number of input rows that the packed layout is chosen for; measured best over decode (1 to 64 rows) and prefill."""


class Linear:
    """`x @ weight.T + bias` for x [rows, in] and weight [out, in].

    On a CPU torch's own `F.linear` reorders plain weights in every call; packed ones are 2 to 3 times faster on AVX-512 machines. The
    operators are the ones that torch.compile emits for frozen CPU models; where they are missing, plain `F.linear` takes over. Where the
    CPU has no products of bfloat16, such weights are packed in float32, twice the memory: torch's products of bfloat16 are up to 20 times
    slower there.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self._packed = packed_dtype(weight)
        if self._packed is not None:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(self._packed), _PACKED_FOR_ROWS[self._packed])
            self._bias = None if bias is None else bias.to(self._packed)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return F.linear(x, self._weight, self._bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x.to(self._packed), self._weight, self._bias, "none", [], "")
        return product.to(x.dtype)


class GatedLinear:
    """`activation(gate) * up` of gate and up, the two halves of the product with `weight` [2 * inner, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> None:
        self._both = Linear(weight, bias)
        self._activation = _ACTIVATIONS[activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._both(x).chunk(2, -1)
        return self._activation(gate) * up


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[Activation, Product] = {"silu": F.silu, "gelu_tanh": _gelu_tanh}


def packed_dtype(weight: torch.Tensor) -> torch.dtype | None:
    """In which weights like this one are packed on this machine; None where they stay as they are."""
    if weight.device.type != "cpu" or weight.dtype not in _PACKED_FOR_ROWS or not torch.backends.mkldnn.is_available():
        return None
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight") or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return None
    return weight.dtype if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
