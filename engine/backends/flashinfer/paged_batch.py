"""What kernels over paged caches want to know of a batch, as flat arrays (FlashInfer's page table: Ye et al., arXiv 2501.01005)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.batch import Int32Array, SequenceChunk

Int64Array = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Sequence i has the batch's rows [row_begins[i], row_begins[i + 1]), and its keys, new ones included, in the pages
    [page_begins[i], page_begins[i + 1]) of `pages`, of which the last one holds `last_page_tokens[i]`."""

    row_begins: Int32Array
    page_begins: Int32Array
    pages: Int32Array
    last_page_tokens: Int32Array
    positions: Int64Array
    """[rows]: of each token in its sequence."""
    key_rows: Int64Array
    """[rows]: where each token's key goes, in a layer's pages seen as [pages * 2 * block_tokens, kv_heads, head_dim]. Its value goes
    `block_tokens` further on."""
    begun_pages: Int64Array
    """Pages that begin with this batch and are not filled by it."""


def paged_batch(batch: Sequence[SequenceChunk], block_tokens: int, num_pages: int) -> PagedBatch:
    """What kernels want to know of a batch whose slots are pages. Raises ValueError when one is not below `num_pages`."""
    counts = np.array([len(chunk.token_ids) for chunk in batch], np.int64)
    starts = np.array([chunk.start for chunk in batch], np.int64)
    ends = starts + counts
    blocks = -(-ends // block_tokens)
    held = zip(batch, blocks.tolist(), strict=True)
    pages = np.concatenate([np.asarray(chunk.slots[:count], np.int32) for chunk, count in held])
    if pages.min() < 0 or pages.max() >= num_pages:
        raise ValueError(f"pages {pages.min()} to {pages.max()} are not all among the {num_pages} that there are")
    row_begins, page_begins = _running_sums(counts), _running_sums(blocks)
    sequence = np.repeat(np.arange(len(batch)), counts)
    positions = np.arange(row_begins[-1]) - row_begins[sequence] + starts[sequence]
    row_pages = pages[page_begins[sequence] + positions // block_tokens].astype(np.int64)
    last_block_begins = (blocks - 1) * block_tokens
    begun = (starts <= last_block_begins) & (ends % block_tokens > 0)
    return PagedBatch(
        row_begins=row_begins,
        page_begins=page_begins,
        pages=pages,
        last_page_tokens=(ends - last_block_begins).astype(np.int32),
        positions=positions,
        key_rows=row_pages * 2 * block_tokens + positions % block_tokens,
        begun_pages=pages[page_begins[1:] - 1][begun].astype(np.int64),
    )


def _running_sums(counts: Int64Array) -> Int32Array:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
