"""What the computing of a traced prompt took, pass by pass, on either kind of node."""

from __future__ import annotations

from springtide.protocol.timings import PassTimes, PrefillTimes, StageTimes

MOST_PASSES = 256
"""That are told of one by one: a prompt of a million tokens has more."""


class PassTally:
    """The passes of one attempt, that came here at `arrived_at`. Times go in as seconds of one clock."""

    def __init__(self, arrived_at: float) -> None:
        self._arrived_at = arrived_at
        self._passes: list[PassTimes] = []
        self._left_out = 0

    def passed(
        self,
        began_at: float,
        now: float,
        start: int,
        num_tokens: int,
        others: int,
        waited_ms: float = 0.0,
        stages: tuple[StageTimes, ...] = (),
    ) -> None:
        """A pass with so many tokens of it has ended."""
        if len(self._passes) == MOST_PASSES:
            self._left_out += 1
            return
        took_ms = (now - began_at) * 1000
        self._passes.append(PassTimes(self._ms(began_at), took_ms, start, num_tokens, others, waited_ms, stages))

    def times(self, now: float, acquired_at: float, asked_at: float = 0.0, fetch_bytes: int = 0) -> PrefillTimes:
        """All of it, to be sent. `asked_at`: when a fetch was ordered, if anything came of one."""
        fetch_at_ms = self._ms(asked_at) if fetch_bytes else 0.0
        return PrefillTimes(self._ms(now), self._ms(acquired_at), fetch_at_ms, fetch_bytes, tuple(self._passes), self._left_out)

    def _ms(self, at: float) -> float:
        return max(0.0, at - self._arrived_at) * 1000
