"""Limits under overload: of priorities and of tenants."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.core.admission.limits import DemandLimits, TenantShares, fair_shares
from conductor.core.decayed_sums import DecayedSums
from conductor.core.types.decision import LimitedBy

TENANTS = st.sampled_from(["a", "b", "c", "d"])


def test_sums_decay_and_the_smallest_go_when_there_are_too_many() -> None:
    sums: DecayedSums[int] = DecayedSums(time_constant_s=10.0, most_keys=8)
    sums.add(0, 100.0, now=0.0)
    assert sums.get(0, 10.0) == pytest.approx(36.8, abs=0.1)
    for key in range(1, 100):
        sums.add(key, 1.0, now=0.0)
    assert len(sums) <= 8
    assert sums.get(0, 0.0) == 100.0


# ---- priorities ----


def test_nobody_is_limited_while_all_are_of_one_kind() -> None:
    demand = DemandLimits({}, headroom=0.2)
    assert all(demand.ask("a", 0, 10.0, now).share == 1.0 for now in range(20))


def test_low_priority_keeps_as_much_free_as_higher_ones_ask_for() -> None:
    demand = DemandLimits({}, headroom=0.5)
    for _ in range(9):
        demand.ask("", 0, 10.0, 0.0)
    assert demand.ask("", 5, 10.0, 0.0).share == 1.0
    limit = demand.ask("", 0, 0.0, 0.0)
    assert (limit.share, limit.by) == (pytest.approx(0.9), LimitedBy.PRIORITY)


def test_the_headroom_bounds_what_is_kept_free_and_is_given_back() -> None:
    demand = DemandLimits({}, headroom=0.2)
    for _ in range(100):
        demand.ask("", 1, 10.0, 0.0)
    assert demand.ask("", 0, 10.0, 0.0).share == pytest.approx(0.8)
    assert demand.ask("", 0, 10.0, 600.0).share > 0.99


# ---- tenants ----


def excesses(work: dict[str, tuple[float, float]], weights: dict[str, float] | None = None) -> dict[str, float]:
    """By tenant: (asked, admitted)."""
    shares = TenantShares(weights or {})
    for tenant, (asked, admitted) in work.items():
        shares.ask(tenant, asked, 0.0)
        shares.admit(tenant, admitted, 0.0)
    return {tenant: shares.excess(tenant, 0.0) for tenant in work}


def test_a_tenant_that_was_given_all_it_asked_for_beside_content_others_is_not_above_its_share() -> None:
    assert excesses({"greedy": (90.0, 90.0), "modest": (10.0, 10.0)}) == {"greedy": 0.0, "modest": 0.0}
    assert excesses({"alone": (90.0, 40.0)}) == {"alone": 0.0}


def test_under_overload_who_has_more_than_an_equal_share_is_above_it() -> None:
    found = excesses({"greedy": (200.0, 90.0), "hungry": (200.0, 10.0)})
    assert found == {"greedy": pytest.approx(0.8), "hungry": 0.0}


def test_weights_move_the_shares() -> None:
    work = {"gold": (200.0, 75.0), "iron": (200.0, 25.0)}
    assert excesses(work, {"gold": 3.0}) == {"gold": 0.0, "iron": 0.0}
    assert excesses(work, {"gold": 1.0, "*": 3.0})["gold"] == pytest.approx(2.0)


def test_what_a_modest_tenant_leaves_over_belongs_to_the_others() -> None:
    found = excesses({"modest": (10.0, 10.0), "a": (100.0, 60.0), "b": (100.0, 30.0)})
    assert found == {"modest": 0.0, "a": pytest.approx(60 / 45 - 1), "b": 0.0}


@given(st.dictionaries(TENANTS, st.floats(0.1, 1e4), min_size=1), st.floats(0.0, 2e4), st.data())
def test_fair_shares_use_the_capacity_and_favour_nobody(demand: dict[str, float], capacity: float, data: st.DataObject) -> None:
    weights = {tenant: data.draw(st.sampled_from([0.5, 1.0, 4.0])) for tenant in demand}
    shares = fair_shares(demand, weights, capacity)
    assert sum(shares.values()) == pytest.approx(min(capacity, sum(demand.values())))
    assert all(shares[tenant] <= demand[tenant] + 1e-9 for tenant in demand)
    level = max(shares[tenant] / weights[tenant] for tenant in demand)
    unsatisfied = [tenant for tenant in demand if shares[tenant] < demand[tenant] - 1e-6]
    assert all(shares[tenant] / weights[tenant] == pytest.approx(level) for tenant in unsatisfied)


def test_under_overload_tenants_end_up_with_shares_by_weight() -> None:
    """A server that does 10 ms of work a ms; two tenants that each ask for twice that, one of them with nine times as many requests."""
    source = random.Random(11)
    demand = DemandLimits({"gold": 3.0, "iron": 1.0}, headroom=0.2)
    backlog_ms, done = 0.0, {"gold": 0.0, "iron": 0.0}
    for millisecond in range(120_000):
        now = millisecond / 1000.0
        backlog_ms = max(0.0, backlog_ms - 10.0)
        for tenant, chance, work_ms in (("gold", 0.2, 100.0), ("iron", 0.9, 22.0)):
            if source.random() < chance:
                limit = demand.ask(tenant, 0, work_ms, now)
                if backlog_ms <= limit.share * 2000.0:
                    demand.tenants.admit(tenant, work_ms, now)
                    backlog_ms += work_ms
                    done[tenant] += work_ms if now > 60 else 0.0
    assert done["gold"] / done["iron"] == pytest.approx(3.0, rel=0.1)
