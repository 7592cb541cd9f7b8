"""Bounds on the connections to the HTTP API: how many there may be, and for how long each may be in which phase."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, Literal, TypeVar

ConnectionPhase = Literal["idle", "draining", "head", "stalled", "receiving", "busy"]
"""Between requests; the rest of a body that nobody wants is coming; a request's head is coming; an answer is not being taken; a request's
body is coming; a request is being answered."""

Key = TypeVar("Key", bound=Hashable)

MOST_S: dict[ConnectionPhase, float] = {"idle": 75.0, "draining": 10.0, "head": 10.0, "stalled": 60.0}
"""For how long a connection may be in a phase; for bodies, `bodies.py` says."""
_YIELDING: tuple[ConnectionPhase, ...] = ("idle", "draining", "head", "stalled", "receiving")
"""The phases in which a connection makes room for a new one, in this order."""


class ConnectionTable(Generic[Key]):
    """Which connections may stay. Free of I/O and clock."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._places: dict[Key, tuple[ConnectionPhase, str]] = {}
        self._since: dict[tuple[ConnectionPhase, str], dict[Key, float]] = {}
        """Phase and address -> its connections, by the time since which they have been in it."""

    def __len__(self) -> int:
        return len(self._places)

    def opened(self, key: Key, address: str, now: float) -> Key | None:
        """Takes a new one in, and returns which one is to be closed for it, if any: of those that nothing is done for yet, the oldest of
        the address that has the most of them; the new one itself when all are being answered."""
        victim = None
        if len(self._places) >= self._max_connections:
            victim = self._yielding()
            if victim is None:
                return key
            self.closed(victim)
        self._put(key, "idle", address, now)
        return victim

    def moved(self, key: Key, phase: ConnectionPhase, now: float) -> None:
        """Notes the phase of a connection. Of one that was closed for another, nothing is known any more."""
        place = self._places.get(key)
        if place is not None and place[0] != phase:
            self.closed(key)
            self._put(key, phase, place[1], now)

    def closed(self, key: Key) -> None:
        place = self._places.pop(key, None)
        if place is not None:
            del self._since[place][key]
            if not self._since[place]:
                del self._since[place]

    def overdue(self, now: float) -> list[Key]:
        """The connections that have been in their phase for too long."""
        return [
            key
            for (phase, _), since in self._since.items()
            if phase in MOST_S
            for key, entered_at in since.items()
            if now - entered_at > MOST_S[phase]
        ]

    def _put(self, key: Key, phase: ConnectionPhase, address: str, now: float) -> None:
        self._places[key] = (phase, address)
        self._since.setdefault((phase, address), {})[key] = now

    def _yielding(self) -> Key | None:
        for phase in _YIELDING:
            most: dict[Key, float] = {}
            for (at, _), since in self._since.items():
                if at == phase and len(since) > len(most):
                    most = since
            if most:
                return next(iter(most))
        return None
