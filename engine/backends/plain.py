"""Everything in plain torch, on every device and in every dtype: the reference for every other backend. Its paged attention runs over the
arena itself or a device's pages.

Slabs are `[2, block_tokens, kv_heads, head_dim]`, so a sequence's blocks, gathered, are its keys as `[context, kv_heads, head_dim]`.
Two ways, each the fastest of those measured on CPUs (scaled_dot_product_attention is half as fast on the machines seen):

- many new tokens of one sequence: tiles of query rows against the context up to the tile's end, heads of a group side by side;
- one new token in each of many sequences: sequences of similar length in one padded batch. Keys are used as
  `[context, kv_heads * head_dim]`, as they lie in the slabs, with each head's query in its KV head's columns and zeros in the others:
  some more arithmetic, but memory is what decode waits for, and no key is moved twice.

A slab's unwritten tail is set to zero when its first token is written: masked positions get weight 0, and 0 times what a former owner may
have left there must not be NaN. It also means that a partial block never carries another request's bytes to another node.

A layer with a window gathers only the blocks that the window reaches into; layers with one window share what is worked out once a pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.backends.base import AttentionBackend, AttentionPass, HeadNorms, Norm, Ops
from engine.batch import Int32Array, SequenceChunk
from engine.device.memory import upload
from engine.layers.linear import GatedLinear, Linear, Product
from engine.layers.rope import Rotation
from engine.model_config import Activation


class PlainOps(Ops):
    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        return Linear(weight, bias)

    def gated(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> Product:
        return GatedLinear(weight, bias, activation)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return F.rms_norm(x.to(norm.scale.dtype), norm.scale.shape, norm.scale, norm.eps).to(x.dtype)

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self.norm(residual.add_(delta), norm)


_TILE_ELEMENTS = 4 << 20
"""Scores of one tile, all heads together."""
_TILE_ROWS = (32, 128)
_GROUP_BYTES = 4 << 20
"""Keys and values gathered for one padded batch: about what stays in the cache until it is used."""
_PADDING = 0.75
"""Sequences shorter than this share of the longest one go into another batch."""


class TorchAttention(AttentionBackend):
    """`arena` is [slots, layers, 2, block_tokens, kv_heads, head_dim]; `windows` says of each layer to how many tokens, itself included, a
    token attends, None standing for all before it."""

    def __init__(self, arena: torch.Tensor, heads: int, windows: Sequence[int | None]) -> None:
        self._arena = arena
        self._heads = heads
        self._windows = windows

    def plan(self, batch: Sequence[SequenceChunk]) -> AttentionPass:
        return TorchAttentionPass(self._arena, self._heads, self._windows, batch)


@dataclass(frozen=True, slots=True)
class _Visible:
    """Of one chunk, whose rows begin at `row`, the blocks that its window reaches into. Positions are counted from their first."""

    row: int
    rows: int
    start: int
    """Position of the first row."""
    slots: Sequence[int] | Int32Array


@dataclass(frozen=True, slots=True)
class _PrefillRows:
    """One sequence's rows [begin, end), at positions `start`, … counted from the first of its `slots` int64 [blocks]."""

    begin: int
    end: int
    start: int
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class _DecodeRows:
    """Sequences with one new token each: `rows` int64 [sequences], `slots` int64 [sequences * blocks] padded with each one's first slot,
    `mask` [sequences, 1, context] (0, or -inf before the window and after the end), `spread` zeros [sequences, heads, kv_heads *
    head_dim]."""

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor
    spread: torch.Tensor


@dataclass(frozen=True, slots=True)
class _WindowWork:
    """What the layers with one window do."""

    prefills: list[_PrefillRows]
    decodes: list[_DecodeRows]
    window: int | None


class TorchAttentionPass(AttentionPass):
    def __init__(self, arena: torch.Tensor, heads: int, windows: Sequence[int | None], batch: Sequence[SequenceChunk]) -> None:
        self._arena = arena
        self._heads = heads
        _, _, _, self._block_tokens, self._kv_heads, self._head_dim = arena.shape
        self._scale = self._head_dim**-0.5
        self._place(batch)
        works = {window: self._work(batch, window) for window in set(windows)}
        self._works = [works[window] for window in windows]

    def run(self, layer: int, qkv: torch.Tensor, rotation: Rotation, norms: HeadNorms | None) -> torch.Tensor:
        positioned, value = qkv[:, : self._heads + self._kv_heads], qkv[:, self._heads + self._kv_heads :]
        if norms is not None:
            norm = PlainOps().norm
            positioned = torch.cat((norm(positioned[:, : self._heads], norms.query), norm(positioned[:, self._heads :], norms.key)), 1)
        rotated = rotation(positioned)
        query, key = rotated[:, : self._heads], rotated[:, self._heads :]
        slabs = self._arena[:, layer]
        for slot, offset in self._tails:
            slabs[slot, :, offset:] = 0
        slabs[:, 0][self._row_slots, self._row_offsets] = key
        slabs[:, 1][self._row_slots, self._row_offsets] = value
        query = query * self._scale
        result = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        work = self._works[layer]
        for prefill in work.prefills:
            self._run_prefill(slabs, prefill, work.window, query[prefill.begin : prefill.end], result[prefill.begin : prefill.end])
        for decode in work.decodes:
            self._run_decode(slabs, decode, query, result)
        return result

    def _run_prefill(
        self, slabs: torch.Tensor, prefill: _PrefillRows, window: int | None, query: torch.Tensor, result: torch.Tensor
    ) -> None:
        """`query` and `result` are [rows, heads, head_dim] of this sequence."""
        rows, kv_heads, head_dim = len(query), self._kv_heads, self._head_dim
        context = prefill.start + rows
        keys = slabs[:, 0].index_select(0, prefill.slots).view(-1, kv_heads, head_dim).permute(1, 2, 0)
        values = slabs[:, 1].index_select(0, prefill.slots).view(-1, kv_heads, head_dim).transpose(0, 1)
        grouped = query.view(rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        target = result.view(rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        tile = min(max(_TILE_ELEMENTS // (self._heads * context) // 32 * 32, _TILE_ROWS[0]), _TILE_ROWS[1], rows)
        later = torch.full((tile, tile), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
        for begin in range(0, rows, tile):
            count = min(tile, rows - begin)
            end = prefill.start + begin + count
            first = 0 if window is None else max(0, end - count + 1 - window)
            scores = torch.bmm(grouped[:, :, begin : begin + count].reshape(kv_heads, -1, head_dim), keys[:, :, first:end])
            by_row = scores.view(kv_heads, -1, count, end - first)
            by_row[..., end - first - count :].add_(later[:count, :count])
            if window is not None:
                # The tile's first row reaches back to `first`, or would further; each row after it one token less far.
                earlier = torch.full((count, count), -torch.inf, dtype=query.dtype, device=query.device)
                by_row[..., :count].add_(earlier.tril(end - count - window - first))
            attended = torch.bmm(torch.softmax(scores, -1), values[:, first:end])
            target[:, :, begin : begin + count] = attended.view(kv_heads, -1, count, head_dim)

    def _run_decode(self, slabs: torch.Tensor, decode: _DecodeRows, query: torch.Tensor, result: torch.Tensor) -> None:
        sequences, width = len(decode.rows), self._kv_heads * self._head_dim
        keys = slabs[:, 0].index_select(0, decode.slots).view(sequences, -1, width)
        values = slabs[:, 1].index_select(0, decode.slots).view(sequences, -1, width)
        self._own_columns(decode.spread).copy_(query[decode.rows].view(sequences, self._kv_heads, -1, self._head_dim))
        weights = torch.softmax(torch.bmm(decode.spread, keys.transpose(1, 2)).add_(decode.mask), -1)
        attended = self._own_columns(torch.bmm(weights, values))
        result[decode.rows] = attended.reshape(sequences, self._heads, self._head_dim)

    def _own_columns(self, spread: torch.Tensor) -> torch.Tensor:
        """Of [sequences, heads, kv_heads * head_dim] the view [sequences, kv_heads, group, head_dim] with each head's own KV head."""
        per_head = spread.view(len(spread), self._kv_heads, -1, self._kv_heads, self._head_dim)
        return per_head.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)

    def _place(self, batch: Sequence[SequenceChunk]) -> None:
        """Where each row's key and value go, and which slabs begin in this pass and stay partial. Raises ValueError."""
        for slot in {slot for chunk in batch for slot in chunk.slots}:
            if not 0 <= slot < len(self._arena):
                raise ValueError(f"slot {slot} is outside the arena of {len(self._arena)} slots")
        size = self._block_tokens
        positions = [position for chunk in batch for position in range(chunk.start, chunk.start + len(chunk.token_ids))]
        slots = [chunk.slots[position // size] for chunk in batch for position in range(chunk.start, chunk.start + len(chunk.token_ids))]
        self.positions, self._row_slots = upload([positions, slots], self._arena.device)
        self._row_offsets = self.positions % size
        self._tails = [
            (chunk.slots[end // size], end % size)
            for chunk in batch
            if (end := chunk.start + len(chunk.token_ids)) % size and chunk.start <= end // size * size
        ]

    def _work(self, batch: Sequence[SequenceChunk], window: int | None) -> _WindowWork:
        begins = _running_sums([len(chunk.token_ids) for chunk in batch])
        visible = [self._visible(chunk, begin, window) for begin, chunk in zip(begins, batch, strict=False)]
        long = [of for of in visible if of.rows > 1]
        slots = upload([of.slots for of in long], self._arena.device) if long else []
        prefills = [_PrefillRows(of.row, of.row + of.rows, of.start, own) for of, own in zip(long, slots, strict=True)]
        groups = self._groups([of for of in visible if of.rows == 1])
        return _WindowWork(prefills, [self._decode_group(group, window) for group in groups], window)

    def _visible(self, chunk: SequenceChunk, row: int, window: int | None) -> _Visible:
        """A sequence may hold more slots than have something in them."""
        size, rows = self._block_tokens, len(chunk.token_ids)
        first = 0 if window is None else max(0, chunk.start + 1 - window) // size
        return _Visible(row, rows, chunk.start - first * size, chunk.slots[first : -(-(chunk.start + rows) // size)])

    def _groups(self, singles: list[_Visible]) -> Iterator[list[_Visible]]:
        """Sequences of similar length together, as many as the cache likes."""
        slab_bytes = self._arena[0, 0].nbytes
        group: list[_Visible] = []
        longest = 0
        for single in sorted(singles, key=lambda single: -len(single.slots)):
            blocks = len(single.slots)
            if group and (blocks < _PADDING * longest or (len(group) + 1) * longest * slab_bytes > _GROUP_BYTES):
                yield group
                group = []
            longest = blocks if not group else longest
            group.append(single)
        if group:
            yield group

    def _decode_group(self, group: list[_Visible], window: int | None) -> _DecodeRows:
        longest = max(len(single.slots) for single in group)
        padded = [slot for single in group for slot in (*single.slots, *[single.slots[0]] * (longest - len(single.slots)))]
        dtype, device = self._arena.dtype, self._arena.device
        rows, slots, ends = upload([[single.row for single in group], padded, [single.start + 1 for single in group]], device)
        ends = ends[:, None, None]
        positions = torch.arange(longest * self._block_tokens, device=device)
        hidden = positions >= ends if window is None else (positions >= ends) | (positions < ends - window)
        return _DecodeRows(
            rows=rows,
            slots=slots,
            mask=torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf),
            spread=torch.zeros(len(group), self._heads, self._kv_heads * self._head_dim, dtype=dtype, device=device),
        )


def _running_sums(counts: Sequence[int]) -> list[int]:
    """Where each of the runs begins, and at last where all end."""
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums
