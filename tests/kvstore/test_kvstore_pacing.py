"""Byte ranges of layers and blocks, and units that are joined."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from kvstore.server.transfer.hand_over import join_last
from kvstore.server.transfer.pacing import Pace, block_slice, layer_groups
from messenger.base import Completion, Slice
from springtide.ids import Slot
from springtide.modelinfo import KVSpec
from springtide.protocol.storage import Unit

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


async def test_the_pace_is_what_the_link_took_lately_within_bounds() -> None:
    async def batch(num_bytes: int) -> Completion:
        return Completion(num_bytes)

    pace = Pace()
    await pace.move(batch(1))
    slow = pace.batch_bytes
    await pace.move(batch(1 << 40))
    assert slow < pace.batch_bytes == 32 << 20


def join_all(*units: Unit) -> list[Unit]:
    joined: deque[Unit] = deque()
    for unit in units:
        joined.append(unit)
        join_last(joined)
    return list(joined)


def test_units_that_pile_up_are_joined_in_layers_or_in_blocks_but_never_reordered() -> None:
    units = [Unit(0, 1, 0, 2), Unit(1, 3, 0, 2), Unit(0, 3, 2, 3), Unit(0, 1, 4, 5), Unit(1, 2, 4, 6)]
    assert join_all(*units) == [Unit(0, 3, 0, 3), Unit(0, 1, 4, 5), Unit(1, 2, 4, 6)]


@given(groups=st.integers(1, 6), chunks=st.lists(st.integers(1, 5), min_size=1, max_size=30), written=st.integers(0, 40))
def test_however_long_the_link_stands_still_few_units_wait(groups: int, chunks: list[int], written: int) -> None:
    """What is pushed chunk by chunk and layer by layer, while the link took `written` units and then no more."""
    waiting: deque[Unit] = deque()
    covered, begin = set(), 0
    for num_blocks in chunks:
        for layer in range(groups):
            waiting.append(Unit(layer, layer + 1, begin, begin + num_blocks))
            join_last(waiting)
            assert len(waiting) <= 3
            if written > 0:
                written -= 1
                covered |= _slabs(waiting.popleft())
        begin += num_blocks
    for unit in waiting:
        assert covered.isdisjoint(_slabs(unit))
        covered |= _slabs(unit)
    assert covered == {(layer, block) for layer in range(groups) for block in range(begin)}


def _slabs(unit: Unit) -> set[tuple[int, int]]:
    return {(layer, block) for layer in range(unit.layer_begin, unit.layer_end) for block in range(unit.block_begin, unit.block_end)}
