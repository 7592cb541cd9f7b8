"""Estimates with numpy: lines 4 to 20 of Algorithm 1 (arXiv 2407.00079, section 6)."""

from __future__ import annotations

import numpy as np

from conductor.core.types.arrays import Floats, Ints, Rows
from conductor.core.types.estimates import FETCH, RECOMPUTE, Asked, DecodeEstimates, PrefillEstimates
from springtide.chunking import EPSILON, LEAST_PART, MOST_FIXED, ROUND_FROM, ROUND_TO


class _Chunks:
    """`Chunking`, of many instances at once: columns for its numbers."""

    def __init__(self, instances: Rows, asked: Asked) -> None:
        self._fixed_ms, self._per_token_ms, self._per_pair_ms = (instances[f"{name}_ms"] for name in ("fixed", "per_token", "per_pair"))
        self._slowest_share, self._chunk_tokens = instances["slowest_share"], asked.chunk_tokens
        self._least_tokens = max(1, asked.chunk_tokens // LEAST_PART)
        by_default = np.maximum(self._own_ms(asked.chunk_tokens, 0), (1 / MOST_FIXED - 1) * self._fixed_ms)
        self._budget_ms: Floats = asked.chunk_ms - self._fixed_ms if asked.chunk_ms else by_default

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


def estimate_prefills(
    instances: Rows,
    held: Ints,
    in_dram: Ints | None,
    links: Rows,
    rates: Floats | None,
    factors: Floats | None,
    asked: Asked,
    into: PrefillEstimates,
) -> None:
    chunks, bits, nodes = _Chunks(instances, asked), instances["bit"], instances["node"]

    def compute_ms(blocks: Ints | int) -> Floats:
        cached = blocks * asked.block_tokens
        return chunks.prompt_ms(asked.num_tokens - cached, cached)

    local = np.minimum(held[bits], asked.most_reused)
    computing_ms, read_ms = compute_ms(local), np.zeros(len(local))
    if in_dram is not None:
        # What lies on the instance's SSD is read where that is sooner than computing it.
        at_once = np.minimum(in_dram[bits], asked.most_reused)
        read_ms, without_ms = (local - at_once) * instances["ssd_read_ms_per_block"], compute_ms(at_once)
        slower = (read_ms > 0) & (read_ms + computing_ms >= without_ms)
        local, computing_ms = np.where(slower, at_once, local), np.where(slower, without_ms, computing_ms)
        read_ms = np.where(slower, 0.0, read_ms)
    saved_ms, transfer_ms, branch = np.zeros(len(local)), read_ms, np.zeros(len(local), np.int64)
    if asked.source >= 0:
        worth = (nodes != asked.source) & (asked.best > local) & (asked.best >= asked.threshold * local)
        sharers = 1 + np.maximum(links["leaving"][asked.source], links["arriving"][nodes])
        measured = np.full(len(local), np.nan) if rates is None else rates[nodes]
        rate = np.where(np.isnan(measured), asked.assumed_bytes_per_s, measured)
        fetch_ms = 1000.0 * ((asked.best - local) * asked.bytes_per_block) * sharers / rate
        rest_ms = compute_ms(asked.best)
        fetches = worth & (fetch_ms + rest_ms < computing_ms)
        branch = np.where(fetches, FETCH, RECOMPUTE * worth)
        saved_ms = np.where(fetches, computing_ms - rest_ms, 0.0)
        transfer_ms = np.where(fetches, read_ms + fetch_ms, read_ms)
        computing_ms = np.where(fetches, rest_ms, computing_ms)
    left_ms = instances["queue_ms"] - 1000.0 * (asked.now - instances["reported_at"])
    into.local_blocks[:] = local
    into.queue_ms[:] = np.where(left_ms > 0, left_ms, 0.0) + instances["placed_ms"]
    if factors is not None:
        into.queue_ms *= factors[_classes(computing_ms, len(factors)), _classes(into.queue_ms, len(factors))]
    into.transfer_ms[:] = transfer_ms
    into.prefill_ms[:] = computing_ms
    into.ttft_ms[:] = into.queue_ms + (transfer_ms + computing_ms)
    into.saved_ms[:] = saved_ms
    into.slots_total[:] = instances["slots_total"]
    into.branch[:] = branch


def _classes(ms: Floats, count: int) -> Ints:
    """As `_native.queue_class`."""
    found: Ints = np.clip(np.frexp(ms)[1], 0, count - 1).astype(np.int64)
    return found


def estimate_decodes(instances: Rows, held: Ints, num_tokens: int, into: DecodeEstimates) -> None:
    batch, max_batch = instances["attempts"] + 1, instances["max_batch"]
    at_once = np.where((max_batch > 0) & (max_batch < batch), max_batch, batch)
    context_tokens = np.floor((instances["context_tokens"] + num_tokens) / (batch / at_once))
    into.prefix_blocks[:] = held[instances["bit"]]
    into.tbt_ms[:] = instances["fixed_ms"] + instances["per_sequence_ms"] * at_once + instances["per_context_token_ms"] * context_tokens
    into.batch[:] = batch
    for name in ("running", "slots_free", "slots_total", "max_batch"):
        getattr(into, name)[:] = instances[name]


def spread(column: Ints, value: int, mask: bytes) -> None:
    column[np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").nonzero()[0]] = value
