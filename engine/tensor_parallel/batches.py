"""A pass's batch on its way from rank 0 to the others: of a sequence that was in the last pass too, its slots are not said again. So what a
decode step takes does not grow with the context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from engine.batch import Int32Array, SequenceChunk

Slots: TypeAlias = "Sequence[int] | Int32Array"


class SentChunk(NamedTuple):
    """`slots`: int32 values, or the place in the batch of the last pass of the chunk that had the same ones."""

    token_ids: tuple[int, ...]
    start: int
    slots: bytes | int
    wants_logits: bool
    wants_all: bool
    drafted: int


class BatchWriter:
    """The side of rank 0. Slots are the same where they are the same object, and one that cannot change: a tuple, a range, or an array that
    is not writable."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, Slots]] = {}
        """By identity, with the object, so that no other one has it meanwhile."""

    def write(self, batch: Sequence[SequenceChunk]) -> tuple[SentChunk, ...]:
        """What it returns is to be read in the order in which it was written, all of it."""
        last, self._last = self._last, {}
        sent = []
        for place, chunk in enumerate(batch):
            known = last.get(id(chunk.slots))
            slots = np.asarray(chunk.slots, np.int32).tobytes() if known is None else known[0]
            if _constant(chunk.slots):
                self._last[id(chunk.slots)] = place, chunk.slots
            sent.append(SentChunk(tuple(chunk.token_ids), chunk.start, slots, chunk.wants_logits, chunk.wants_all, chunk.drafted))
        return tuple(sent)


class BatchReader:
    def __init__(self) -> None:
        self._last: list[Int32Array] = []

    def read(self, sent: Sequence[SentChunk]) -> tuple[SequenceChunk, ...]:
        last = self._last
        self._last = [last[one.slots] if isinstance(one.slots, int) else np.frombuffer(one.slots, np.int32) for one in sent]
        read = zip(sent, self._last, strict=True)
        return tuple(SequenceChunk(one.token_ids, one.start, slots, one.wants_logits, one.wants_all, one.drafted) for one, slots in read)


def _constant(slots: Slots) -> bool:
    return isinstance(slots, tuple | range) or (isinstance(slots, np.ndarray) and slots.flags.owndata and not slots.flags.writeable)
