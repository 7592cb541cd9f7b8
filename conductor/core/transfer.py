"""How long it takes to move KV blocks from one node to another (EstimateKVCacheTransferTime of Algorithm 1)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from springtide.ids import AttemptId, NodeId

_SMOOTHING = 0.25
"""Weight of a new measurement in a link's rate."""


@dataclass(frozen=True, slots=True)
class _Transfer:
    source: NodeId
    destination: NodeId
    sharers: int
    """How many transfers shared the link's busier end when this one began, itself included."""


class TransferModel:
    """A link's rate is what it was measured to be, or else assumed; transfers under way at either end share it equally."""

    def __init__(self, assumed_bytes_per_s: float) -> None:
        self._assumed = assumed_bytes_per_s
        self._rates: dict[tuple[NodeId, NodeId], float] = {}
        self._under_way: dict[AttemptId, _Transfer] = {}
        self._leaving: Counter[NodeId] = Counter()
        self._arriving: Counter[NodeId] = Counter()

    def predict_ms(self, source: NodeId, destination: NodeId, num_bytes: int) -> float:
        """Time of one more transfer, beside those under way."""
        rate = self._rates.get((source, destination), self._assumed)
        return 1000.0 * num_bytes * self._sharers(source, destination) / rate

    def congestion(self, source: NodeId) -> int:
        """Transfers that leave this node now."""
        return self._leaving[source]

    def begin(self, attempt_id: AttemptId, source: NodeId, destination: NodeId) -> None:
        self.end(attempt_id)
        self._under_way[attempt_id] = _Transfer(source, destination, self._sharers(source, destination))
        self._leaving[source] += 1
        self._arriving[destination] += 1

    def end(self, attempt_id: AttemptId, num_bytes: int = 0, elapsed_ms: float = 0.0) -> None:
        """The attempt's transfer, if it had one, is over; with both figures it becomes a measurement of its link."""
        transfer = self._under_way.pop(attempt_id, None)
        if transfer is None:
            return
        for counter, node_id in ((self._leaving, transfer.source), (self._arriving, transfer.destination)):
            counter[node_id] -= 1
            if not counter[node_id]:
                del counter[node_id]
        if num_bytes > 0 and elapsed_ms > 0:
            measured = 1000.0 * num_bytes * transfer.sharers / elapsed_ms
            link = (transfer.source, transfer.destination)
            self._rates[link] = measured + (1 - _SMOOTHING) * (self._rates.get(link, measured) - measured)

    def forget(self, node_id: NodeId) -> None:
        """The node is gone: so are the rates of its links."""
        self._rates = {link: rate for link, rate in self._rates.items() if node_id not in link}

    def __contains__(self, attempt_id: AttemptId) -> bool:
        return attempt_id in self._under_way

    def validate(self, live: set[AttemptId]) -> None:
        """Asserts that every transfer under way is that of one of `live`, and is counted once at either end."""
        assert self._under_way.keys() <= live, "a transfer outlived its attempt's prefill"
        assert self._leaving == Counter(transfer.source for transfer in self._under_way.values())
        assert self._arriving == Counter(transfer.destination for transfer in self._under_way.values())

    def _sharers(self, source: NodeId, destination: NodeId) -> int:
        return 1 + max(self._leaving[source], self._arriving[destination])
