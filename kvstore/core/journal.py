"""What happened to the blocks of a store, for whoever watches."""

from __future__ import annotations

from kvstore.core.results import PoolEvent, Removed, Stored
from springtide.ids import BlockKey
from springtide.protocol.storage import Tier

MAX_EVENT_KEYS = 4096
"""What happens to more blocks at once makes several events: none outgrows a message."""


class Journal:
    """Events are numbered from 1 without a gap, over all tiers."""

    def __init__(self) -> None:
        self._events: list[PoolEvent] = []
        self.sequence = 0
        """Of the last event."""

    def tell(self, kind: type[Stored] | type[Removed], keys: list[BlockKey], tier: Tier) -> None:
        for begin in range(0, len(keys), MAX_EVENT_KEYS):
            self.sequence += 1
            self._events.append(kind(self.sequence, keys[begin : begin + MAX_EVENT_KEYS], tier))

    def take(self) -> list[PoolEvent]:
        """Those since the last call."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events
