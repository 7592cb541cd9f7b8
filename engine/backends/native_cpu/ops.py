"""The operators for bfloat16 on a CPU (engine/native)."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine import _native
from engine.backends.base import Norm, Ops
from engine.layers.linear import GatedLinear, Linear, Product
from engine.model_config import Activation

_PANEL = 64
_LINE, _HUGE_PAGE, _PIECE = 32, 1 << 20, 16 << 20
"""In elements: of 64 bytes, of 2 MiB, and what is taken from the system at once."""
_PLAIN = 0
_GATED: dict[Activation, int] = {"silu": 1, "gelu_tanh": 2}


class NativeOps(Ops):
    """Products of an odd number of inputs are left to torch. Weights lie one after another, in the order in which they are read."""

    def __init__(self) -> None:
        self._memory = HugePages()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        return NativeProduct(weight, bias, len(weight), _PLAIN, self._memory) if weight.shape[1] % 2 == 0 else Linear(weight, bias)

    def gated(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> Product:
        if weight.shape[1] % 2:
            return GatedLinear(weight, bias, activation)
        return NativeProduct(weight, bias, len(weight) // 2, _GATED[activation], self._memory)

    def prepared(self, norm: Norm) -> Norm:
        """Scales in float32."""
        return replace(norm, scale=norm.scale.float())

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return _norm(x, 0, norm)

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor, norm: Norm) -> torch.Tensor:
        assert delta.shape == residual.shape and delta.is_contiguous() and delta.dtype == residual.dtype
        return _norm(residual, delta.data_ptr(), norm)


class HugePages:
    """Memory that is read from end to end at every pass: in large pages, of which the processor knows where all of them are."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.bfloat16)

    def take(self, rows: int, columns: int) -> torch.Tensor:
        """bfloat16, not initialised, at the beginning of a cache line."""
        size = -(-rows * columns // _LINE) * _LINE
        if size > len(self._left):
            self._left = _new_pages(max(size, _PIECE))
        taken, self._left = self._left[:size], self._left[size:]
        return taken[: rows * columns].view(rows, columns)


def _new_pages(size: int) -> torch.Tensor:
    """What is never written to takes no memory."""
    memory = torch.empty(size + _HUGE_PAGE, dtype=torch.bfloat16)
    begin = -memory.data_ptr() // 2 % _HUGE_PAGE
    memory = memory[begin : begin + size]
    _native.prefer_huge_pages(memory.data_ptr(), size * memory.element_size())
    return memory


class NativeProduct:
    """See engine/native/kernels/product.h."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, outputs: int, kind: int, memory: HugePages) -> None:
        self.outputs, self.inputs, self._kind = outputs, weight.shape[1], kind
        weight = weight.contiguous()
        # A gated product's weight has two rows for each output.
        self._packed = memory.take(-(-len(weight) // _PANEL) * _PANEL, self.inputs)
        assert weight.dtype == torch.bfloat16 and self._packed.data_ptr() % 64 == 0
        _native.pack(weight.data_ptr(), self._packed.data_ptr(), outputs, self.inputs, kind != _PLAIN)
        self._bias = None if bias is None else _columns(bias.float(), kind)

    @property
    def addresses(self) -> tuple[int, int, int, int, int]:
        """(packed, bias, outputs, inputs, kind), as the kernels take them."""
        return self._packed.data_ptr(), 0 if self._bias is None else self._bias.data_ptr(), self.outputs, self.inputs, self._kind

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous() and x.dtype == torch.bfloat16 and x.shape[1] == self.inputs
        out = x.new_empty(len(x), self.outputs)
        _native.product(x.data_ptr(), out.data_ptr(), len(x), *self.addresses)
        return out


def _columns(bias: torch.Tensor, kind: int) -> torch.Tensor:
    """In the order of the panels' columns."""
    if kind == _PLAIN:
        return torch.nn.functional.pad(bias, (0, -len(bias) % _PANEL))
    half = _PANEL // 2
    gates, others = (torch.nn.functional.pad(part, (0, -len(part) % half)).view(-1, half) for part in bias.chunk(2))
    return torch.cat((gates, others), 1).flatten()


def _norm(x: torch.Tensor, added: int, norm: Norm) -> torch.Tensor:
    rows, size = x.shape
    assert x.is_contiguous() and x.dtype == torch.bfloat16 and is_scale(norm.scale, size)
    out = torch.empty_like(x)
    _native.norm(x.data_ptr(), added, norm.scale.data_ptr(), norm.eps, out.data_ptr(), rows, size)
    return out


def is_scale(scale: torch.Tensor, size: int) -> bool:
    """Whether a norm's scale is as the kernels take them."""
    return scale.shape == (size,) and scale.dtype == torch.float32 and scale.is_contiguous()
