"""Requests in idle capacity: where there is some for them, and that they count for nothing where others are concerned."""

from __future__ import annotations

import random
from typing import Any

import pytest

from conductor.core.conductor import ConductorCore
from conductor.core.placement.scheduler import decide
from conductor.core.types.decision import Alternatives
from springtide.ids import AttemptId, InstanceId
from springtide.protocol.attempts import LiveAttempt, Phase, Progress, Renew
from springtide.protocol.instances import IdleLoad, Role
from springtide.protocol.scheduling import Reason, Rejection, Schedule, Terms
from springtide.slices import at_once
from tests.conductor.conductor_support import GATEWAY, ask, assigned, make_core, report, request

IDLE = Terms(idle=True)


def idle_request(name: str, **fields: Any) -> Schedule:
    return request(name, terms=IDLE, **fields)


def not_idle(core: ConductorCore, event: Schedule, now: float = 0.0) -> Rejection:
    decision = ask(core, event, now).decision
    core.validate()
    assert isinstance(decision, Rejection) and decision.reason is Reason.NOT_IDLE, decision
    assert decision.retry_after_s > 0
    return decision


def test_an_empty_cluster_is_all_theirs() -> None:
    core = make_core()
    assignment = assigned(core, idle_request("a"))
    assert not assignment.waits and not assignment.refusable
    core.validate()


def test_they_are_spread_over_what_is_empty() -> None:
    core = make_core(decodes=("d0", "d1"))
    first, second = assigned(core, idle_request("a", text=1)), assigned(core, idle_request("b", text=2))
    assert {first.prefill.instance_id, second.prefill.instance_id} == {"p0", "p1"}
    assert {first.decode.instance_id, second.decode.instance_id} == {"d0", "d1"}


def test_a_prefill_queue_is_left_alone_whoever_is_in_it() -> None:
    core = make_core(prefills=("p0",))
    report(core, "p0", Role.PREFILL, queue_ms=300.0)
    not_idle(core, idle_request("a"))
    report(core, "p0", Role.PREFILL, idle=IdleLoad(running=1, queue_ms=300.0))
    not_idle(core, idle_request("a"))
    report(core, "p0", Role.PREFILL, queue_ms=100.0)
    assigned(core, idle_request("a"))


def test_what_was_placed_since_the_report_counts() -> None:
    core = make_core(prefills=("p0",))
    assigned(core, idle_request("a"))
    not_idle(core, idle_request("b", text=1))
    core.handle(Progress(AttemptId("a"), Phase.DECODE), 1.0)
    report(core, "p0", Role.PREFILL, now=1.0)
    assigned(core, idle_request("b", text=1), now=1.0)


def test_a_decode_node_takes_so_many_of_them_as_a_part_of_the_objective_allows() -> None:
    core = make_core()
    # 10 ms, 1 for each and 0.01 for each of 401 tokens: an eighth of 200 ms are three.
    report(core, "d0", Role.DECODE, idle=IdleLoad(running=1, tokens=401, slots_held=100))
    assigned(core, idle_request("a"))
    report(core, "d0", Role.DECODE, idle=IdleLoad(running=2, tokens=1000, slots_held=200))
    not_idle(core, idle_request("b", text=1))


def test_beside_others_there_is_room_for_what_hardly_slows_them() -> None:
    core = make_core()
    # 21 ms; one more sequence of 401 tokens takes 5 ms, of 21 tokens 1.2.
    report(core, "d0", Role.DECODE, running=1, tokens=1000)
    not_idle(core, idle_request("a"))
    report(core, "d0", Role.DECODE, running=10, tokens=1000)
    not_idle(core, idle_request("a"))
    assigned(core, idle_request("a", num_tokens=21))


def test_places_and_slots_are_those_that_nobody_has() -> None:
    core = make_core()
    report(core, "d0", Role.DECODE, max_batch=2, idle=IdleLoad(running=2, tokens=2, slots_held=2))
    not_idle(core, idle_request("a", num_tokens=21))
    report(core, "d0", Role.DECODE, slots_available=1200, idle=IdleLoad(running=1, tokens=2, slots_held=2))
    not_idle(core, idle_request("a", num_tokens=21))
    report(core, "d0", Role.DECODE, slots_available=1300, idle=IdleLoad(running=1, tokens=2, slots_held=2))
    assigned(core, idle_request("a", num_tokens=21))


def test_who_is_alone_may_be_as_slow_and_as_large_as_it_is() -> None:
    core = make_core(tbt_slo_ms=5.0)
    report(core, "d0", Role.DECODE, slots_available=120, slots_total=120)
    assigned(core, idle_request("a"))
    core = make_core(tbt_slo_ms=5.0)
    report(core, "d0", Role.DECODE, idle=IdleLoad(running=1, tokens=2, slots_held=2))
    not_idle(core, idle_request("b"))


def test_what_is_too_large_or_for_nobody_is_told_as_ever() -> None:
    core = make_core()
    report(core, "d0", Role.DECODE, slots_total=50, slots_available=50)
    decision = ask(core, idle_request("a")).decision
    assert isinstance(decision, Rejection) and decision.reason is Reason.TOO_LARGE
    decision = ask(make_core(decodes=()), idle_request("a")).decision
    assert isinstance(decision, Rejection) and decision.reason is Reason.NO_DECODE


def test_those_that_were_accepted_before_wait_likewise() -> None:
    core = make_core(prefills=("p0",))
    report(core, "p0", Role.PREFILL, queue_ms=300.0)
    not_idle(core, idle_request("a", accepted=True))


def test_waiting_is_no_rejection_in_the_books() -> None:
    core = make_core(prefills=("p0",))
    report(core, "p0", Role.PREFILL, queue_ms=300.0)
    not_idle(core, idle_request("a"))
    assert not core.totals.rejected and core.totals.decided == 0


def plain(core: ConductorCore, name: str, now: float) -> str:
    decided = ask(core, request(name, text=7, num_tokens=201), now)
    assert decided.alternatives.others is None
    return decided.alternatives.to_json()


def test_others_are_placed_and_judged_as_if_they_were_not_there() -> None:
    twins = [make_core(decodes=("d0", "d1")), make_core(decodes=("d0", "d1"))]
    busy, quiet = twins
    for core in twins:
        assigned(core, request("first", text=3))
    for i in range(3):
        ask(busy, idle_request(f"idle-{i}", text=10 + i))
        busy.validate()
    for core in twins:
        report(core, "p0", Role.PREFILL, now=1.0, idle=IdleLoad(running=1, queue_ms=500.0, slots_held=9) if core is busy else IdleLoad())
        left = {"slots_available": 9_800, "idle": IdleLoad(running=4, tokens=900, slots_held=200)} if core is busy else {}
        report(core, "d0", Role.DECODE, now=1.0, **left)
    # Decisions are numbered; that is all they share.
    for core in twins:
        core.totals.scheduled = 1
    assert plain(busy, "x", 1.0) == plain(quiet, "x", 1.0)
    assert at_once(busy.pool_loads(1.0)) == at_once(quiet.pool_loads(1.0))
    assert busy.state.mean_output_tokens == quiet.state.mean_output_tokens


def test_their_outputs_and_waits_teach_nothing_about_others() -> None:
    core = make_core()
    before = core.state.lengths.predict("", 1e9)
    for i in range(50):
        assigned(core, idle_request(f"a{i}", num_tokens=21), now=float(i))
        assert core.handle(Progress(AttemptId(f"a{i}"), Phase.DECODE, ttft_ms=9e4), float(i)) == []
        assert core.handle(Progress(AttemptId(f"a{i}"), Phase.FINISHED, output_tokens=16), float(i)) == []
    assert core.state.lengths.predict("", 1e9) == before
    assert core.scores.errors.summaries() == make_core().scores.errors.summaries()


def test_a_conductor_that_learns_of_them_later_counts_them_likewise() -> None:
    core = make_core(prefills=("p0",))
    live = LiveAttempt(AttemptId("a"), InstanceId("p0"), InstanceId("d0"), Phase.PREFILL, num_tokens=401, idle=True)
    core.handle(Renew(GATEWAY, (live,)), 0.0)
    core.validate()
    not_idle(core, idle_request("b", text=1))
    assert assigned(core, request("online", text=2)).prediction.queue_ms == 0


@pytest.mark.parametrize("seed", range(5))
def test_decisions_are_repeated_from_their_lines(seed: int) -> None:
    rng = random.Random(seed)
    core = make_core(decodes=("d0", "d1"))
    placed = 0
    for i in range(60):
        for name in ("d0", "d1"):
            there = IdleLoad(running=rng.randrange(3), tokens=rng.randrange(900), slots_held=rng.randrange(9))
            report(core, name, Role.DECODE, now=float(i), running=rng.randrange(3), tokens=rng.randrange(900), idle=there)
        for name in ("p0", "p1"):
            report(
                core, name, Role.PREFILL, now=float(i), queue_ms=rng.choice([0.0, 0.0, 400.0]), idle=IdleLoad(queue_ms=rng.random() * 300)
            )
        decided = ask(core, request(f"a{i}", text=i, num_tokens=rng.choice([21, 401]), terms=rng.choice([IDLE, Terms()])), float(i))
        core.validate()
        placed += decided.assignment is not None
        assert decide(Alternatives.from_json(decided.alternatives.to_json())) == decided.decision, f"seed {seed}"
    assert 0 < placed < 60
