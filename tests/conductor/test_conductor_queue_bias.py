"""A prefill node does not serve in order of arrival; how long prompts really wait is learnt by their size."""

from __future__ import annotations

import numpy as np
import pytest
from conductor_support import ask, assigned, hold, keys_of, make_core, report, request

from conductor.core.forecast.queue_bias import QueueBias
from springtide.ids import AttemptId, InstanceId
from springtide.protocol.attempts import Phase, Progress
from springtide.protocol.instances import Role
from springtide.slices import at_once


def test_at_first_everybody_waits_for_all_that_is_ahead() -> None:
    assert QueueBias().factors(np.array([0.0, 1.0, 400.0, 1e12]), np.array([0.0, 1e12, 5.0, 70.0])).tolist() == [1, 1, 1, 1]


def test_each_size_learns_its_own_part_and_forgets_slowly() -> None:
    bias = QueueBias()
    for _ in range(1000):
        bias.observe(100.0, ahead_ms=10_000.0, waited_ms=500.0)
        bias.observe(9_000.0, ahead_ms=10_000.0, waited_ms=15_000.0)
    short, middling, long = bias.factors(np.array([100.0, 1_000.0, 9_000.0]), np.full(3, 10_000.0))
    assert (short, middling, long) == (pytest.approx(0.05, rel=0.05), 1.0, pytest.approx(1.5, rel=0.05))
    for _ in range(20):
        bias.observe(100.0, ahead_ms=10_000.0, waited_ms=10_000.0)
    assert 0.2 < bias.factors(np.array([100.0]), np.array([10_000.0]))[0] < 0.5
    for _ in range(1000):
        bias.observe(100.0, ahead_ms=10_000.0, waited_ms=10_000.0)
    assert bias.factors(np.array([100.0]), np.array([10_000.0]))[0] == pytest.approx(1.0, rel=0.02)


def test_an_empty_queue_teaches_nothing() -> None:
    bias = QueueBias()
    for _ in range(50):
        bias.observe(100.0, ahead_ms=0.0, waited_ms=3.0)
    assert bias.factors(np.array([100.0]), np.array([10_000.0]))[0] == pytest.approx(1.0)


def test_what_is_never_seen_is_believed_to_wait_as_what_comes_next_to_it() -> None:
    bias = QueueBias()
    for _ in range(300):
        bias.observe(100.0, ahead_ms=1_000.0, waited_ms=900.0)
        bias.observe(100.0, ahead_ms=4_000.0, waited_ms=2_000.0)
    own = np.full(4, 100.0)
    little, between, much, more = bias.factors(own, np.array([1_000.0, 1_500.0, 4_000.0, 60_000.0]))
    assert (little, between) == (pytest.approx(0.9, rel=0.05), pytest.approx(0.9, rel=0.05))
    assert (much, more) == (pytest.approx(0.5, rel=0.05), pytest.approx(0.5, rel=0.05))


def test_the_conductor_predicts_the_queue_as_it_was_of_late() -> None:
    """Short prompts that wait 100 ms where there are 9 s of work come to be expected to."""
    core = make_core(prefills=["p0"])
    report(core, "p0", Role.PREFILL, queue_ms=9_000)
    assert ask(core, request("at first", num_tokens=101)).alternatives.prefills[0].ttft_ms == pytest.approx(9_101)
    core.handle(Progress(AttemptId("at first"), Phase.FAILED), 0.0)
    for number in range(200):
        attempt = f"a{number}"
        report(core, "p0", Role.PREFILL, queue_ms=9_000)
        assigned(core, request(attempt, num_tokens=101))
        core.handle(Progress(AttemptId(attempt), Phase.DECODE, ttft_ms=201.0), 0.0)
        core.handle(Progress(AttemptId(attempt), Phase.FINISHED), 0.0)
    report(core, "p0", Role.PREFILL, queue_ms=9_000)
    assert ask(core, request("later", num_tokens=101)).alternatives.prefills[0].ttft_ms == pytest.approx(201, abs=10)
    assert ask(core, request("long", num_tokens=8_001)).alternatives.prefills[0].queue_ms >= 9_000, "of another size"


def test_load_balance_looks_at_the_work_ahead_whatever_is_cached() -> None:
    core = make_core(prefills=["p0", "p1"], policy="load-balance")
    for _ in range(200):
        core.state.queue_bias.observe(10.0, ahead_ms=4_000.0, waited_ms=50.0)
    hold(core, "p1", keys_of(100))
    report(core, "p0", Role.PREFILL, queue_ms=4_000)
    report(core, "p1", Role.PREFILL, queue_ms=4_040)
    assert assigned(core, request("a", num_tokens=401)).prefill.instance_id == "p0"


def test_the_pools_load_is_what_is_waited_for_not_the_work_that_lies_there() -> None:
    core = make_core(prefills=["p0", "p1"], ttft_slo_ms=10_000.0)
    report(core, "p0", Role.PREFILL, queue_ms=9_000)
    report(core, "p1", Role.PREFILL, queue_ms=90_000)
    short = assigned(core, request("short", num_tokens=101))
    assert short.prefill.instance_id == "p0"
    assert at_once(core.pool_loads(0.0)).by_instance[short.prefill.instance_id] == pytest.approx(0.91, abs=0.001)
    for _ in range(200):
        core.state.queue_bias.observe(101.0, ahead_ms=9_101.0, waited_ms=500.0)
    loads = at_once(core.pool_loads(0.0)).by_instance
    assert loads[short.prefill.instance_id] == pytest.approx(0.05, abs=0.01)
    assert loads[InstanceId("p1")] == pytest.approx(9.0), "nobody is known to wait there"
