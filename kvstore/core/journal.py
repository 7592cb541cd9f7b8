"""The journal of what happened to the blocks of a store, for whoever watches."""

from __future__ import annotations

from springtide.ids import BlockKey, Incarnation, NodeId
from springtide.protocol.storage import BlockEvent, BlocksRemoved, BlocksStored, Tier

MAX_EVENT_KEYS = 4096
"""What happens to more blocks at once makes several events: none outgrows a message."""


class Journal:
    """The events of one incarnation of a store, numbered from 1 without a gap, over all tiers."""

    def __init__(self, node_id: NodeId, incarnation: Incarnation) -> None:
        self.node_id, self.incarnation = node_id, incarnation
        self._events: list[BlockEvent] = []
        self.sequence = 0
        """The number of the last event."""

    def tell(self, kind: type[BlocksStored] | type[BlocksRemoved], keys: list[BlockKey], tier: Tier) -> None:
        """Adds what happened to these blocks, as few events as hold them."""
        for begin in range(0, len(keys), MAX_EVENT_KEYS):
            self.sequence += 1
            part = tuple(keys[begin : begin + MAX_EVENT_KEYS])
            self._events.append(kind(self.node_id, self.incarnation, self.sequence, part, tier))

    def take(self) -> list[BlockEvent]:
        """The events since the last call."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events
