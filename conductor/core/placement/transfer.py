"""How long it takes to move KV blocks from one node to another (EstimateKVCacheTransferTime of Algorithm 1), and from which length of a
prefix on that is worth it."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter

import numpy as np

from conductor.core.types.arrays import Floats, Ints, StructuredArray
from springtide.ids import AttemptId, NodeId
from springtide.values import value_class

_SMOOTHING = 0.25
"""Weight of a new measurement in a link's rate."""
_FIRST_NODES = 64
_RATIOS = (1.0, 1.125, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""The thresholds to choose from: each begins a class of fetches, up to the next."""
_REMEMBERED = 0.98
"""What the classes' sums keep of themselves with each new fetch: some 50 fetches count. A class that is shut out brings no news, so its
losses fade beside those of the others; after a while it is below `_NEGLIGIBLE_MS`, and is tried once more."""
_NEGLIGIBLE_MS = 1.0


@value_class(frozen=True, slots=True)
class PlannedFetch:
    """What an assignment has its prefill node fetch."""

    source: NodeId
    destination: NodeId
    ratio: float
    """Of the source's prefix to the destination's own one, both in blocks; infinite without one of its own."""
    num_bytes: int
    saved_ms: float | None
    """Predicted time of computing it instead; None: that is no choice, and what fetching gains is not learnt from it."""


@value_class(frozen=True, slots=True)
class _Transfer:
    fetch: PlannedFetch
    source: int
    destination: int
    """Numbers of the two nodes."""
    sharers: int
    """How many transfers shared the link's busier end when this one began, itself included."""


class LinkEnds(StructuredArray):
    """The ends of links: of each node, how many transfers are in flight from it and to it."""

    leaving: Ints
    arriving: Ints


class AdaptiveThreshold:
    """The `kvcache_balancing_threshold` of Algorithm 1, learnt from what fetching came to; asked for its `value` when the configured one is
    `auto`.

    The paper (arXiv 2407.00079, section 6) has the threshold set by hand. Whether to fetch is first of all the prediction's business:
    what is predicted to be computed sooner is never fetched. But a prediction may keep being too kind to the network, and the shorter
    the part that is fetched in relation to what is there already, the less there is to gain. So of each fetch that is over its *gain*
    is taken: the time that computing its tokens would have taken, by the cost model that is fitted to measured prefills, less the time
    it was measured to take. The threshold is the ratio of best to local prefix from which on the fetches of late have gained something
    in sum.
    """

    def __init__(self) -> None:
        self._gains_ms = [0.0] * len(_RATIOS)
        self.value = _RATIOS[0]
        """Fetch when the best prefix is at least so many times the local one; at least 1."""

    def fetched(self, ratio: float, saved_ms: float, fetch_ms: float) -> None:
        """A fetch is over. `ratio`: of best to local prefix, above 1; `saved_ms`: of computing; `fetch_ms`: measured."""
        self._gains_ms = [gain * _REMEMBERED for gain in self._gains_ms]
        self._gains_ms[bisect_right(_RATIOS, ratio) - 1] += saved_ms - fetch_ms
        self.value = self._best()

    def _best(self) -> float:
        """The ratio above which the gains' sum is greatest; of equals the least, for it lets more be tried."""
        best, greatest, total = _RATIOS[-1], -_NEGLIGIBLE_MS, 0.0
        for ratio, gain in zip(reversed(_RATIOS), reversed(self._gains_ms), strict=True):
            total += gain
            if total >= greatest - _NEGLIGIBLE_MS:
                best, greatest = ratio, max(total, greatest)
        return best


class TransferModel:
    """A link's rate is what it was measured to be, or else assumed (by who asks); transfers in flight at either end share it equally.

    Nodes have numbers here, so that the links from one source to every other node are columns.
    """

    def __init__(self) -> None:
        self.threshold = AdaptiveThreshold()
        self._number: dict[NodeId, int] = {}
        self._free: list[int] = []
        self._gone: set[NodeId] = set()
        """Those whose numbers transfers in flight still name."""
        self._rates: dict[int, Floats] = {}
        """Of the links that leave a source, by the destination's number; NaN where none was measured."""
        self._in_flight: dict[AttemptId, _Transfer] = {}
        self.links = LinkEnds.zeros(_FIRST_NODES)
        """[nodes], by the node's number."""

    def number(self, node_id: NodeId) -> int:
        """The node's number, until it is forgotten."""
        self._gone.discard(node_id)
        number = self._number.get(node_id)
        if number is None:
            number = self._number[node_id] = self._free.pop() if self._free else len(self._number)
            if number >= len(self.links):
                self.links = self.links.extended(np.zeros_like(self.links.rows))
                self._rates = {source: np.append(rates, np.full_like(rates, np.nan)) for source, rates in self._rates.items()}
        return number

    def rates_from(self, source: int) -> Floats | None:
        """[nodes] measured bytes a second from this node (number) to every other, NaN where none was; None where none at all was."""
        return self._rates.get(source)

    def begin(self, attempt_id: AttemptId, fetch: PlannedFetch) -> None:
        self.end(attempt_id)
        source, destination = self.number(fetch.source), self.number(fetch.destination)
        sharers = 1 + max(int(self.links.leaving[source]), int(self.links.arriving[destination]))
        self._in_flight[attempt_id] = _Transfer(fetch, source, destination, sharers)
        self.links.leaving[source] += 1
        self.links.arriving[destination] += 1

    def end(self, attempt_id: AttemptId, num_bytes: int = 0, elapsed_ms: float = 0.0) -> None:
        """The attempt's transfer, if it had one, is over; with both figures it becomes a measurement of its link, and of what fetching
        gains."""
        transfer = self._in_flight.pop(attempt_id, None)
        if transfer is None:
            return
        self.links.leaving[transfer.source] -= 1
        self.links.arriving[transfer.destination] -= 1
        is_measured = num_bytes > 0 and elapsed_ms > 0
        if is_measured and not self._gone & {transfer.fetch.source, transfer.fetch.destination}:
            self._measured(transfer, 1000.0 * num_bytes * transfer.sharers / elapsed_ms)
        fetch = transfer.fetch
        if is_measured and fetch.saved_ms is not None:
            self.threshold.fetched(fetch.ratio, fetch.saved_ms * min(num_bytes / fetch.num_bytes, 1.0), elapsed_ms)
        for node_id in self._gone & {transfer.fetch.source, transfer.fetch.destination}:
            self._release(node_id)

    def forget(self, node_id: NodeId) -> None:
        """The node is gone: so are the rates of its links. Its number is free for another once no transfer names it."""
        number = self._number.get(node_id)
        if number is None:
            return
        self._rates.pop(number, None)
        for rates in self._rates.values():
            rates[number] = np.nan
        self._gone.add(node_id)
        self._release(node_id)

    def __contains__(self, attempt_id: AttemptId) -> bool:
        return attempt_id in self._in_flight

    def validate(self, live: set[AttemptId]) -> None:
        """Asserts that every transfer in flight is that of one of `live`, and is counted once at either end, and that no number is lost."""
        assert sorted([*self._number.values(), *self._free]) == list(range(len(self._number) + len(self._free))), "a number is lost"
        assert self._in_flight.keys() <= live, "a transfer outlived its attempt's prefill"
        transfers = self._in_flight.values()
        for counts, ends in (
            (self.links.leaving, Counter(transfer.source for transfer in transfers)),
            (self.links.arriving, Counter(transfer.destination for transfer in transfers)),
        ):
            assert {number: count for number, count in enumerate(counts.tolist()) if count} == ends, "transfers are miscounted"

    def _release(self, node_id: NodeId) -> None:
        number = self._number[node_id]
        if not self.links.leaving[number] and not self.links.arriving[number]:
            self._gone.discard(node_id)
            del self._number[node_id]
            self._free.append(number)

    def _measured(self, transfer: _Transfer, bytes_per_s: float) -> None:
        rates = self._rates.setdefault(transfer.source, np.full(len(self.links), np.nan))
        known = rates[transfer.destination]
        rates[transfer.destination] = bytes_per_s if np.isnan(known) else bytes_per_s + (1 - _SMOOTHING) * (known - bytes_per_s)
