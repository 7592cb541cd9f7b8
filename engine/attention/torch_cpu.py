"""Paged attention in plain torch on a CPU, over the arena itself. The reference for every other backend.

Slabs are `[2, block_tokens, kv_heads, head_dim]`, so a sequence's blocks, gathered, are its keys as `[context, kv_heads, head_dim]`.
Two ways, each the fastest of those measured (scaled_dot_product_attention is half as fast on the machines seen):

- many new tokens of one sequence: tiles of query rows against the context up to the tile's end, heads of a group side by side;
- one new token in each of many sequences: sequences of similar length in one padded batch. Keys are used as
  `[context, kv_heads * head_dim]`, as they lie in the slabs, with each head's query in its KV head's columns and zeros in the others:
  some more arithmetic, but memory is what decode waits for, and no key is moved twice.

A slab's unwritten tail is set to zero when its first token is written: masked positions get weight 0, and 0 times what a former owner may
have left there must not be NaN. It also means that a partial block never carries another request's bytes to another node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.attention.base import AttentionBackend, AttentionPass
from engine.base import SequenceChunk

_TILE_ELEMENTS = 4 << 20
"""Scores of one tile, all heads together."""
_TILE_ROWS = (32, 128)
_GROUP_BYTES = 4 << 20
"""Keys and values gathered for one padded batch: about what stays in the cache until it is used."""
_PADDING = 0.75
"""Sequences shorter than this share of the longest one go into another batch."""


class TorchAttention(AttentionBackend):
    """`arena` is [slots, layers, 2, block_tokens, kv_heads, head_dim]."""

    def __init__(self, arena: torch.Tensor, heads: int) -> None:
        self._arena = arena
        self._heads = heads

    def plan(self, batch: Sequence[SequenceChunk]) -> AttentionPass:
        return TorchAttentionPass(self._arena, self._heads, batch)


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence's rows [begin, end), at positions `start`, …; `slots` int64 [blocks]."""

    begin: int
    end: int
    start: int
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Decode:
    """Sequences with one new token each: `rows` int64 [sequences], `slots` int64 [sequences * blocks] padded with each one's first slot,
    `mask` [sequences, 1, context] (0, or -inf after the end), `spread` zeros [sequences, heads, kv_heads * head_dim]."""

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor
    spread: torch.Tensor


class TorchAttentionPass(AttentionPass):
    def __init__(self, arena: torch.Tensor, heads: int, batch: Sequence[SequenceChunk]) -> None:
        self._arena = arena
        self._heads = heads
        _, _, _, self._block_tokens, self._kv_heads, self._head_dim = arena.shape
        self._scale = self._head_dim**-0.5
        self._place(batch)
        begins = _running_sums([len(chunk.token_ids) for chunk in batch])
        self._prefills = [
            _Prefill(begin, begin + len(chunk.token_ids), chunk.start, torch.tensor(self._slots_of(chunk)))
            for begin, chunk in zip(begins, batch, strict=False)
            if len(chunk.token_ids) > 1
        ]
        singles = [(begin, chunk) for begin, chunk in zip(begins, batch, strict=False) if len(chunk.token_ids) == 1]
        self._decodes = [self._decode_group(group) for group in self._groups(singles)]

    def run(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        slabs = self._arena[:, layer]
        for slot, offset in self._tails:
            slabs[slot, :, offset:] = 0
        slabs[:, 0][self._row_slots, self._row_offsets] = key
        slabs[:, 1][self._row_slots, self._row_offsets] = value
        query = query * self._scale
        result = torch.empty(query.shape, dtype=query.dtype)
        for prefill in self._prefills:
            self._run_prefill(slabs, prefill, query[prefill.begin : prefill.end], result[prefill.begin : prefill.end])
        for decode in self._decodes:
            self._run_decode(slabs, decode, query, result)
        return result

    def _run_prefill(self, slabs: torch.Tensor, prefill: _Prefill, query: torch.Tensor, result: torch.Tensor) -> None:
        """`query` and `result` are [rows, heads, head_dim] of this sequence."""
        rows, kv_heads, head_dim = len(query), self._kv_heads, self._head_dim
        context = prefill.start + rows
        keys = slabs[:, 0].index_select(0, prefill.slots).view(-1, kv_heads, head_dim).permute(1, 2, 0)
        values = slabs[:, 1].index_select(0, prefill.slots).view(-1, kv_heads, head_dim).transpose(0, 1)
        grouped = query.view(rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        target = result.view(rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        tile = min(max(_TILE_ELEMENTS // (self._heads * context) // 32 * 32, _TILE_ROWS[0]), _TILE_ROWS[1], rows)
        later = torch.full((tile, tile), -torch.inf, dtype=query.dtype).triu(1)
        for begin in range(0, rows, tile):
            count = min(tile, rows - begin)
            end = prefill.start + begin + count
            scores = torch.bmm(grouped[:, :, begin : begin + count].reshape(kv_heads, -1, head_dim), keys[:, :, :end])
            scores.view(kv_heads, -1, count, end)[..., end - count :].add_(later[:count, :count])
            attended = torch.bmm(torch.softmax(scores, -1), values[:, :end])
            target[:, :, begin : begin + count] = attended.view(kv_heads, -1, count, head_dim)

    def _run_decode(self, slabs: torch.Tensor, decode: _Decode, query: torch.Tensor, result: torch.Tensor) -> None:
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
        """Where each row's key and value go, and which slabs begin in this pass and stay partial."""
        size = self._block_tokens
        positions = [position for chunk in batch for position in range(chunk.start, chunk.start + len(chunk.token_ids))]
        slots = [chunk.slots[position // size] for chunk in batch for position in range(chunk.start, chunk.start + len(chunk.token_ids))]
        self.positions = torch.tensor(positions)
        self._row_slots = torch.tensor(slots)
        self._row_offsets = self.positions % size
        self._tails = [
            (chunk.slots[end // size], end % size)
            for chunk in batch
            if (end := chunk.start + len(chunk.token_ids)) % size and chunk.start <= end // size * size
        ]

    def _slots_of(self, chunk: SequenceChunk) -> Sequence[int]:
        """Those with something in them; a sequence may hold more."""
        return chunk.slots[: -(-(chunk.start + len(chunk.token_ids)) // self._block_tokens)]

    def _groups(self, singles: list[tuple[int, SequenceChunk]]) -> Iterator[list[tuple[int, SequenceChunk]]]:
        """Sequences of similar length together, as many as the cache likes."""
        slab_bytes = self._arena[0, 0].nbytes
        group: list[tuple[int, SequenceChunk]] = []
        longest = 0
        for row, chunk in sorted(singles, key=lambda single: -single[1].start):
            blocks = chunk.start // self._block_tokens + 1
            if group and (blocks < _PADDING * longest or (len(group) + 1) * longest * slab_bytes > _GROUP_BYTES):
                yield group
                group = []
            longest = blocks if not group else longest
            group.append((row, chunk))
        if group:
            yield group

    def _decode_group(self, group: list[tuple[int, SequenceChunk]]) -> _Decode:
        slots = [self._slots_of(chunk) for _, chunk in group]
        longest = max(len(own) for own in slots)
        padded = [slot for own in slots for slot in (*own, *[own[0]] * (longest - len(own)))]
        ends = torch.tensor([chunk.start + 1 for _, chunk in group])
        beyond = torch.arange(longest * self._block_tokens) >= ends[:, None, None]
        dtype = self._arena.dtype
        return _Decode(
            rows=torch.tensor([row for row, _ in group]),
            slots=torch.tensor(padded),
            mask=torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, -torch.inf),
            spread=torch.zeros(len(group), self._heads, self._kv_heads * self._head_dim, dtype=dtype),
        )


def _running_sums(counts: Sequence[int]) -> list[int]:
    """Where each of the runs begins, and at last where all end."""
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums
