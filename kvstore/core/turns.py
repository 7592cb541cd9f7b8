"""Whose turn it is on the way to a store that several hand-overs are written to, and how much of one goes at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FIRST_BATCH_BYTES = 256 << 10
"""While it is not known what the way takes: on a narrow one short ones wait until that has gone through."""
MIN_BATCH_BYTES, MAX_BATCH_BYTES = 64 << 10, 32 << 20
BATCH_TARGET_S = 0.25
SMALL_BYTES = 64 << 10
"""A hand-over of which no more is left need not wait for room: it is as nothing beside what is on the way (messenger has a lane of its own
for it, too)."""
_BELIEVED_S = 1.0
"""A way that has told nothing for so long may have become another one."""
_MOST_ROUND_TRIPS = 8.0
"""Of the time of a batch, all but an eighth at most is held for that of its round trips."""
_MOST_BYTES_PER_S = MAX_BATCH_BYTES / BATCH_TARGET_S
"""Of more it need not be known how much, and a small batch, which shows no more than this, shows that it is there."""
_MOST_GROWTH = 2.0
"""Of the rate, by one batch: a small one may have met a moment in which a slow network took it at once."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One hand-over, as far as its turns go by it."""

    began_s: float
    remaining_bytes: int
    """What of it is not written yet, computed or not."""


@dataclass(slots=True, eq=False)
class Turn:
    """The wish to write one batch, or its writing."""

    transfer: Transfer
    lengths: Sequence[int]
    """Of the pieces that there are to write, in order, in bytes."""
    num_pieces: int = 0
    """So many of them go with it, once it is let in."""
    num_bytes: int = 0
    """Those together."""
    began_s: float | None = None
    """When it was let in; None: it waits."""
    moved_before: int = 0
    moved: int = 0
    """The bytes of it that have been moved."""
    round_trips_s: float = 0.0
    """What it would have taken without any bytes."""
    is_last: bool = False
    """It is all that is left of its hand-over, and little."""


class Turns:
    """The turns on one way. About as much is on it at a time as it takes in a quarter of a second: on a fast one nobody waits; on a slow
    one what waits does so here, where who goes first can be chosen, and not in the network.

    The first is whose hand-over would be at its end soonest, had it had the way for itself since it began: a short one passes long ones,
    and since waiting counts for everybody, nobody is passed for ever. Of one that is under way less and less is left: it is finished before
    another of its size begins."""

    def __init__(self) -> None:
        self._bytes_per_s: float | None = None
        self._learnt_s = 0.0
        self._in_flight = 0
        self._last_in_flight = 0
        self._moved = 0
        self._waiting: list[Turn] = []

    def batch_bytes(self, now_s: float) -> int:
        """What goes in one batch: it is finished before a cancellation takes effect."""
        if self._bytes_per_s is None:
            return FIRST_BATCH_BYTES
        most = MAX_BATCH_BYTES if now_s - self._learnt_s <= _BELIEVED_S else FIRST_BATCH_BYTES
        return min(max(int(self._bytes_per_s * BATCH_TARGET_S), MIN_BATCH_BYTES), most)

    def ask(self, transfer: Transfer, lengths: Sequence[int]) -> Turn:
        """Has pieces of these lengths, or the first of them, wait for `next` to choose them."""
        turn = Turn(transfer, lengths, is_last=transfer.remaining_bytes <= SMALL_BYTES)
        self._waiting.append(turn)
        return turn

    def next(self, now_s: float) -> Turn | None:
        """The one that is let in now; None: nobody waits, or enough is on the way. Beside that goes what ends one, a little of it, which
        keeps nobody else out."""
        batch_bytes = self.batch_bytes(now_s)
        room = self._in_flight - self._last_in_flight < batch_bytes
        room_for_last = self._last_in_flight < FIRST_BATCH_BYTES or self._in_flight < batch_bytes
        waiting = [turn for turn in self._waiting if (room_for_last if turn.is_last else room)]
        if not waiting:
            return None
        turn = min(waiting, key=self._would_end_s)
        self._waiting.remove(turn)
        turn.began_s, turn.moved_before = now_s, self._moved
        turn.num_pieces, turn.num_bytes = _within(turn.lengths, batch_bytes)
        self._in_flight += turn.num_bytes
        self._last_in_flight += turn.num_bytes * turn.is_last
        return turn

    def end(self, turn: Turn, now_s: float) -> None:
        """Takes in that the batch has ended, or is not wanted any more. Learns how fast the way is: from what all batches have moved in the
        time of this one."""
        if turn.began_s is None:
            self._waiting.remove(turn)
            return
        self._in_flight -= turn.num_bytes
        self._last_in_flight -= turn.num_bytes * turn.is_last
        self._moved += turn.moved
        turn.transfer.remaining_bytes -= turn.moved
        elapsed_s = max(now_s - turn.began_s, 1e-6)
        elapsed_s = max(elapsed_s - turn.round_trips_s, elapsed_s / _MOST_ROUND_TRIPS)  # far is not narrow
        bytes_per_s = (self._moved - turn.moved_before) / elapsed_s
        if turn.moved:
            self._learn(bytes_per_s, elapsed_s, now_s)

    def _learn(self, bytes_per_s: float, elapsed_s: float, now_s: float) -> None:
        known, bytes_per_s = self._bytes_per_s, min(bytes_per_s, _MOST_BYTES_PER_S)
        if known is None:
            self._bytes_per_s = bytes_per_s
        elif bytes_per_s > known or elapsed_s >= BATCH_TARGET_S / 2:
            self._bytes_per_s = min(bytes_per_s, _MOST_GROWTH * known)
        elif bytes_per_s < known / 2:  # a short time says only that it is at least so fast
            return
        self._learnt_s = now_s

    def _would_end_s(self, turn: Turn) -> float:
        alone_s = 0.0 if self._bytes_per_s is None else turn.transfer.remaining_bytes / self._bytes_per_s
        return turn.transfer.began_s + alone_s


def _within(lengths: Sequence[int], most: int) -> tuple[int, int]:
    """How many of the first pieces have `most` bytes together, and how many these are; the first alone where it has more."""
    total = 0
    for i, length in enumerate(lengths):
        if i > 0 and total + length > most:
            return i, total
        total += length
    return len(lengths), total
