"""Batches on their way to the other ranks."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence

import numpy as np
import pytest

from engine.batch import Int32Array, SequenceChunk
from engine.tensor_parallel.batches import BatchReader, BatchWriter


def frozen(slots: Sequence[int]) -> Int32Array:
    array = np.array(slots, np.int32)
    array.setflags(write=False)
    return array


def plain(batch: Sequence[SequenceChunk]) -> list[tuple[list[int], int, list[int], bool, int]]:
    return [(list(chunk.token_ids), chunk.start, [int(slot) for slot in chunk.slots], chunk.wants_logits, chunk.drafted) for chunk in batch]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_read_is_what_was_written_whoever_joins_leaves_or_grows(seed: int) -> None:
    draw, writer, reader = random.Random(seed), BatchWriter(), BatchReader()
    sequences: dict[int, Sequence[int] | Int32Array] = {}
    for step in range(60):
        for name in draw.sample(range(8), 2):
            if name in sequences and draw.random() < 0.5:
                del sequences[name]
            else:
                grown = [*sequences.get(name, ()), draw.randrange(1000)]
                sequences[name] = draw.choice([frozen, tuple, list])(grown)
        for slots in sequences.values():
            if isinstance(slots, list) and draw.random() < 0.3:
                slots[0] = draw.randrange(1000)
        names = draw.sample(sorted(sequences), draw.randint(0, len(sequences)))
        batch = [SequenceChunk([step, name], step, sequences[name], draw.random() < 0.5, drafted=draw.randrange(2)) for name in names]
        assert plain(reader.read(pickle.loads(pickle.dumps(writer.write(batch))))) == plain(batch)


def test_the_next_decode_step_says_as_little_of_long_sequences_as_of_short_ones() -> None:
    def sizes(blocks: int) -> list[int]:
        writer, slots = BatchWriter(), [frozen(range(1000, 1000 + blocks)) for _ in range(16)]
        return [len(pickle.dumps(writer.write([SequenceChunk((7,), 50, own) for own in slots]))) for _ in range(3)]

    first, *short = sizes(4)
    assert sizes(2000)[1:] == short and short[0] < first


def test_an_array_that_may_change_is_said_again() -> None:
    writer, reader, slots = BatchWriter(), BatchReader(), np.array([1, 2], np.int32)
    for value in (5, 6):
        slots[0] = value
        assert plain(reader.read(writer.write([SequenceChunk((7,), 0, slots)]))) == [([7], 0, [value, 2], True, 0)]
