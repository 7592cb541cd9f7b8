"""How long outputs get: the recent ones of each tenant, and of the whole cluster. A cluster serves one model, so a tenant's history is
that of (tenant, model).

The uniform assumption of arXiv 2407.00079, section 7.4 (every request decodes for the same time) is the cluster's history here. A tenant's
own history takes its place while it is predicting that tenant's outputs better.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict

import numpy as np

from conductor._native import BINS_PER_ROOT
from conductor.core.types.arrays import Floats, Ints

CLUSTER = 0
"""The law that holds for everybody."""
INITIAL_MEAN_TOKENS = 128.0
_PRIOR_SAMPLES = 16
_CLUSTER_WINDOW = 1024
_TENANT_WINDOW = 256
_MOST_TENANTS = 255
_ENOUGH = 16
"""Outputs of a tenant below which its history says little."""
_REFRESH_EVERY = 16
"""Outputs after which the derived figures are computed anew, some 20 us."""
_ERROR_SMOOTHING = 0.05
_BINS = 1024
"""At BINS_PER_ROOT: 2 tokens wide at 16, 16 at 1,000; the last one begins at 65,536."""
_LEAST_SHARE = 1e-3
_LASTS_ON = 4
"""An output longer than any is expected to become longer by one part in so many."""
_EDGES = np.array([*(np.arange(_BINS) / BINS_PER_ROOT) ** 2, np.inf])
"""Of the bins, and the end of the last."""


class RunningOutputs:
    """How long the outputs are by now that have not ended."""

    def __init__(self) -> None:
        self.count = 0
        self.at_most: Ints = np.zeros(len(_EDGES), np.int64)
        """[edges of the bins] how many are at most so long."""

    def add(self, tokens: Floats) -> None:
        """Counts further ones, of these lengths."""
        self.count += len(tokens)
        self.at_most += np.bincount(_EDGES.searchsorted(tokens), minlength=len(_EDGES)).cumsum()


class _History:
    """A sliding window of output lengths, and what follows from it."""

    def __init__(self, window: int, prior: Floats) -> None:
        self._ring: Floats = np.zeros(window)
        self._ring[: len(prior)] = prior
        self._seen = len(prior)
        self._stale = 0
        self.own_error = 0.0
        self.cluster_error = 0.0
        """Smoothed |predicted - actual| in tokens, by this history and by the cluster's."""
        self.sorted: list[float] = []
        self._ordered: Floats = self._ring
        """As `sorted`."""
        self._sums: list[float] = [0.0]
        self.refresh()

    def __len__(self) -> int:
        return min(self._seen, len(self._ring))

    def append(self, output_tokens: float) -> bool:
        """True when the derived figures have changed."""
        self._ring[self._seen % len(self._ring)] = output_tokens
        self._seen += 1
        self._stale += 1
        if self._stale < _REFRESH_EVERY and self._seen > 2 * _REFRESH_EVERY:
            return False
        self.refresh()
        return True

    def refresh(self) -> None:
        self._stale = 0
        ordered = self._ordered = np.sort(self._ring[: len(self)])
        self.sorted = ordered.tolist()
        self._sums = [0.0, *np.cumsum(ordered).tolist()]

    def mean(self, at_most: float, after: float = 0) -> float:
        """The mean of what comes after so many tokens, at most `at_most`, of outputs that are longer. Of one that is longer than all of
        them, a quarter of what it has."""
        first = bisect_right(self.sorted, after) if after else 0
        longer = len(self.sorted) - first
        if not longer:
            return min(after / _LASTS_ON, at_most)
        below = bisect_right(self.sorted, after + at_most)
        above = len(self.sorted) - below
        return (self._sums[below] - self._sums[first] - after * (below - first) + (at_most * above if above else 0.0)) / longer

    def survival(self, running: RunningOutputs) -> Floats:
        """[bins]: the share of outputs longer than a bin's edge, never 0: an output beyond the longest one seen is taken to go on.

        Those that have not ended count up to where they are (Kaplan and Meier 1958, by bins): without them, a cluster that has just started
        would know of short outputs only.
        """
        ended, censored = self._ordered.searchsorted(_EDGES, side="right"), running.at_most
        at_risk = len(self.sorted) - ended[:-1] + running.count - censored[:-1]
        deaths, losses = ended[1:] - ended[:-1], censored[1:] - censored[:-1]
        exposed = np.maximum(at_risk - losses / 2, np.maximum(deaths, 0.5))
        share = np.cumprod(1.0 - deaths / exposed)
        first = 1.0 - ended[0] / max(len(self.sorted) + running.count, 1)
        return np.asarray(np.maximum(first * np.concatenate([[1.0], share[:-1]]), _LEAST_SHARE))


class OutputLengths:
    """The recent outputs' lengths, and what they predict.

    Memory is bounded: 2 KiB of lengths and 8 KiB of derived figures for each of the 255 tenants last heard of, and the like for the
    cluster.
    """

    def __init__(self) -> None:
        # Until there is a history: lengths as the quantiles of an exponential distribution, which the first real ones then displace.
        shares = (np.arange(_PRIOR_SAMPLES) + 0.5) / _PRIOR_SAMPLES
        prior = -np.log1p(-shares)
        self._cluster = _History(_CLUSTER_WINDOW, prior * (INITIAL_MEAN_TOKENS / prior.mean()))
        self._tenants: OrderedDict[str, tuple[int, _History]] = OrderedDict()
        self.survival: Floats = np.ones((1 + _MOST_TENANTS, _BINS))
        """[laws, bins]: the share of outputs under each law that are longer than a bin's edge."""
        self._running = RunningOutputs()
        self.survival[CLUSTER] = self._cluster.survival(self._running)

    @property
    def mean_tokens(self) -> float:
        """The mean length of the cluster's recent outputs."""
        return self._cluster.mean(float("inf"))

    def record(self, tenant: str, output_tokens: int) -> None:
        """An output of the tenant's ended."""
        law, history = self._of(tenant)
        if len(history) >= _ENOUGH:
            own_error = abs(history.mean(float("inf")) - output_tokens)
            cluster_error = abs(self.mean_tokens - output_tokens)
            history.own_error += _ERROR_SMOOTHING * (own_error - history.own_error)
            history.cluster_error += _ERROR_SMOOTHING * (cluster_error - history.cluster_error)
        if history.append(output_tokens):
            self.survival[law] = history.survival(RunningOutputs())
        if self._cluster.append(output_tokens):
            self.survival[CLUSTER] = self._cluster.survival(self._running)

    def watch(self, running: RunningOutputs) -> None:
        """How long the outputs are by now that have not ended, of everybody. To be told about once a second."""
        self._running = running
        self.survival[CLUSTER] = self._cluster.survival(self._running)

    def law(self, tenant: str) -> int:
        """Which history predicts this tenant's outputs: its own where that has been the better one, or CLUSTER."""
        known = self._tenants.get(tenant)
        if known is None or len(known[1]) < _ENOUGH or known[1].own_error >= known[1].cluster_error:
            return CLUSTER
        return known[0]

    def predict(self, tenant: str, at_most: float, after: int = 0) -> float:
        """Expected output tokens of one of the tenant's requests that may have `at_most`, beyond those `after` which they come."""
        history = self._cluster if self.law(tenant) == CLUSTER else self._tenants[tenant][1]
        return history.mean(at_most, after)

    def _of(self, tenant: str) -> tuple[int, _History]:
        known = self._tenants.pop(tenant, None)
        if known is None:
            law = len(self._tenants) + 1
            if law > _MOST_TENANTS:
                # Attempts that still go by its law go by its successor's, which is as good a guess.
                _, (law, _) = self._tenants.popitem(last=False)
            known = law, _History(_TENANT_WINDOW, np.zeros(0))
        self._tenants[tenant] = known
        return known
