"""Nodes' links, each a queue: what is sent goes out at the sender's full rate, one transfer after another, and comes in likewise."""

from __future__ import annotations

from springtide.ids import NodeId


class Network:
    """First come, first served at each end by itself: a transfer has arrived when it has gone through both queues, and neither end waits
    for the other's."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._out_free_at: dict[NodeId, float] = {}
        self._in_free_at: dict[NodeId, float] = {}

    def send(self, source: NodeId, destination: NodeId, num_bytes: float, ready_at: float) -> float:
        """When bytes that can be sent from `ready_at` on have all arrived."""
        seconds = num_bytes / self._rate
        sent = self._out_free_at[source] = max(ready_at, self._out_free_at.get(source, 0.0)) + seconds
        came = self._in_free_at[destination] = max(ready_at, self._in_free_at.get(destination, 0.0)) + seconds
        return max(sent, came)

    def seconds(self, num_bytes: float) -> float:
        """The time of a transfer alone."""
        return num_bytes / self._rate
