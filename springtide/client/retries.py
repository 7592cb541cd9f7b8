"""When what has failed is tried again."""

from __future__ import annotations

import random
from dataclasses import dataclass

from springtide.errors import Overloaded, SpringtideError, Unavailable

_UNANSWERED = ("connection_failed", "cut_off", "502", "504")
"""The server may have done what was asked: of a proxy's answers, too."""


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a call is tried again, and after which pauses: as the server's `Retry-After` says, or else twice as long each time."""

    times: int = 2
    longest_s: float = 60.0
    """A server that wants a longer pause is not asked again."""
    first_s: float = 0.5

    def pause_s(self, tried: int, error: SpringtideError, *, repeatable: bool) -> float | None:
        """How long to wait before the next try, of `tried` so far; None: there is none. What is not `repeatable` is tried again only when
        it is known not to have been done."""
        if tried > self.times or not isinstance(error, (Overloaded, Unavailable)):
            return None
        if not repeatable and error.code in _UNANSWERED:
            return None
        if isinstance(error, Overloaded):
            return error.retry_after_s if error.retry_after_s <= self.longest_s else None
        # Not all at once, when a server comes back that many wait for.
        return min(self.longest_s, self.first_s * 2.0 ** (tried - 1) * random.uniform(0.5, 1.0))


DEFAULT_RETRIES = Retries()
NO_RETRIES = Retries(times=0)
