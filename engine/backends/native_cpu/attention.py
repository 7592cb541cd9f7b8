"""Paged attention for bfloat16 on a CPU (engine/native/kernels/attention.h), over the arena itself: keys are read where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from engine import _native
from engine.backends.base import AttentionBackend, AttentionPass, HeadNorms, LastRows
from engine.backends.native_cpu.ops import is_scale
from engine.batch import Int32Array, SequenceChunk
from engine.layers.rope import Rotation

LEAST_SPARED = 64
"""Rows: who spares the last layer fewer than so many, or than half as many as it has to compute anyway, gains less than a further pass over
that layer costs."""


class NativeAttention(AttentionBackend):
    """`arena` is [slots, layers, 2, block_tokens, kv_heads, head_dim], or some layers and heads of one with more; `windows` says of each
    layer to how many tokens, itself included, a token attends, None standing for all before it."""

    def __init__(self, arena: torch.Tensor, heads: int, windows: Sequence[int | None]) -> None:
        slots, _, _, block_tokens, kv_heads, head_dim = arena.shape
        assert arena.dtype == torch.bfloat16 and arena.stride()[4:] == (head_dim, 1)
        self._strides = (arena.stride(0), arena.stride(2), arena.stride(3))
        whole = arena.as_strided((slots * arena.stride(0),), (1,), 0)
        self._memory = whole.view(torch.int16).numpy()
        self._geometry = (block_tokens, heads, kv_heads, head_dim)
        self._num_slots = slots
        slabs = [int(arena.storage_offset()) + layer * arena.stride(1) for layer in range(len(windows))]
        self._places = [(slab, window or 0) for slab, window in zip(slabs, windows, strict=True)]

    def plan(self, batch: Sequence[SequenceChunk]) -> AttentionPass:
        ends = accumulate(len(chunk.token_ids) for chunk in batch)
        rows = [row for end, chunk in zip(ends, batch, strict=True) for row in range(end - chunk.num_wanted, end)]
        spared = sum(len(chunk.token_ids) for chunk in batch) - len(rows)
        if rows and spared < max(LEAST_SPARED, len(rows) / 2):
            return self._plan(batch, None)
        return self._plan(batch, LastRows(rows, lambda: self._plan([chunk.wanted() for chunk in batch if chunk.num_wanted], None)))

    def _plan(self, batch: Sequence[SequenceChunk], last: LastRows | None) -> NativePass:
        chunks = [(chunk.start, len(chunk.token_ids), _as_array(chunk.slots)) for chunk in batch]
        plan = _native.Plan(self._memory, self._num_slots, self._strides, *self._geometry, chunks)
        rows, end = sum(count for _, count, _ in chunks), max((start + count for start, count, _ in chunks), default=0)
        return NativePass(plan, rows, end, last, self._geometry, self._places)


def _as_array(slots: Sequence[int] | Int32Array) -> Int32Array:
    """An array is left as it is: the kernels refuse one of anything but int32."""
    return slots if isinstance(slots, np.ndarray) else np.asarray(slots, np.int32)


class NativePass(AttentionPass):
    def __init__(
        self,
        plan: _native.Plan,
        rows: int,
        end: int,
        last: LastRows | None,
        geometry: tuple[int, int, int, int],
        places: list[tuple[int, int]],
    ) -> None:
        """`places`: (slab, window) of each layer, as the kernels take them. All positions are before `end`."""
        _, heads, kv_heads, head_dim = geometry
        self.plan, self.places, self.last, self._end = plan, places, last, end
        self.score_scale = head_dim**-0.5
        self._heads = heads
        self._shape = (rows, heads + 2 * kv_heads, head_dim)
        positions = np.empty(rows, np.int64)
        plan.positions(positions)
        self.positions = torch.from_numpy(positions)

    def angles(self, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, as the kernels take them: they find each row's by its position."""
        cos, sin = rotation.table(self._end)
        head_dim = self._shape[2]
        assert cos.is_contiguous() and sin.is_contiguous() and cos.dtype == sin.dtype == torch.float32
        assert cos.shape == sin.shape and len(cos) >= self._end and cos.shape[1] == head_dim // 2
        return cos, sin

    def check(self, norms: HeadNorms | None, columns: int, attended: int) -> None:
        """Asserts that `norms` fit, and rows of so many elements before and after attention."""
        _, heads, head_dim = self._shape
        assert (columns, attended) == (heads * head_dim, self._heads * head_dim)
        if norms is not None:
            assert norms.query.eps == norms.key.eps and all(is_scale(norm.scale, head_dim) for norm in (norms.query, norms.key))

    def run(self, layer: int, qkv: torch.Tensor, rotation: Rotation, norms: HeadNorms | None) -> torch.Tensor:
        rows, _, head_dim = self._shape
        assert qkv.shape == self._shape and qkv.is_contiguous() and qkv.dtype == torch.bfloat16
        out = qkv.new_empty(rows, self._heads, head_dim)
        self.check(norms, qkv[0].numel(), out[0].numel())
        scales = (norms.query.scale.data_ptr(), norms.key.scale.data_ptr(), norms.query.eps) if norms is not None else (0, 0, 0.0)
        slab, window = self.places[layer]
        cos, sin = self.angles(rotation)
        self.plan.run(slab, qkv.data_ptr(), out.data_ptr(), cos.data_ptr(), sin.data_ptr(), *scales, self.score_scale, window)
        return out
