"""How far a request may go into the load's headroom by what it costs: when it gets scarce, one that takes much gives way to the many that
take little.

Trunk reservation, as telephone exchanges do it (F. P. Kelly, Loss Networks, 1991): a call that takes many lines is put through only while
more than so many are free, for else it keeps out several small ones. What counts is a request's cost relative to the recent mean of those
with no higher claim than its own, of each pool by itself: a long prompt that is cached costs the prefill pool nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import starmap

from conductor.core.decayed import DecayedSums

TIME_CONSTANT_S = 60.0
_MOST_PRIORITIES = 64
_PREFILL_POWER, _DECODE_POWER = 0.5, 0.25
"""The share is the inverse of the relative cost to this power. Chosen by the load of docs/experiments/overload.md, on which .3 to .7 and .2
to .3 differ little."""
_LEAST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class SizeShares:
    """Of the headroom of each pool, in (0, 1]."""

    prefill: float
    decode: float


EVERYTHING = SizeShares(1.0, 1.0)


class RequestSizes:
    """The costs that were asked for of late, by priority."""

    def __init__(self) -> None:
        self._sums: tuple[DecayedSums[int], ...] = tuple(DecayedSums(TIME_CONSTANT_S, _MOST_PRIORITIES) for _ in range(3))
        """Of requests, of their costs in prefill, of those in decode."""

    def ask(self, priority: int, prefill_ms: float, decode_token_steps: float, now: float) -> SizeShares:
        """`decode_token_steps`: context tokens, summed over the request's steps. Somebody asks for so much; the answer is how far it may
        go. One of higher priority than most is measured against its like."""
        costs = prefill_ms, decode_token_steps
        for sums, amount in zip(self._sums, (1.0, *costs), strict=True):
            sums.add(priority, amount, now)
        count, *totals = (_from(sums, priority, now) for sums in self._sums)
        return SizeShares(*starmap(_share, zip(costs, (total / count for total in totals), (_PREFILL_POWER, _DECODE_POWER), strict=True)))


def _from(sums: DecayedSums[int], priority: int, now: float) -> float:
    return sum(amount for other, amount in sums.items(now).items() if other >= priority)


def _share(cost: float, mean: float, power: float) -> float:
    return max((mean / cost) ** power, _LEAST_SHARE) if cost > mean else 1.0
