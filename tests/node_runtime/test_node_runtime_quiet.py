"""Idle work beside others' on one machine: what is found of it, who rests when, and how the engines tell each other."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from node_runtime import neighbours
from node_runtime.neighbours import Neighbours
from node_runtime.quiet import FIRST_QUIET_S, LONGEST_QUIET_S, MOST_REST_S, Disturbance, IdleTurns

ENOUGH = 16


def observe(disturbance: Disturbance, ratio: float, beside: bool | None, now: float, times: int = ENOUGH) -> None:
    for _ in range(times):
        disturbance.observe(ratio, beside, now)


def found(slowed: float) -> Disturbance:
    disturbance = Disturbance(0.05)
    observe(disturbance, 1.2, False, 0.0)
    observe(disturbance, 1.2 * slowed, True, 0.0)
    return disturbance


def test_quiet_is_wanted_when_idle_work_slows_passes_by_more_than_it_may() -> None:
    assert found(1.2).wanted(0.0) and found(1.2).slowdown == pytest.approx(0.2)


def test_it_is_not_where_idle_work_costs_nothing_or_little() -> None:
    assert not found(1.0).wanted(0.0) and not found(1.04).wanted(0.0)


def test_a_slow_machine_is_not_a_disturbed_one() -> None:
    disturbance = Disturbance(0.05)
    observe(disturbance, 3.0, True, 0.0)
    assert not disturbance.wanted(0.0), "nothing is known of how long they take alone"
    observe(disturbance, 3.0, False, 0.0)
    observe(disturbance, 3.0, True, 0.0)
    assert not disturbance.wanted(0.0)


def test_what_was_beside_idle_work_for_a_part_of_the_time_says_nothing() -> None:
    disturbance = found(1.0)
    observe(disturbance, 9.0, None, 0.0, times=1000)
    assert disturbance.slowdown == pytest.approx(0.0)


def test_what_was_found_is_looked_at_again_and_again_ever_more_rarely() -> None:
    disturbance, now, quiet_s = found(1.2), 0.0, FIRST_QUIET_S
    for _ in range(6):
        assert disturbance.wanted(now + quiet_s - 1) and not disturbance.wanted(now + quiet_s)
        now, quiet_s = now + quiet_s, min(2 * quiet_s, LONGEST_QUIET_S)
        observe(disturbance, 1.44, True, now)
    assert quiet_s == LONGEST_QUIET_S


def test_when_it_is_over_idle_work_goes_on() -> None:
    disturbance = found(1.2)
    observe(disturbance, 1.2, True, FIRST_QUIET_S, times=100)
    assert not disturbance.wanted(FIRST_QUIET_S) and disturbance.slowdown == pytest.approx(0.0)


def test_while_quiet_is_wanted_what_has_yet_to_come_to_rest_says_nothing() -> None:
    disturbance = found(1.2)
    observe(disturbance, 1.2, True, 1.0, times=100)
    assert disturbance.wanted(FIRST_QUIET_S - 1) and disturbance.slowdown == pytest.approx(0.2)


def test_idle_work_rests_while_quiet_is_wanted_but_not_for_ever() -> None:
    turns = IdleTurns(quiet=True)
    turns.look(True, 10.0)
    assert not turns.may_begin(10.0) and not turns.may_begin(10.0 + MOST_REST_S - 0.1)
    assert turns.may_begin(10.0 + MOST_REST_S) and turns.overdue(10.0 + MOST_REST_S)
    turns.had(21.0)
    assert not turns.may_begin(21.0) and turns.may_begin(21.0 + MOST_REST_S)
    turns.look(False, 40.0)
    turns.look(True, 41.0)
    assert not turns.may_begin(41.0), "it has waited since then only"


def test_engines_of_a_run_directory_see_what_the_others_show(tmp_path: Path) -> None:
    one, other = Neighbours(tmp_path, "prefill-0"), Neighbours(tmp_path, "decode-0")
    one.look()
    assert not one.want_quiet and not one.do_idle_work
    other.show(quiet=True, idle=False)
    assert one.want_quiet and not one.do_idle_work and not other.want_quiet, "nobody sees its own"
    other.show(quiet=False, idle=True)
    assert not one.want_quiet and one.do_idle_work
    other.close()
    assert not one.do_idle_work
    one.look()
    one.close()
    assert [*tmp_path.iterdir()] == []


def test_what_is_shown_holds_for_a_moment_unless_it_is_shown_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(neighbours.time, "monotonic_ns", lambda: now_ns)
    one, other = Neighbours(tmp_path, "prefill-0"), Neighbours(tmp_path, "decode-0")
    one.look()
    other.show(quiet=True, idle=True)
    now_ns += 600_000_000
    other.show(quiet=True, idle=True)
    now_ns += 600_000_000
    assert one.want_quiet and one.do_idle_work
    now_ns += 500_000_000
    assert not one.want_quiet and not one.do_idle_work, "it has died"


def test_an_engine_that_comes_back_is_seen_again(tmp_path: Path) -> None:
    one, gone = Neighbours(tmp_path, "prefill-0"), Neighbours(tmp_path, "decode-0")
    one.look()
    gone.close()
    back = Neighbours(tmp_path, "decode-0")
    back.show(quiet=True, idle=False)
    one.look()
    assert one.want_quiet
