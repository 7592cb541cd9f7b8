"""Which slots the passes of which attempts have used, for a runner that keeps copies of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.batch import Int32Array
from springtide.ids import AttemptId


class SlotUse:
    """An attempt's slots hold the same blocks until it gives them back; of a slot that several share, until the last one does."""

    def __init__(self) -> None:
        self._slots: dict[AttemptId, Sequence[int] | Int32Array] = {}
        self._users: Counter[int] = Counter()

    def note(self, attempt_id: AttemptId, slots: Sequence[int] | Int32Array) -> None:
        """A pass of the attempt is launched, or a load for one. Its slots are those of its last one, or these and more, or the first of
        them."""
        known = self._slots.get(attempt_id, ())
        if len(slots) > len(known):
            self._slots[attempt_id] = slots
            self._users.update(slots[len(known) :])

    def give_back(self, attempt_id: AttemptId) -> list[int]:
        """Its slots, but for those that other attempts still use."""
        slots = self._slots.pop(attempt_id, ())
        self._users.subtract(slots)
        gone = [slot for slot in slots if not self._users[slot]]
        for slot in gone:
            del self._users[slot]
        return gone

    def clear(self) -> None:
        """The store is gone, and every slot with it."""
        self._slots.clear()
        self._users.clear()
