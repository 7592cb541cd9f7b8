"""Who asks for how much, by priority and by tenant; and from that, how much of the load's headroom each may use when it gets scarce.

A limit of 1 means up to the objectives themselves. Less than 1 is kept to by those whose turn to be refused comes first: requests of low
priority while there are more important ones, and tenants that have had more than their share. Both only bite under load, and with
nobody to give way to, there is no limit below 1.
"""

from __future__ import annotations

from collections.abc import Mapping

from conductor.core.decayed import DecayedSums
from conductor.core.types.outlook import Limit, LimitedBy

TIME_CONSTANT_S = 60.0
EVERYBODY_ELSE = "*"
"""In the weights: any tenant that is not named."""
_MOST_PRIORITIES = 64
_MOST_TENANTS = 1024
_SETTLE_EVERY_S = 0.25
_ROUNDING = 1e-9
_SETTLE_EVERY_REQUESTS = 32


class Demand:
    """Amounts of work are in instance-milliseconds, of the recent minute or so."""

    def __init__(self, weights: Mapping[str, float], headroom: float) -> None:
        """`headroom`: the most that is kept free for others, in [0, 1)."""
        self._headroom = headroom
        self._priorities: DecayedSums[int] = DecayedSums(TIME_CONSTANT_S, _MOST_PRIORITIES)
        self._tenants = TenantShares(weights)

    def ask(self, tenant: str, priority: int, work_ms: float, now: float) -> Limit:
        """Takes in that somebody asks for so much, and answers how far it may go."""
        self._priorities.add(priority, work_ms, now)
        self._tenants.ask(tenant, work_ms, now)
        if len(self._priorities) == 1 and len(self._tenants) == 1:
            return _NO_LIMIT
        for_priority = 1.0 - min(self._headroom, self._share_above(priority, now))
        for_tenant = 1.0 - self._headroom * min(self._tenants.excess(tenant, now), 1.0)
        share = for_priority * for_tenant
        if share == 1.0:
            return _NO_LIMIT
        return Limit(share, LimitedBy.PRIORITY if for_priority <= for_tenant else LimitedBy.TENANT)

    def admit(self, tenant: str, work_ms: float, now: float) -> None:
        """What was asked for is granted."""
        self._tenants.admit(tenant, work_ms, now)

    def _share_above(self, priority: int, now: float) -> float:
        """Of the recent demand, what was more important than this."""
        demand = self._priorities.items(now)
        total = sum(demand.values())
        return sum(work for other, work in demand.items() if other > priority) / total if total > 0 else 0.0


_NO_LIMIT = Limit(1.0, LimitedBy.OBJECTIVES)


class TenantShares:
    """Weighted max-min fairness: the work that was admitted is divided by weight, and what a tenant did not ask for goes to the others."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._others = weights.get(EVERYBODY_ELSE, 1.0)
        self._asked: DecayedSums[str] = DecayedSums(TIME_CONSTANT_S, _MOST_TENANTS)
        self._admitted: DecayedSums[str] = DecayedSums(TIME_CONSTANT_S, _MOST_TENANTS)
        self._excess: dict[str, float] = {}
        self._settled_at = float("-inf")
        self._since_settled = 0

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, tenant: str, work_ms: float, now: float) -> None:
        self._asked.add(tenant, work_ms, now)

    def admit(self, tenant: str, work_ms: float, now: float) -> None:
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
