"""How much of a limit has been used within the last minute. Free of I/O and clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

WINDOW_S = 60
"""In no time of this length is more taken than the limit."""


@dataclass(slots=True)
class Window:
    """What was taken in each second of the last minute, and in the second before, part of which may belong to it: so what `used` says is
    never too little, and what was taken is given back up to a second late."""

    taken: dict[int, int] = field(default_factory=dict)
    """By the second, seconds since 1970; all of them within the window."""

    @classmethod
    def of(cls, taken: Mapping[int, int], now: float) -> Window:
        """What is left at `now` of what was taken at any time."""
        return cls({second: amount for second, amount in taken.items() if second > int(now) - WINDOW_S - 1 and amount > 0})

    @property
    def used(self) -> int:
        return sum(self.taken.values())

    def add(self, second: int, amount: int) -> None:
        """Takes or, with a negative amount, gives back what was taken in that second; never more than that."""
        self.taken[second] = max(0, self.taken.get(second, 0) + amount)

    def wait_s(self, amount: int, limit: int, now: float) -> float:
        """How long until `amount` may be taken, if nothing else is: 0 at once. For an amount over the limit, until nothing is used."""
        over = self.used + amount - limit
        last: int | None = None
        for second in sorted(self.taken):
            if over <= 0:
                break
            over -= self.taken[second]
            last = second
        return 0.0 if last is None else last + WINDOW_S + 1 - now

    def reset_s(self, now: float) -> float:
        """How long until nothing is used, if nothing else is taken."""
        return max((second for second, amount in self.taken.items() if amount > 0), default=now - WINDOW_S - 1) + WINDOW_S + 1 - now
