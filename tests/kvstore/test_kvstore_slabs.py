"""Byte ranges of layers and blocks, and units that are joined."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.ingest import Unit
from kvstore.server.handover import join_units
from kvstore.server.slabs import MAX_BATCH_BYTES, batches, block_slice, layer_groups
from messenger.base import Slice
from springtide.ids import Slot
from springtide.kvspec import KVSpec

SPEC = KVSpec(layers=6, kv_heads=1, head_dim=8, dtype="float16", block_tokens=2)


def test_consecutive_layers_of_a_block_are_one_slice() -> None:
    piece = block_slice(SPEC, Slot(3), 5, 9, range(2, 4))
    assert piece == Slice(3 * SPEC.bytes_per_slot + 2 * SPEC.bytes_per_slab, 5 * SPEC.bytes_per_slot + 2 * SPEC.bytes_per_slab, 128, 9)


@given(num_blocks=st.integers(1, 50), min_bytes=st.integers(1, 10_000))
def test_layer_groups_cover_all_layers_and_are_as_small_as_allowed(num_blocks: int, min_bytes: int) -> None:
    groups = list(layer_groups(SPEC, num_blocks, min_bytes))
    assert [layer for group in groups for layer in group] == list(range(SPEC.layers))
    for group in groups[:-1]:
        assert len(group) * num_blocks * SPEC.bytes_per_slab >= min_bytes
        assert len(group) == 1 or (len(group) - 1) * num_blocks * SPEC.bytes_per_slab < min_bytes


@given(lengths=st.lists(st.integers(1, MAX_BATCH_BYTES + 1), max_size=20))
def test_batches_keep_order_and_are_bounded(lengths: list[int]) -> None:
    slices = [Slice(i, i, length, 1) for i, length in enumerate(lengths)]
    runs = list(batches(slices))
    assert [piece for run in runs for piece in run] == slices
    assert all(len(run) == 1 or sum(piece.length for piece in run) <= MAX_BATCH_BYTES for run in runs)


def test_units_that_piled_up_are_joined_in_layers_or_in_blocks_but_never_reordered() -> None:
    units = deque([Unit(0, 1, 0, 2), Unit(1, 3, 0, 2), Unit(0, 3, 2, 3), Unit(0, 1, 4, 5), Unit(1, 2, 4, 6)])
    assert join_units(units) == Unit(0, 3, 0, 3)
    assert join_units(units) == Unit(0, 1, 4, 5)
    assert join_units(units) == Unit(1, 2, 4, 6)
    assert not units
