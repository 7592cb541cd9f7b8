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
    operators are the ones that torch.compile emits for frozen CPU models; where they are missing, plain `F.linear` takes over.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = bias
        self._packed = weight.device.type == "cpu" and can_pack(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS[weight.dtype]) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return result
        return F.linear(x, self._weight, self._bias)


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


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch and this CPU have the packed product in `dtype`."""
    if not torch.backends.mkldnn.is_available() or dtype not in _PACKED_FOR_ROWS:
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight") or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
