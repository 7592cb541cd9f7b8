"""When a longer prefix elsewhere is worth fetching: `kvcache_balancing_threshold` of Algorithm 1, learnt from what fetching came to.

The paper (arXiv 2407.00079, section 6) has the threshold set by hand. Whether to fetch is first of all the prediction's business: what is
predicted to be computed sooner is never fetched. But a prediction may keep being too kind to the network, and the shorter the part that
is fetched in relation to what is there already, the less there is to gain. So of each fetch that is over its *gain* is taken: the time
that computing its tokens would have taken, by the cost model that is fitted to measured prefills, less the time it was measured to take.
The threshold is the ratio of best to local prefix from which on the fetches of late have gained something in sum.
"""

from __future__ import annotations

from bisect import bisect_right

_RATIOS = (1.0, 1.125, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""The thresholds to choose from: each begins a class of fetches, up to the next."""
_REMEMBERED = 0.98
"""What the classes' sums keep of themselves with each new fetch: some 50 fetches count. A class that is shut out brings no news, so its
losses fade beside those of the others; after a while it is below `_NEGLIGIBLE_MS`, and is tried once more."""
_NEGLIGIBLE_MS = 1.0


class AdaptiveThreshold:
    """Learns from every fetch; asked for `value` when the configured threshold is `auto`."""

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
