"""Segments as bytes, free slots, and files that move bytes piece by piece."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.ssd.disk import ALIGNMENT, Disk, aligned_memory
from kvstore.ssd.errors import DiskError
from kvstore.ssd.format import ENTRY_BYTES, Entry, Layout, Table
from kvstore.ssd.space import SegmentSlot, Space, runs

LAYOUT = Layout(10_000, "a-model")
KEYS = st.binary(min_size=16, max_size=16)
NUMBERS = st.integers(0, (1 << 64) - 1)
ENTRIES = st.builds(Entry, KEYS, st.none() | KEYS, NUMBERS, NUMBERS)


def test_memory_for_nothing_is_some_all_the_same() -> None:
    assert len(aligned_memory(0)) == 1


@given(st.dictionaries(st.integers(0, 30), ENTRIES))
def test_a_table_is_read_as_it_was_written(entries: dict[int, Entry]) -> None:
    memory = aligned_memory(31 * ENTRY_BYTES)
    table = Table(memory, LAYOUT.header(3, 31))
    for slot, entry in entries.items():
        table.put(slot, entry)
    assert dict(Table(memory, LAYOUT.header(3, 31)).entries(31)) == entries
    for slot in entries:
        table.clear(slot)
    assert not any(memory)


@given(ENTRIES, st.integers(0, 8 * ENTRY_BYTES - 1))
def test_no_flipped_bit_of_an_entry_goes_unnoticed(entry: Entry, bit: int) -> None:
    memory = aligned_memory(ENTRY_BYTES)
    table = Table(memory, LAYOUT.header(0, 1))
    table.put(0, entry)
    memory[bit // 8] ^= 1 << bit % 8
    assert dict(table.entries(1)) == {0: None}


@given(st.integers(0, 8 * 72 - 1))
def test_no_flipped_bit_of_a_header_goes_unnoticed(bit: int) -> None:
    page = aligned_memory(ALIGNMENT)
    header = LAYOUT.header(7, 100)
    assert len(header) == 72
    page[: len(header)] = header
    assert LAYOUT.read_header(page) == (7, 100)
    page[bit // 8] ^= 1 << bit % 8
    assert LAYOUT.read_header(page) is None


@pytest.mark.parametrize("other", [Layout(10_001, "a-model"), Layout(10_000, "another-model")])
def test_a_segment_of_another_model_or_size_is_not_of_this_store(other: Layout) -> None:
    page = aligned_memory(ALIGNMENT)
    page[:72] = other.header(7, 100)
    assert LAYOUT.read_header(page) is None


@given(st.integers(1, 1 << 21), st.integers(0, 1 << 30))
def test_as_many_slots_as_a_size_has_room_for(bytes_per_slot: int, num_bytes: int) -> None:
    layout = Layout(bytes_per_slot, "a-model")
    slots = layout.slots_in(num_bytes)
    assert slots == 0 or layout.segment_bytes(slots) <= num_bytes
    assert layout.segment_bytes(slots + 1) > num_bytes


def test_free_slots_of_a_batch_lie_side_by_side_in_the_emptiest_segment() -> None:
    space = Space()
    space.add(0, 4, held={1})
    space.add(1, 5)
    assert space.take(3) == [SegmentSlot(1, 0), SegmentSlot(1, 1), SegmentSlot(1, 2)]
    assert space.take(99) == [SegmentSlot(0, 0), SegmentSlot(0, 2), SegmentSlot(0, 3), SegmentSlot(1, 3), SegmentSlot(1, 4)]
    assert (space.num_free, space.take(1)) == (0, [])


def test_a_slot_is_not_given_away_while_anybody_reads_it() -> None:
    space = Space()
    space.add(0, 1)
    (place,) = space.take(1)
    space.begin_read(place)
    space.begin_read(place)
    space.give_back(place)
    space.end_read(place)
    assert space.take(1) == []
    space.end_read(place)
    assert space.take(1) == [place]


@given(st.sets(st.tuples(st.integers(0, 2), st.integers(0, 9))), st.integers(1, 4), st.randoms())
def test_runs_hold_everything_once_and_each_lies_side_by_side(places: set[tuple[int, int]], longest: int, rng: object) -> None:
    placed = [(SegmentSlot(*place), SegmentSlot(*place)) for place in places]
    found = list(runs(placed, longest))
    assert [value for _, values in found for value in values] == sorted(SegmentSlot(*place) for place in places)
    for first, values in found:
        assert len(values) <= longest
        assert values == [SegmentSlot(first.segment, first.slot + i) for i in range(len(values))]


class PiecemealOs:
    """Moves at most 5 bytes a call, as a system call may."""

    @staticmethod
    def cut(buffers: Sequence[memoryview]) -> list[memoryview]:
        return [buffers[0][:5]]


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=6))
def test_what_the_system_moves_in_pieces_is_moved_whole(data: list[bytes]) -> None:
    fd = os.memfd_create("test")
    preadv, pwritev = os.preadv, os.pwritev
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, PiecemealOs.cut(buffers), offset))
        patch.setattr(os, "pwritev", lambda fd, buffers, offset: pwritev(fd, PiecemealOs.cut(buffers), offset))
        Disk().write(fd, [memoryview(part) for part in data], 100)
        buffers = [bytearray(len(part)) for part in data]
        Disk().read(fd, [memoryview(buffer) for buffer in buffers], 100)
    os.close(fd)
    assert buffers == data


def test_a_read_past_the_end_and_a_refused_write_are_typed_and_name_the_file(tmp_path: Path) -> None:
    disk = Disk()
    fd = disk.open(tmp_path / "file", direct=False, create=True)
    with pytest.raises(DiskError, match=r"cannot read at 0 of .*/file: the file ends there") as caught:
        disk.read(fd, [aligned_memory(10)], 0)
    assert caught.value.errno == errno.EIO
    os.close(fd)
    fd = os.open("/dev/full", os.O_RDWR)
    with pytest.raises(DiskError, match="No space left") as caught:
        disk.write(fd, [aligned_memory(10)], 0)
    assert caught.value.no_room
    os.close(fd)
