"""Nodes' links, each a queue: what is sent goes out at the sender's full rate, one transfer after another, and comes in likewise."""

from __future__ import annotations

from springtide.ids import NodeId


class Network:
    """First come, first served at both ends. Equal sharing would end all transfers under way together, no later than here the last of
    them, and moves the same bytes."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._out_free_at: dict[NodeId, float] = {}
        self._in_free_at: dict[NodeId, float] = {}
        self.bytes_moved = 0

    def send(self, source: NodeId, destination: NodeId, num_bytes: float, ready_at: float) -> float:
        """When bytes that can be sent from `ready_at` on have all arrived."""
        start = max(ready_at, self._out_free_at.get(source, 0.0), self._in_free_at.get(destination, 0.0))
        end = start + num_bytes / self._rate
        self._out_free_at[source] = self._in_free_at[destination] = end
        self.bytes_moved += int(num_bytes)
        return end

    def seconds(self, num_bytes: float) -> float:
        """Of a transfer alone."""
        return num_bytes / self._rate
