"""The limits of a request: how much of the load's headroom it may use when that gets scarce, by its priority, its tenant and its size."""

from __future__ import annotations

import math
from collections.abc import Mapping

from conductor.core.decayed_sums import DecayedSums
from conductor.core.types.decision import Limit, LimitedBy

EVERYBODY_ELSE = "*"
"""In the weights: any tenant that is not named."""
_TIME_CONSTANT_S = 60.0
_MOST_PRIORITIES = 64
_MOST_TENANTS = 1024
_SETTLE_EVERY_S = 0.25
_ROUNDING = 1e-9
_SETTLE_EVERY_REQUESTS = 32
_POWER = 0.25
"""The share is the inverse of the relative cost to this power. Chosen by the load of docs/experiments/overload.md, on which .2 to .3 differ
little."""
_LEAST_SHARE = 0.1
_FROM_LOAD, _FULLY_AT_LOAD = 0.5, 0.8
"""Of the headroom, the part in use in the recent mean, between which the rule comes to hold."""
_NO_LIMIT = Limit(1.0, LimitedBy.OBJECTIVES)


class DemandLimits:
    """The limits that come of who asks for how much, by priority and by tenant. Amounts of work are in instance-milliseconds, of the recent
    minute or so.

    A limit of 1 means up to the objectives themselves. Less than 1 is kept to by those whose turn to be refused comes first: requests
    of low priority while there are more important ones, and tenants that have had more than their share. Both only bite under load, and
    with nobody to give way to, there is no limit below 1.
    """

    def __init__(self, weights: Mapping[str, float], headroom: float) -> None:
        """`headroom`: the most that is kept free for others, in [0, 1)."""
        self._headroom = headroom
        self._priorities: DecayedSums[int] = DecayedSums(_TIME_CONSTANT_S, _MOST_PRIORITIES)
        self.tenants = TenantShares(weights)

    def ask(self, tenant: str, priority: int, work_ms: float, now: float) -> Limit:
        """Takes in that somebody asks for so much, and answers how far it may go."""
        self._priorities.add(priority, work_ms, now)
        self.tenants.ask(tenant, work_ms, now)
        if len(self._priorities) == 1 and len(self.tenants) == 1:
            return _NO_LIMIT
        for_priority = 1.0 - min(self._headroom, self._share_above(priority, now))
        for_tenant = 1.0 - self._headroom * min(self.tenants.excess(tenant, now), 1.0)
        share = for_priority * for_tenant
        if share == 1.0:
            return _NO_LIMIT
        return Limit(share, LimitedBy.PRIORITY if for_priority <= for_tenant else LimitedBy.TENANT)

    def _share_above(self, priority: int, now: float) -> float:
        """Of the recent demand, what was more important than this."""
        demand = self._priorities.items(now)
        total = sum(demand.values())
        return sum(work for other, work in demand.items() if other > priority) / total if total > 0 else 0.0


class TenantShares:
    """Weighted max-min fairness: the work that was admitted is divided by weight, and what a tenant did not ask for goes to the others."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._others = weights.get(EVERYBODY_ELSE, 1.0)
        self._asked: DecayedSums[str] = DecayedSums(_TIME_CONSTANT_S, _MOST_TENANTS)
        self._admitted: DecayedSums[str] = DecayedSums(_TIME_CONSTANT_S, _MOST_TENANTS)
        self._excess: dict[str, float] = {}
        self._settled_at = float("-inf")
        self._since_settled = 0

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, tenant: str, work_ms: float, now: float) -> None:
        self._asked.add(tenant, work_ms, now)

    def admit(self, tenant: str, work_ms: float, now: float) -> None:
        """What was asked for is granted."""
        self._admitted.add(tenant, work_ms, now)

    def excess(self, tenant: str, now: float) -> float:
        """How much more than its share the tenant has been given, relative to the share; 0 for less. Settled anew a few times a
        second, for it takes a look at all tenants."""
        self._since_settled += 1
        if now - self._settled_at >= _SETTLE_EVERY_S or self._since_settled >= _SETTLE_EVERY_REQUESTS:
            self._settled_at, self._since_settled = now, 0
            self._settle(now)
        return self._excess.get(tenant, 0.0)

    def _settle(self, now: float) -> None:
        admitted, asked = self._admitted.items(now), self._asked.items(now)
        shares = fair_shares(asked, {tenant: self._weights.get(tenant, self._others) for tenant in asked}, sum(admitted.values()))
        excess = {tenant: work / shares[tenant] - 1.0 for tenant, work in admitted.items() if shares.get(tenant, 0.0) > 0}
        self._excess = {tenant: above for tenant, above in excess.items() if above > _ROUNDING}


def fair_shares(demand: Mapping[str, float], weights: Mapping[str, float], capacity: float) -> dict[str, float]:
    """Divides `capacity` by weight among those who demand something; nobody gets more than the demand, and what is left over goes to the
    rest. Weights are positive."""
    shares: dict[str, float] = {}
    left, weight_left = capacity, sum(weights[tenant] for tenant in demand)
    for tenant in sorted(demand, key=lambda name: (demand[name] / weights[name], name)):
        shares[tenant] = min(demand[tenant], left * weights[tenant] / weight_left)
        left -= shares[tenant]
        weight_left -= weights[tenant]
    return shares


class SizeLimits:
    """The limits by size: how far a request may go into the decode pool's headroom by what it costs there. When it gets scarce, one
    that takes much gives way to the many that take little.

    Trunk reservation, as telephone exchanges do it (F. P. Kelly, Loss Networks, 1991): a call that takes many lines is put through only
    while more than so many are free, for else it keeps out several small ones. What counts is a request's cost relative to the recent
    mean of those with no higher claim than its own; and in a pool that was far from full of late nothing is kept free. The prefill pool
    needs no such rule: a queue is over in seconds, and long prompts, which leave the least slack to wait in, are refused first as it
    is.
    """

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
        left = math.exp((self.since - now) / _TIME_CONSTANT_S)
        self.requests *= left
        self.token_steps *= left
        self.load *= left
        self.since = now
