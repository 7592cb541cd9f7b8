"""What a generation's client sees of time, and the objectives that it is held to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Latencies:
    """What a generation's client has seen of time so far, in seconds."""

    ttft_s: float | None = None
    longest_gap_s: float | None = None
    """Between two of its tokens."""
    last_token_s: float | None = None
    """From its arrival to its last token so far."""

    def emitted(self, num_tokens: int, after_s: float) -> float | None:
        """Takes note that so many further tokens have gone to the client, so long after the generation's arrival. Returns the gap before
        each of them; None: they are the first."""
        last_s, self.last_token_s = self.last_token_s, after_s
        if last_s is None:
            self.ttft_s = after_s
            return None
        gap_s = (after_s - last_s) / num_tokens
        if self.longest_gap_s is None or gap_s > self.longest_gap_s:
            self.longest_gap_s = gap_s
        return gap_s


@dataclass(frozen=True, slots=True)
class Objectives:
    """What generations are held to, in seconds."""

    ttft_s: float
    tbt_s: float

    def late(self, seen: Latencies, waited_s: float) -> bool:
        """Whether the first token came late, or has not come though it was waited for as long."""
        return (waited_s if seen.ttft_s is None else seen.ttft_s) > self.ttft_s

    def halting(self, seen: Latencies) -> bool:
        """Whether there was too much time between two tokens."""
        return seen.longest_gap_s is not None and seen.longest_gap_s > self.tbt_s
