"""Layers for bfloat16 on a CPU (engine/native/layers.c): what the operators and the attention of this backend do one by one, without
the way back to Python between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from engine import _native
from engine.backends.base import AttentionPass, DenseLayer, LayersPass, Norm, StartLayers
from engine.backends.native_cpu.attention import NativePass
from engine.backends.native_cpu.ops import NativeProduct, is_scale
from engine.layers.rope import Rotation


def fuse(layers: Sequence[DenseLayer]) -> StartLayers | None:
    """What computes these layers natively; None where a product is left to torch."""
    products = [[layer.qkv, layer.output, layer.gated, layer.down] for layer in layers]
    native = [[product for product in of_layer if isinstance(product, NativeProduct)] for of_layer in products]
    if any(len(of_layer) < 4 for of_layer in native):
        return None
    return NativeLayers(layers, native).start


class NativeLayers:
    def __init__(self, layers: Sequence[DenseLayer], products: Sequence[Sequence[NativeProduct]]) -> None:
        """`products` are those of each layer, in their order."""
        self._kept = layers
        """They are used by address."""
        qkv, output, gated, down = products[0]
        self._columns = {"delta": down.outputs, "x": down.outputs, "qkv": qkv.outputs, "attended": output.inputs, "inner": gated.outputs}
        assert qkv.inputs == gated.inputs == output.outputs == down.outputs and down.inputs == gated.outputs
        shapes = [[(product.inputs, product.outputs) for product in of_layer] for of_layer in products]
        assert all(shape == shapes[0] for shape in shapes)
        self._layers = _native.Layers(down.outputs, [_weights(*of_layer) for of_layer in zip(layers, products, strict=True)])

    def start(self, stream: torch.Tensor, rotation: Rotation, attention: AttentionPass) -> LayersPass:
        assert isinstance(attention, NativePass), "layers and attention are of one backend"
        assert stream.is_contiguous() and stream.dtype == torch.bfloat16 and stream.shape[1] == self._columns["x"]
        attention.check(self._kept[0].head_norms, self._columns["qkv"], self._columns["attended"])
        return _NativeLayersPass(self._layers, stream, list(self._columns.values()), rotation, attention)


def _weights(layer: DenseLayer, products: Sequence[NativeProduct]) -> _native.Weights:
    qkv, output, gated, down = (product.addresses for product in products)
    size, norms = products[0].inputs, layer.head_norms
    query, key = (_norm(norms.query), _norm(norms.key)) if norms is not None else ((0, 0.0), (0, 0.0))
    assert is_scale(layer.attention_norm.scale, size) and is_scale(layer.feed_forward_norm.scale, size)
    return _norm(layer.attention_norm), qkv, query, key, output, _norm(layer.feed_forward_norm), gated, down


def _norm(norm: Norm) -> tuple[int, float]:
    return norm.scale.data_ptr(), norm.eps


class _NativeLayersPass(LayersPass):
    def __init__(
        self, layers: _native.Layers, stream: torch.Tensor, columns: Sequence[int], rotation: Rotation, attention: NativePass
    ) -> None:
        """`columns` of the buffers beside the stream."""
        self._layers, self._stream, self._attention = layers, stream, attention
        rows = len(stream)
        self._buffers, self._angles = stream.new_empty(rows * sum(columns)), attention.angles(rotation)
        begins = [self._buffers.data_ptr() + 2 * rows * before for before in accumulate(columns[:-1], initial=0)]
        self._memory = stream.data_ptr(), *begins, *(angles.data_ptr() for angles in self._angles)
        self._pending = False
        """A layer was run: unless it is the last of all, what it adds to the stream is in a buffer yet."""

    def run(self, begin: int, end: int, keys_only: bool = False) -> None:
        places, plan = self._attention.places[begin:end], self._attention.plan
        self._layers.run(begin, places, plan, len(self._stream), self._pending, self._memory, self._attention.score_scale, keys_only)
        self._pending = True

    def finish(self) -> torch.Tensor:
        return self._stream
