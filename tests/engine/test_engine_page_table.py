"""Which slots have pages, whatever is asked of them in whatever order."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.batch import SequenceChunk
from engine.kv_cache.page_table import OutOfPages, PageTable, Pairs

SIZE = 16
NOTHING = Pairs(np.zeros(0, np.int32), np.zeros(0, np.int32))


def chunk(start: int, tokens: int, *slots: int) -> SequenceChunk:
    return SequenceChunk([1] * tokens, start, slots)


def run(table: PageTable, *batch: SequenceChunk, stores: bool = True) -> None:
    placement = table.place(batch)
    table.done(placement, placement.written if stores else placement.completed)
    table.validate()


def test_what_a_pass_begins_is_not_loaded_and_what_was_there_before_it_is() -> None:
    table = PageTable(20, 10, SIZE)
    placement = table.place([chunk(40, 30, 3, 4, 5, 6, 7, 8)])
    assert placement.loaded.slots.tolist() == [3, 4, 5], "the third block is partly there"
    assert placement.written.slots.tolist() == [5, 6, 7]
    assert placement.completed.slots.tolist() == [5, 6]
    assert placement.begun.slots.tolist() == [6, 7]
    assert [len(pages) for pages in placement.pages] == [5], "a sequence may hold more slots than it has tokens for"


def test_what_is_on_the_device_is_not_loaded_again() -> None:
    table = PageTable(20, 10, SIZE)
    run(table, chunk(0, 40, 1, 2, 3))
    assert not len(table.place([chunk(40, 1, 1, 2, 3)]).loaded)


def test_several_sequences_may_share_their_first_blocks() -> None:
    table = PageTable(20, 4, SIZE)
    placement = table.place([chunk(32, 1, 1, 2, 3), chunk(32, 1, 1, 2, 4)])
    assert placement.loaded.slots.tolist() == [1, 2]
    assert placement.pages[0][:2].tolist() == placement.pages[1][:2].tolist()
    assert len({*placement.pages[0].tolist(), *placement.pages[1].tolist()}) == 4


def test_the_pages_that_were_not_used_for_longest_go_and_are_written_back_if_they_are_newer() -> None:
    table = PageTable(20, 4, SIZE)
    run(table, chunk(0, 20, 1, 2), stores=False)
    run(table, chunk(0, 20, 3, 4), stores=False)
    run(table, chunk(20, 1, 1, 2), stores=False)
    placement = table.place([chunk(0, 17, 5, 6)])
    assert placement.evicted.slots.tolist() == [4], "the third one was written back when it was full"
    assert sorted(np.concatenate(placement.pages).tolist()) == sorted(pages_of(placement, 5, 6))
    table.done(placement, NOTHING)
    assert set(table.dirty_slots().tolist()) == {2, 5, 6}


def pages_of(placement: object, *slots: int) -> list[int]:
    written = placement.written  # type: ignore[attr-defined]
    return [int(page) for slot, page in zip(written.slots, written.pages, strict=True) if slot in slots]


def test_a_pass_that_does_not_fit_changes_nothing() -> None:
    table = PageTable(20, 4, SIZE)
    run(table, chunk(0, 40, 1, 2, 3), stores=False)
    with pytest.raises(OutOfPages, match="the pass needs 5 pages of the device's 4"):
        table.place([chunk(0, 70, 5, 6, 7, 8, 9)])
    with pytest.raises(ValueError, match="slot 20 is outside the arena of 20 slots"):
        table.place([chunk(0, 20, 5, 20)])
    table.validate()
    assert not len(table.place([chunk(40, 1, 1, 2, 3)]).loaded)


def test_what_is_placed_ahead_is_loaded_once_and_kept_until_a_pass_uses_it() -> None:
    table = PageTable(20, 6, SIZE)
    run(table, chunk(0, 16, 1))
    ahead = table.place_ahead((1, 2, 3))
    assert ahead is not None and ahead.slots.tolist() == [2, 3], "the first one is there"
    run(table, chunk(0, 48, 5, 6, 7))
    run(table, chunk(0, 48, 8, 9, 10))
    placement = table.place([chunk(33, 1, 1, 2, 3)])
    assert not len(placement.loaded), "others gave way, though they were used later"
    table.done(placement, placement.written)
    run(table, chunk(0, 48, 5, 6, 7))
    run(table, chunk(0, 48, 8, 9, 10))
    assert table.place([chunk(34, 1, 1, 2, 3)]).loaded.slots.tolist() == [1, 2, 3]


def test_what_is_placed_ahead_takes_nothing_from_the_last_pass_nor_from_others_ahead_nor_what_is_newer_than_the_arena() -> None:
    table = PageTable(20, 6, SIZE)
    run(table, chunk(0, 20, 1, 2), stores=False)
    run(table, chunk(0, 32, 3, 4))
    run(table, chunk(0, 32, 5, 6))
    assert table.place_ahead((7, 8, 9, 10)) is None, "the second one is newer"
    ahead = table.place_ahead((7, 8, 9))
    assert ahead is not None and len(ahead) == 3
    table.validate()
    assert table.place_ahead((11,)) is None
    assert not len(table.place([chunk(31, 1, 5, 6)]).loaded) and table.dirty_slots().tolist() == [2]
    table.forget((7,))
    assert (ahead := table.place_ahead((11, 8))) is not None and ahead.slots.tolist() == [11]
    table.validate()


def test_a_pass_that_needs_what_is_kept_takes_it() -> None:
    table = PageTable(20, 4, SIZE)
    assert table.place_ahead((1, 2, 3)) is not None
    run(table, chunk(0, 64, 5, 6, 7, 8))
    assert table.place([chunk(33, 1, 1, 2, 3)]).loaded.slots.tolist() == [1, 2, 3]


def test_what_is_refused_ahead_changes_nothing() -> None:
    table = PageTable(20, 4, SIZE)
    with pytest.raises(ValueError, match="slot 20 is outside the arena of 20 slots"):
        table.place_ahead((1, 20))
    assert table.place_ahead((1, 2, 3, 4, 5)) is None
    assert table.place([chunk(31, 1, 1, 2)]).loaded.slots.tolist() == [1, 2]


def test_what_a_stopped_pass_has_begun_or_loaded_is_loaded_again() -> None:
    table = PageTable(20, 10, SIZE)
    run(table, chunk(0, 20, 1, 2))
    placement = table.place([chunk(20, 30, 1, 2, 3, 4), chunk(16, 4, 8, 9)])
    table.undo(placement)
    table.validate()
    again = table.place([chunk(32, 4, 1, 2, 3), chunk(20, 1, 8, 9)])
    assert again.loaded.slots.tolist() == [8, 9], "what was there before still is"


def test_it_never_contradicts_itself() -> None:
    """Against a plain account of which slot's newest contents are where."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    table = PageTable(40, 12, SIZE)
    device: dict[int, int] = {}  # page to what it holds
    arena = dict.fromkeys(range(40), 0)  # slot to what it holds: a number that grows with each write
    newest = dict(arena)
    clock = 0
    sequences = {i: (list(range(5 * i, 5 * i + 5)), 0) for i in range(8)}
    for _ in range(2000):
        batch, members = [], []
        for i in dice.sample(range(8), dice.randint(1, 2)):
            slots, length = sequences[i]
            if length >= 80 or dice.random() < 0.05:
                table.forget(slots)
                clock += 1
                arena.update(dict.fromkeys(slots, clock))
                newest.update(dict.fromkeys(slots, clock))
                sequences[i] = slots, length = slots, dice.choice([0, 16, 40])
            tokens = dice.choice([1, 1, 1, dice.randint(1, 80 - length)])
            batch.append(SequenceChunk([1] * tokens, length, slots))
            members.append((i, length + tokens))
        if dice.random() < 0.2:
            slots, length = sequences[dice.randrange(8)]
            if length >= SIZE and (ahead := table.place_ahead(slots[: length // SIZE])) is not None:
                table.validate()
                for slot, page in zip(ahead.slots, ahead.pages, strict=True):
                    device[page] = arena[slot]
        placement = table.place(batch)
        for slot, page in zip(placement.evicted.slots, placement.evicted.pages, strict=True):
            arena[slot] = device[page]
        for slot, page in zip(placement.loaded.slots, placement.loaded.pages, strict=True):
            device[page] = arena[slot]
        for one, pages in zip(batch, placement.pages, strict=True):
            for slot, page in zip(one.slots[: one.start // SIZE], pages, strict=False):
                assert device[page] == newest[slot], f"slot {slot} is read from a page that is not its own"
        clock += 1
        for slot, page in zip(placement.written.slots, placement.written.pages, strict=True):
            device[page] = newest[slot] = clock
        if dice.random() < 0.1:
            table.undo(placement)
            for slot in placement.new:
                newest[slot] = arena[slot]
            table.validate()
            for i, _ in members:
                table.forget(sequences[i][0])
                newest.update({slot: arena[slot] for slot in sequences[i][0]})
                sequences[i] = sequences[i][0], 0
            continue
        stored = placement.written if dice.random() < 0.3 else placement.completed
        for slot, page in zip(stored.slots, stored.pages, strict=True):
            arena[slot] = device[page]
        table.done(placement, stored)
        table.validate()
        for i, length in members:
            sequences[i] = sequences[i][0], length
