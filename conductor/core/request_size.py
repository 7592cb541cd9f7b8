"""How far a request may go into the load's headroom by what it costs: when it gets scarce, one that takes much gives way to the many that
take little.

Trunk reservation, as telephone exchanges do it (F. P. Kelly, Loss Networks, 1991): a call that takes many lines is put through only while
more than so many are free, for else it keeps out several small ones. What counts is a request's cost relative to the recent mean of those
with no higher claim than its own, of each pool by itself: a long prompt that is cached costs the prefill pool nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
        self._by_priority: dict[int, _Costs] = {}

    def ask(self, priority: int, prefill_ms: float, decode_token_steps: float, now: float) -> SizeShares:
        """`decode_token_steps`: context tokens, summed over the request's steps. Somebody asks for so much; the answer is how far it may
        go. One of higher priority than most is measured against its like."""
        own = self._by_priority.get(priority)
        if own is None:
            own = self._by_priority[priority] = _Costs(now)
            if len(self._by_priority) > _MOST_PRIORITIES:
                del self._by_priority[min(self._by_priority, key=lambda other: self._by_priority[other].since)]
        own.fade(now)
        own.add(prefill_ms, decode_token_steps)
        count, prefills_ms, steps = own.requests, own.prefill_ms, own.decode_token_steps
        for other, costs in self._by_priority.items() if len(self._by_priority) > 1 else ():
            if other > priority:
                costs.fade(now)
                count, prefills_ms, steps = count + costs.requests, prefills_ms + costs.prefill_ms, steps + costs.decode_token_steps
        prefill = _share(prefill_ms, prefills_ms / count, _PREFILL_POWER)
        return SizeShares(prefill, _share(decode_token_steps, steps / count, _DECODE_POWER))


class _Costs:
    """Sums of one priority's requests, as of `since`; what is older counts less and less."""

    __slots__ = ("decode_token_steps", "prefill_ms", "requests", "since")

    def __init__(self, since: float) -> None:
        self.requests = self.prefill_ms = self.decode_token_steps = 0.0
        self.since = since

    def fade(self, now: float) -> None:
        left = math.exp((self.since - now) / TIME_CONSTANT_S)
        self.requests *= left
        self.prefill_ms *= left
        self.decode_token_steps *= left
        self.since = now

    def add(self, prefill_ms: float, decode_token_steps: float) -> None:
        self.requests += 1
        self.prefill_ms += prefill_ms
        self.decode_token_steps += decode_token_steps


def _share(cost: float, mean: float, power: float) -> float:
    return max((mean / cost) ** power, _LEAST_SHARE) if cost > mean else 1.0
