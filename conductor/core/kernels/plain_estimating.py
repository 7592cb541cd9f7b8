"""Columns of estimates from columns of instances, with numpy: lines 4 to 20 of Algorithm 1 (arXiv 2407.00079, section 6).

`conductor._native` does the same row by row in C, to the same digit, in a tenth of the time for few instances.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from conductor.core.types.estimates import FETCH, RECOMPUTE, Floats, Ints
from springtide.chunking import EPSILON, LEAST_PART, MOST_FIXED, ROUND_FROM, ROUND_TO


class Asked(NamedTuple):
    """What a prompt's estimates depend on beside the instances."""

    now: float
    num_tokens: int
    block_tokens: int
    chunk_tokens: int
    chunk_ms: float
    """As of Chunking, 0 for None."""
    most_reused: int
    """Blocks: the last token is always computed."""
    best: int
    """Blocks of the longest match, at most `most_reused`."""
    source: int
    """Number of the node that would be fetched from; -1 for none."""
    threshold: float
    """`kvcache_balancing_threshold`"""
    bytes_per_block: int
    assumed_bytes_per_s: float
    """Of links that were not measured."""


class _Chunks:
    """`Chunking`, of many instances at once: columns for its numbers."""

    def __init__(
        self, fixed_ms: Floats, per_token_ms: Floats, per_pair_ms: Floats, slowest_share: Floats, chunk_tokens: int, chunk_ms: float
    ) -> None:
        self._fixed_ms, self._per_token_ms, self._per_pair_ms, self._slowest_share = fixed_ms, per_token_ms, per_pair_ms, slowest_share
        self._chunk_tokens, self._least_tokens = chunk_tokens, max(1, chunk_tokens // LEAST_PART)
        by_default = np.maximum(self._own_ms(chunk_tokens, 0), (1 / MOST_FIXED - 1) * fixed_ms)
        self._budget_ms: Floats = chunk_ms - fixed_ms if chunk_ms else by_default

    def prompt_ms(self, new: Ints | int, cached: Ints | int) -> Floats:
        own_ms = self._own_ms(new, cached)
        occupied_ms = self._slowest_share * (own_ms + self._passes(new, own_ms) * self._fixed_ms)
        first = np.minimum(new, self._first_chunk(cached))
        first_ms = self._fixed_ms + self._per_token_ms * first + self._per_pair_ms * (first * (cached + first / 2))
        predicted: Floats = occupied_ms + (1.0 - self._slowest_share) * first_ms
        return predicted

    def _own_ms(self, new: Ints | int, cached: Ints | int) -> Floats:
        own: Floats = self._per_token_ms * new + self._per_pair_ms * (new * (cached + new / 2))
        return own

    def _passes(self, new: Ints | int, own_ms: Floats) -> Floats:
        at_least, at_most = -(-new // self._chunk_tokens), -(-new // self._least_tokens)
        budget_ms = self._budget_ms
        turns = np.divide(own_ms, budget_ms, out=np.full(len(own_ms), np.inf), where=budget_ms > 0)
        passes: Floats = np.maximum(at_least, np.ceil(np.minimum(turns - EPSILON, at_most)))
        return passes

    def _first_chunk(self, cached: Ints | int) -> Floats:
        """`Chunking.next_chunk` of a prompt that has the pass to itself."""
        linear = self._per_token_ms + self._per_pair_ms * cached
        divisor = linear + np.sqrt(linear * linear + 2 * self._per_pair_ms * np.maximum(self._budget_ms, 0.0))
        most = np.divide(2 * self._budget_ms, divisor, out=np.full(len(divisor), np.inf), where=divisor > 0) + EPSILON
        fitting = np.where(self._budget_ms > 0, np.floor(np.minimum(most, self._chunk_tokens)), 0.0)
        rounded = np.where((fitting >= ROUND_FROM) & (fitting < self._chunk_tokens), fitting - fitting % ROUND_TO, fitting)
        first: Floats = np.minimum(self._chunk_tokens, np.maximum(rounded, self._least_tokens))
        return first


def prefill(
    table: Floats,
    bits: Ints,
    held: Ints,
    in_dram: Ints | None,
    nodes: Ints,
    leaving: Ints,
    arriving: Ints,
    rates: Floats | None,
    floats: Floats,
    ints: Ints,
    asked: Asked,
) -> None:
    """Fills `floats` [5, instances] with queue_ms, transfer_ms, prefill_ms, ttft_ms and saved_ms, and `ints` [3, instances] with
    local_blocks, slots_total and branch, as PrefillEstimate explains them.

    `table` [9, instances] is that of PrefillColumns, `bits` and `nodes` [instances] are where the instance's store is in the columns of the
    index and the links: `held` and `in_dram` [bits] are the blocks that each store holds in all and in DRAM (None: the same), `leaving` and
    `arriving` [nodes] the transfers under way, `rates` [nodes] the measured bytes a second from the source (NaN or None: not measured).

    The paper always fetches when the threshold says so; here, what is computed sooner is computed.
    """
    queued_ms, reported_at, placed_ms, fixed_ms, per_token_ms, per_pair_ms, slowest_share, ssd_read_ms, slots_total = table

    chunks = _Chunks(fixed_ms, per_token_ms, per_pair_ms, slowest_share, asked.chunk_tokens, asked.chunk_ms)

    def compute_ms(blocks: Ints | int) -> Floats:
        cached = blocks * asked.block_tokens
        return chunks.prompt_ms(asked.num_tokens - cached, cached)

    local = np.minimum(held[bits], asked.most_reused)
    computing_ms, read_ms = compute_ms(local), np.zeros(len(local))
    if in_dram is not None:
        # What lies on the instance's SSD is read where that is sooner than computing it.
        at_once = np.minimum(in_dram[bits], asked.most_reused)
        read_ms, without_ms = (local - at_once) * ssd_read_ms, compute_ms(at_once)
        slower = (read_ms > 0) & (read_ms + computing_ms >= without_ms)
        local, computing_ms = np.where(slower, at_once, local), np.where(slower, without_ms, computing_ms)
        read_ms = np.where(slower, 0.0, read_ms)
    saved_ms, transfer_ms, branch = np.zeros(len(local)), read_ms, np.zeros(len(local), np.int64)
    if asked.source >= 0:
        worth = (nodes != asked.source) & (asked.best > local) & (asked.best >= asked.threshold * local)
        sharers = 1 + np.maximum(leaving[asked.source], arriving[nodes])
        measured = np.full(len(local), np.nan) if rates is None else rates[nodes]
        rate = np.where(np.isnan(measured), asked.assumed_bytes_per_s, measured)
        fetch_ms = 1000.0 * ((asked.best - local) * asked.bytes_per_block) * sharers / rate
        rest_ms = compute_ms(asked.best)
        fetches = worth & (fetch_ms + rest_ms < computing_ms)
        branch = np.where(fetches, FETCH, RECOMPUTE * worth)
        saved_ms = np.where(fetches, computing_ms - rest_ms, 0.0)
        transfer_ms = np.where(fetches, read_ms + fetch_ms, read_ms)
        computing_ms = np.where(fetches, rest_ms, computing_ms)
    left_ms = queued_ms - 1000.0 * (asked.now - reported_at)
    queue_ms = np.where(left_ms > 0, left_ms, 0.0) + placed_ms
    floats[:] = queue_ms, transfer_ms, computing_ms, queue_ms + transfer_ms + computing_ms, saved_ms
    ints[:] = local, slots_total, branch


def decode(table: Floats, bits: Ints, held: Ints, floats: Floats, ints: Ints, more_tokens: int) -> None:
    """Fills `floats` [1, instances] with tbt_ms and `ints` [5, instances] with prefix_blocks, batch, slots_free, slots_total and max_batch,
    as DecodeEstimate explains them, for one more attempt of `more_tokens`.

    `table` [8, instances] is `DecodeColumns.estimated`, `bits` [instances] the place of the instance's store in `held` [bits]. Attempts
    beyond the largest batch wait for a place in it.
    """
    running, context_tokens, max_batch, fixed_ms, per_sequence_ms, per_context_token_ms, slots_free, slots_total = table
    batch = running + 1
    at_once = np.where((max_batch > 0) & (max_batch < batch), max_batch, batch)
    turns = batch / at_once
    floats[0] = fixed_ms + per_sequence_ms * at_once + per_context_token_ms * np.floor((context_tokens + more_tokens) / turns)
    ints[:] = held[bits], batch, slots_free, slots_total, max_batch


def spread(column: Ints, value: int, mask: bytes) -> None:
    """Writes `value` into those places of `column` whose bit is set in `mask`, the lowest bit first."""
    column[np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").nonzero()[0]] = value
