"""Sums of recent amounts, the older ones counting less and less."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


class DecayedSums(Generic[KeyT]):
    """The sums of amounts by key: for each, the sum of its amounts, each having shrunk by a factor of e in every `time_constant_s` since it
    was added.

    At most `most_keys` are kept: the smallest go first.
    """

    def __init__(self, time_constant_s: float, most_keys: int) -> None:
        self._time_constant_s = time_constant_s
        self._most_keys = most_keys
        self._sums: dict[KeyT, tuple[float, float]] = {}
        """The sum, and when it was that."""

    def add(self, key: KeyT, amount: float, now: float) -> None:
        known = self._sums.get(key)
        if known is not None:
            amount += known[0] * math.exp((known[1] - now) / self._time_constant_s)
        self._sums[key] = amount, now
        if len(self._sums) > self._most_keys:
            # A quarter at a time, for it takes a look at all of them.
            for smallest, _ in sorted(self.items(now).items(), key=lambda entry: entry[1])[: self._most_keys // 4 + 1]:
                del self._sums[smallest]

    def get(self, key: KeyT, now: float) -> float:
        amount, then = self._sums.get(key, (0.0, now))
        return amount * math.exp((then - now) / self._time_constant_s)

    def items(self, now: float) -> dict[KeyT, float]:
        return {key: self.get(key, now) for key in self._sums}

    def __len__(self) -> int:
        return len(self._sums)
