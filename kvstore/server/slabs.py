"""From layers and blocks to byte ranges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from messenger.base import Slice
from springtide.ids import Slot
from springtide.kvspec import KVSpec

MAX_BATCH_BYTES = 32 << 20
"""Moved under one deadline."""
BATCH_TIMEOUT_S = 15.0


def block_slice(spec: KVSpec, own: Slot, theirs: int, generation: int, layers: range) -> Slice:
    """The slabs of consecutive layers of one block lie one after another: one slice. `theirs` is the peer's slot."""
    start = layers.start * spec.bytes_per_slab
    return Slice(own * spec.bytes_per_slot + start, theirs * spec.bytes_per_slot + start, len(layers) * spec.bytes_per_slab, generation)


def layer_groups(spec: KVSpec, num_blocks: int, min_bytes: int) -> Iterator[range]:
    """All layers in order, in groups of as few as make `min_bytes` over `num_blocks`."""
    size = max(1, -(-min_bytes // (num_blocks * spec.bytes_per_slab)))
    for begin in range(0, spec.layers, size):
        yield range(begin, min(begin + size, spec.layers))


def batches(slices: Sequence[Slice]) -> Iterator[Sequence[Slice]]:
    """`slices` in order, in runs of at most MAX_BATCH_BYTES (a longer slice goes alone)."""
    begin = num_bytes = 0
    for i, piece in enumerate(slices):
        if i > begin and num_bytes + piece.length > MAX_BATCH_BYTES:
            yield slices[begin:i]
            begin, num_bytes = i, 0
        num_bytes += piece.length
    if begin < len(slices):
        yield slices[begin:]
