"""Instances move between the pools when the loads differ for long; the demand says which ratio it would want."""

from __future__ import annotations

from typing import Any

import pytest
from conductor_support import ask, bring_up, make_core, report, request

from conductor.core.conductor import ConductorCore
from conductor.core.pool_balance import PoolUse, PoolWork, decode_work_ms
from conductor.core.settings import PoolBalanceSettings
from conductor.core.types.events import InstanceDown, SwitchFailed, SwitchRole
from springtide.clock import Tick
from springtide.cost import DecodeCost
from springtide.ids import AttemptId, InstanceId
from springtide.protocol.attempts import Phase, Progress
from springtide.protocol.instances import Load, Role
from springtide.protocol.scheduling import Terms
from springtide.slices import at_once

BALANCE = PoolBalanceSettings(least_load=0.7, ratio=2.0, after_s=30.0, pause_s=100.0, drain_s=10.0)


def busy_core(prefills: int = 2, decodes: int = 3, **changes: Any) -> ConductorCore:
    """Long prompts, short outputs: the demand is all for prefill."""
    core = make_core(
        [f"p{number}" for number in range(prefills)], [f"d{number}" for number in range(decodes)], pool_balance=BALANCE, **changes
    )
    core.state.lengths.record("", 16)
    for turn in range(20):
        ask(core, request(f"r{turn}", 8001, text=turn))
    for attempt_id in list(core.state.attempts):
        core.handle(Progress(attempt_id, Phase.FAILED), 0.0)
    return core


def load_prefill(core: ConductorCore, now: float, queue_ms: float = 9_000.0) -> None:
    """All prefill instances wait for so long, of the 10 s that the objective allows; decode instances have next to nothing."""
    for instance in list(core.state.instances.values()):
        if instance.up:
            fields: dict[str, float] = {"queue_ms": queue_ms} if instance.ref.role is Role.PREFILL else {}
            report(core, instance.ref.instance_id, instance.ref.role, now=now, incarnation=instance.incarnation, **fields)


def moves(core: ConductorCore, start: int, end: int, queue_ms: float = 9_000.0) -> list[tuple[int, SwitchRole]]:
    """What is ordered, and when, with a tick each second."""
    found = []
    for second in range(start, end):
        load_prefill(core, float(second), queue_ms)
        found += [(second, action) for action in core.handle(Tick(), float(second)) if isinstance(action, SwitchRole)]
        core.validate()
    return found


def test_the_idlest_of_the_other_pool_moves_once_the_loads_have_differed_for_long() -> None:
    core = busy_core()
    ((second, move),) = moves(core, 1, 60)
    assert second == 31
    assert (move.instance.instance_id, move.instance.role, move.order.to, move.order.drain_s) == ("d0", Role.DECODE, Role.PREFILL, 10.0)
    assert core.balance is not None
    assert core.balance.moving == "d0"


def test_a_break_begins_the_wait_anew() -> None:
    core = busy_core()
    assert moves(core, 1, 30) == []
    assert moves(core, 30, 31, queue_ms=6_000.0) == []
    assert [second for second, _ in moves(core, 31, 90)] == [61]


def test_after_a_move_there_is_a_pause_and_the_last_of_a_role_stays() -> None:
    core = busy_core(prefills=2, decodes=3)
    ((second, move),) = moves(core, 1, 32)
    name = move.instance.instance_id
    core.handle(InstanceDown(name, 1), float(second))
    bring_up(core, name, Role.PREFILL, incarnation=2, now=40.0)
    assert moves(core, 40, 140) == []
    ask(core, request("more", 8001), 140.0)
    core.handle(Progress(AttemptId("more"), Phase.FAILED), 140.0)
    ((_, next_move),) = moves(core, 140, 180)
    assert next_move.instance.instance_id == "d1"
    core.handle(InstanceDown(InstanceId("d1"), 1), 180.0)
    bring_up(core, "d1", Role.PREFILL, incarnation=2, now=180.0)
    assert moves(core, 180, 500) == []


def test_an_instance_that_never_arrives_holds_up_no_other_move() -> None:
    core = busy_core()
    found = moves(core, 1, 300)
    assert [second for second, _ in found] == [31, 31 + 10 + 120 + 100]


def test_an_order_that_was_not_taken_is_not_waited_for_and_another_instance_is_asked_next() -> None:
    core = busy_core()
    ((second, move),) = moves(core, 1, 32)
    core.handle(SwitchFailed(InstanceId("somebody else")), float(second))
    assert core.balance is not None
    assert core.balance.moving == move.instance.instance_id == "d0"
    core.handle(SwitchFailed(move.instance.instance_id), float(second))
    assert core.balance.moving is None
    assert [(when, again.instance.instance_id) for when, again in moves(core, 32, 200)] == [(31 + 100, "d1")]


def test_nothing_moves_where_it_would_only_reverse_the_roles() -> None:
    core = busy_core(prefills=5, decodes=2)
    for name in ("d0", "d1"):
        report(core, name, Role.DECODE, running=8, tokens=800, step_ms=80.0)
    assert core.balance is not None
    found = []
    for second in range(1, 100):
        for number in range(5):
            report(core, f"p{number}", Role.PREFILL, now=second, queue_ms=7_500.0)
        for name in ("d0", "d1"):
            # 10 + 50 + 10 of the 200 ms: 0.35, and 0.7 for one alone, of which the others would have 0.62.
            report(core, name, Role.DECODE, now=second, running=50, tokens=1_000, step_ms=70.0)
        found += core.handle(Tick(), float(second))
    assert found == []


def test_nothing_moves_against_what_the_demand_asks_for() -> None:
    core = make_core(["p0", "p1"], ["d0", "d1", "d2"], pool_balance=BALANCE)
    for _ in range(20):
        core.state.lengths.record("", 4_000)
    for turn in range(20):
        ask(core, request(f"r{turn}", 5, text=turn))
    for attempt_id in list(core.state.attempts):
        core.handle(Progress(attempt_id, Phase.FAILED), 0.0)
    assert moves(core, 1, 100) == []


def test_without_the_setting_nothing_moves_and_the_wanted_ratio_is_still_told() -> None:
    core = make_core(["p0", "p1"], ["d0", "d1"])
    assert core.demand.work(0.0).wanted(Role.PREFILL, 4) is None
    for turn in range(20):
        ask(core, request(f"r{turn}", 8001, text=turn))
    work = core.demand.work(1.0)
    assert work.wanted(Role.PREFILL, 4) == 3
    assert work.wanted(Role.DECODE, 4) == 1
    assert moves(core, 1, 100) == []


@pytest.mark.parametrize("seconds", [20, 60, 120, 1_000])
def test_a_second_of_work_each_second_keeps_one_instance_busy_from_the_first_minute_on(seconds: int) -> None:
    core = make_core(["p0"], ["d0"], ttft_slo_ms=1e9)
    for second in range(seconds):
        ask(core, request(f"r{second}", 1_001, text=second), float(second))
    for work in (core.demand.work(float(seconds)), core.demand.recent_work(float(seconds))):
        assert work.prefill == pytest.approx(1.0, rel=0.03)


def test_a_step_of_the_work_is_seen_in_full_within_a_minute_and_a_half_and_its_end_too() -> None:
    """By whoever sets the sizes of the pools; their ratio follows more slowly."""
    core = make_core(["p0"], ["d0"], ttft_slo_ms=1e9)

    def ask_until(first: int, last: int, each_s: int) -> float:
        for second in range(first, last, each_s):
            ask(core, request(f"r{second}", 1_001, text=second), float(second))
        return float(last)

    before = core.demand.recent_work(ask_until(0, 600, 10)).prefill
    step = core.demand.recent_work(now := ask_until(600, 690, 1)).prefill
    assert before == pytest.approx(0.1, rel=0.2) and step > 0.9
    assert core.demand.work(now).prefill < 0.7
    assert core.demand.recent_work(ask_until(690, 780, 10)).prefill < 0.2


@pytest.mark.parametrize(
    ("work", "prefill"), [(PoolWork(0.3, 0.1), 6), (PoolWork(1.0, 0.0), 7), (PoolWork(0.0, 5.0), 1), (PoolWork(1.0, 1.0), 4)]
)
def test_each_role_is_wanted_at_least_once(work: PoolWork, prefill: int) -> None:
    assert (work.wanted(Role.PREFILL, 8), work.wanted(Role.DECODE, 8)) == (prefill, 8 - prefill)


def test_decode_work_is_the_share_in_the_largest_batch_that_is_allowed() -> None:
    load = Load(slots_total=1_000, max_batch=64, decode_cost=DecodeCost(fixed_ms=10.0, per_sequence_ms=1.0, per_context_token_ms=0.01))
    # 900 tokens of context on average: 10 ms a step for each. 19 of them take 200 ms.
    assert decode_work_ms(load, 850, 100.0, 10, 200.0) == pytest.approx(100 * 200 / 19)
    # Slots for four only: each step of 50 ms is shared by four.
    assert decode_work_ms(load, 850, 100.0, 250, 200.0) == pytest.approx(100 * 50 / 4)
    # The objective is missed even alone.
    assert decode_work_ms(load, 850, 100.0, 10, 5.0) == pytest.approx(100 * 20)


def test_what_a_pool_has_to_do_is_what_its_instances_report_and_what_was_placed_since() -> None:
    core = make_core(["p0", "p1"], ["d0"], ttft_slo_ms=1e9)
    assert at_once(core.pool_use(Role.DECODE)) == PoolUse(0, 0, 0, 0.0)
    report(core, "p0", Role.PREFILL, running=1, waiting=2, tokens=3_000)
    report(core, "p1", Role.PREFILL, running=1, tokens=500)
    report(core, "d0", Role.DECODE, running=3, tokens=900, slots_available=7_500, slots_promised=500)
    prefill = at_once(core.pool_use(Role.PREFILL))
    assert (prefill.running, prefill.waiting, prefill.tokens) == (2, 2, 3_500)
    assert at_once(core.pool_use(Role.DECODE)) == PoolUse(3, 0, 900, pytest.approx(0.3))
    ask(core, request("r", 401))
    placed = at_once(core.pool_use(Role.DECODE))
    assert placed.waiting == 1 and placed.kv_used > 0.3
    assert at_once(core.pool_use(Role.PREFILL)).waiting == 3


def test_the_first_token_of_a_request_that_is_refused_for_it_is_predicted_too() -> None:
    core = make_core(["p0"], ["d0"], ttft_slo_ms=1_000.0)
    report(core, "p0", Role.PREFILL, queue_ms=5_000.0)
    refused = ask(core, request("r", 401))
    assert refused.assignment is None and refused.predicted_ttft_ms == pytest.approx(5_401.0)
    report(core, "p0", Role.PREFILL)
    placed = ask(core, request("s", 401))
    assert placed.assignment is not None and placed.predicted_ttft_ms == placed.assignment.predicted_ttft_ms
    assert ask(core, request("t", 401, terms=Terms(idle=True))).predicted_ttft_ms is None
