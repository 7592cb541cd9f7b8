"""How much may be copied ahead: so many copies at a time, and so many bytes a second over the whole cluster and at each node, whether it
gives or takes."""

from __future__ import annotations

from collections.abc import Iterable

from springtide.ids import NodeId

MOST_COPIES = 16
"""At a time, over the whole cluster; a store takes two."""
_AHEAD_S = 1.0
"""Orders are made about once a second, so a second's worth is given out at a time. One order may exceed it: what follows waits longer."""
_WHOLE_CLUSTER = NodeId("")


class CopyBudget:
    def __init__(self, cluster_bytes_per_s: float, node_bytes_per_s: float) -> None:
        self._cluster_bytes_per_s = cluster_bytes_per_s
        self._node_bytes_per_s = node_bytes_per_s
        self._spent_until: dict[NodeId, float] = {}
        """Until when what was given out keeps the node, or the whole cluster, busy at its rate."""

    def allows(self, node_ids: Iterable[NodeId], now: float) -> bool:
        """Whether these nodes may take part in one more copy now."""
        return all(self._spent_until.get(node_id, now) < now + _AHEAD_S for node_id in (_WHOLE_CLUSTER, *node_ids))

    def spend(self, node_ids: Iterable[NodeId], num_bytes: int, now: float) -> None:
        """A copy of so many bytes is ordered, in which these nodes take part."""
        self._spend(_WHOLE_CLUSTER, num_bytes / self._cluster_bytes_per_s, now)
        for node_id in node_ids:
            self._spend(node_id, num_bytes / self._node_bytes_per_s, now)

    def seconds(self, num_bytes: int) -> float:
        """How long one node takes for so much, at the least."""
        return num_bytes / self._node_bytes_per_s

    def forget_past(self, now: float) -> None:
        self._spent_until = {node_id: until for node_id, until in self._spent_until.items() if until > now}

    def _spend(self, node_id: NodeId, seconds: float, now: float) -> None:
        self._spent_until[node_id] = max(self._spent_until.get(node_id, now), now) + seconds
