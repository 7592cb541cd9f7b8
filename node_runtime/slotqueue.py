"""Attempts that wait for slots because the pool was full, oldest first. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

RETRY_S = 1.0
"""A pool that looks too full is asked again after so long: how many slots the reused blocks save, only the store knows."""


@dataclass(slots=True)
class _Place:
    num_blocks: int
    deadline: float
    asked_at: float
    asking: bool = False


class SlotQueue:
    """Only the head of the queue asks again, so that a large attempt is not overtaken for ever by small ones."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, attempt_id: str) -> bool:
        return attempt_id in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def wait(self, attempt_id: str, num_blocks: int, deadline: float) -> None:
        """Takes the last place without having asked: others already wait."""
        self._places[attempt_id] = _Place(num_blocks, deadline, asked_at=float("-inf"))

    def refused(self, attempt_id: str, num_blocks: int, deadline: float, now: float) -> None:
        """The store answered POOL_FULL: keeps its place, or takes the last one."""
        place = self._places.setdefault(attempt_id, _Place(num_blocks, deadline, asked_at=now))
        place.asked_at, place.asking = now, False

    def leave(self, attempt_id: str) -> None:
        self._places.pop(attempt_id, None)

    def clear(self) -> None:
        self._places.clear()

    def expired(self, now: float) -> list[str]:
        """Those whose deadline has passed. They stay until they `leave`."""
        return [attempt_id for attempt_id, place in self._places.items() if now >= place.deadline]

    def next_to_ask(self, slots_available: int, now: float) -> str | None:
        """The head of the queue, when the store may now have slots for it; it then counts as asking until `refused` or `leave`."""
        for attempt_id, place in self._places.items():
            if place.asking or (place.num_blocks > slots_available and now - place.asked_at < RETRY_S):
                return None
            place.asking = True
            return attempt_id
        return None
