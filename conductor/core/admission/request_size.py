"""How far a request may go into the decode pool's headroom by what it costs there: when it gets scarce, one that takes much gives way to
the many that take little.

Trunk reservation, as telephone exchanges do it (F. P. Kelly, Loss Networks, 1991): a call that takes many lines is put through only while
more than so many are free, for else it keeps out several small ones. What counts is a request's cost relative to the recent mean of those
with no higher claim than its own; and in a pool that was far from full of late nothing is kept free. The prefill pool needs no such rule:
a queue is over in seconds, and long prompts, which leave the least slack to wait in, are refused first as it is.
"""

from __future__ import annotations

import math

TIME_CONSTANT_S = 60.0
_MOST_PRIORITIES = 64
_POWER = 0.25
"""The share is the inverse of the relative cost to this power. Chosen by the load of docs/experiments/overload.md, on which .2 to .3 differ
little."""
_LEAST_SHARE = 0.1
_FROM_LOAD, _FULLY_AT_LOAD = 0.5, 0.8
"""Of the headroom, the part in use in the recent mean, between which the rule comes to hold."""


class RequestSizes:
    """The costs that were asked for of late, by priority."""

    def __init__(self) -> None:
        self._by_priority: dict[int, _Costs] = {}

    def ask(self, priority: int, token_steps: float, load: float, now: float) -> float:
        """Takes in that somebody asks for so much, context tokens summed over the request's steps, and finds so much of the headroom in
        use. The answer is the share of the headroom, in (0, 1], that it may find in use. One of higher priority than most is measured
        against its like."""
        own = self._by_priority.get(priority)
        if own is None:
            own = self._by_priority[priority] = _Costs(now)
            if len(self._by_priority) > _MOST_PRIORITIES:
                del self._by_priority[min(self._by_priority, key=lambda other: self._by_priority[other].since)]
        own.fade(now)
        own.requests += 1
        own.token_steps += token_steps
        own.load += load
        requests, total, loads = own.requests, own.token_steps, own.load
        for other, costs in self._by_priority.items() if len(self._by_priority) > 1 else ():
            if other > priority:
                costs.fade(now)
                requests, total, loads = requests + costs.requests, total + costs.token_steps, loads + costs.load
        held = (loads / requests - _FROM_LOAD) / (_FULLY_AT_LOAD - _FROM_LOAD)
        mean = total / requests
        if held <= 0.0 or token_steps <= mean:
            return 1.0
        share: float = max((mean / token_steps) ** _POWER, _LEAST_SHARE)
        return 1.0 - min(held, 1.0) * (1.0 - share)


class _Costs:
    """Sums of one priority's requests, as of `since`; what is older counts less and less. As DecayedSums, but with one exponential for all
    of them: it is in the way of every decision."""

    __slots__ = ("load", "requests", "since", "token_steps")

    def __init__(self, since: float) -> None:
        self.requests = self.token_steps = self.load = 0.0
        self.since = since

    def fade(self, now: float) -> None:
        left = math.exp((self.since - now) / TIME_CONSTANT_S)
        self.requests *= left
        self.token_steps *= left
        self.load *= left
        self.since = now
