"""The way from layers and blocks to byte ranges, and how many of these go at a time."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterator

from kvstore.core.turns import BATCH_TARGET_S, MAX_BATCH_BYTES, MIN_BATCH_BYTES
from messenger.base import Completion, Slice
from springtide.ids import Slot
from springtide.modelinfo import KVSpec

_FIRST_BATCH_BYTES = 4 << 20


class Pace:
    """The share of one transfer that goes into a batch: what the link takes in about a quarter of a second, for a batch has one deadline
    and is finished before a cancellation takes effect."""

    def __init__(self) -> None:
        self.batch_bytes = _FIRST_BATCH_BYTES

    async def move(self, batch: Awaitable[Completion]) -> Completion:
        """Waits for the batch, and learns from it."""
        start = time.perf_counter()
        completion = await batch
        bytes_per_s = completion.num_bytes / max(time.perf_counter() - start, 1e-6)
        self.batch_bytes = min(max(int(bytes_per_s * BATCH_TARGET_S), MIN_BATCH_BYTES), MAX_BATCH_BYTES)
        return completion


class RateLimit:
    """A limit on the bytes that begin to be moved in a second, on average, whoever asks: for what nobody waits for."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def take(self, num_bytes: int, now: float) -> float:
        """The time when it is these bytes' turn: now or later."""
        begin = max(now, self._free_at)
        self._free_at = begin + num_bytes / self._bytes_per_s
        return begin


def block_slice(spec: KVSpec, own: Slot, theirs: Slot, generation: int, layers: range) -> Slice:
    """The slice of consecutive layers of one block, whose slabs lie one after another. `theirs` is the peer's slot."""
    start = layers.start * spec.bytes_per_slab
    return Slice(own * spec.bytes_per_slot + start, theirs * spec.bytes_per_slot + start, len(layers) * spec.bytes_per_slab, generation)


def layer_groups(spec: KVSpec, num_blocks: int, min_bytes: int) -> Iterator[range]:
    """All layers in order, in groups of as few as make `min_bytes` over `num_blocks`."""
    size = max(1, -(-min_bytes // (num_blocks * spec.bytes_per_slab)))
    for begin in range(0, spec.layers, size):
        yield range(begin, min(begin + size, spec.layers))
