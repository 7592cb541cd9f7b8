"""How long a read will take, from how long the last ones took."""

from __future__ import annotations

import threading

from springtide.clock import Clock

ASSUMED_SECONDS_PER_BYTE = 1 / (1 << 30)
"""The speed of a disk that nothing has been read from."""
RELAX_HALF_LIFE_S = 30.0
"""A disk that was slow is asked again: whoever declines to read would never learn that it has recovered."""
_DECAY = 0.8
"""What an earlier read still weighs at the next."""


class ReadSpeed:
    """The reading speed of a disk with a queue. A read that ends counts with the time since it began or since the one before it ended,
    whichever is less: the sum of these is the time that the disk was busy, however many reads are in flight at once. Safe for threads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pending_bytes = 0
        self._running: dict[int, float] = {}
        """Beginning of each read in flight, by ticket."""
        self._tickets = 0
        self._last_end = float("-inf")
        self._busy_s = self._moved_bytes = 0.0
        self._one_read_s = 0.0

    def queued(self, num_bytes: int) -> None:
        with self._lock:
            self._pending_bytes += num_bytes

    def began(self) -> int:
        """Begins a read that was queued. Returns the ticket for `ended`."""
        with self._lock:
            self._tickets += 1
            self._running[self._tickets] = self._clock.now()
            return self._tickets

    def ended(self, ticket: int, num_bytes: int) -> None:
        """Ends a read, well or ill: what a failing disk costs is time too."""
        now = self._clock.now()
        with self._lock:
            began = self._running.pop(ticket)
            self._pending_bytes -= num_bytes
            self._busy_s = _DECAY * self._busy_s + max(0.0, now - max(began, self._last_end))
            self._moved_bytes = _DECAY * self._moved_bytes + num_bytes
            self._one_read_s += (1 - _DECAY) * (now - began - self._one_read_s) if self._one_read_s else now - began
            self._last_end = max(self._last_end, now)

    def hanging_s(self) -> float:
        """How long the oldest read in flight has taken."""
        now = self._clock.now()
        with self._lock:
            return now - min(self._running.values(), default=now)

    def estimate_s(self, num_bytes: int) -> float:
        """The time until a read of `num_bytes` that begins now is done: what is queued before it included, and no less than a read takes
        that is in flight."""
        now = self._clock.now()
        with self._lock:
            trust = 0.5 ** (max(0.0, now - self._last_end) / RELAX_HALF_LIFE_S) if self._moved_bytes else 0.0
            measured = self._busy_s / self._moved_bytes if self._moved_bytes else 0.0
            seconds_per_byte = trust * measured + (1 - trust) * ASSUMED_SECONDS_PER_BYTE
            hanging_s = now - min(self._running.values(), default=now)
            return max(trust * self._one_read_s, hanging_s, (self._pending_bytes + num_bytes) * seconds_per_byte)
