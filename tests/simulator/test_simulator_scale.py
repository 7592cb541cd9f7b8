"""What a large run costs: memory that is bounded by what is in flight, and time that a benchmark can tell."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.simulated import Case, Took, simulate
from simulator.cluster.loop import Loop
from simulator.cluster.records import Records
from simulator.hardware import load
from simulator.run import Plan
from simulator.run import simulate as simulate_plan
from simulator.workload import SimRequest, Workload

CHECKOUT = Path(__file__).parents[2]


def test_time_stands_still_when_the_loop_is_stopped_and_goes_on_when_it_runs_again() -> None:
    loop, happened = Loop(), list[float]()
    for when in (1.0, 2.0, 2.0, 3.0):
        loop.at(when, lambda: happened.append(loop.now))
    loop.at(2.0, loop.stop)
    loop.run()
    assert happened == [1.0, 2.0, 2.0]
    loop.run()
    assert happened == [1.0, 2.0, 2.0, 3.0]
    assert loop.asked == 5


def test_a_cluster_without_requests_is_done_at_once() -> None:
    summary = simulate_plan(Plan(Workload("nothing", 512, []), load("a100-llama2-70b"), 1, 1))["summary"]
    assert (summary["requests"], summary["completed"], summary["rejected"]) == (0, 0, 0)


def test_whoever_waits_for_all_requests_is_told_once_with_the_last_of_them() -> None:
    told: list[int] = []
    requests = [SimRequest(number, 0.0, 1, 1, range(1)) for number in range(2)]
    records = Records(requests, lambda: told.append(records.ended))
    records.reject(1, "load")
    assert told == []
    records.tokens(0, 1, 1.0)
    records.finish(0, 1.0, cached_tokens=0)
    assert told == [2]


def test_what_a_run_took_is_measured_in_a_process_of_its_own_and_says_the_same_of_the_cluster() -> None:
    case = Case(instances=2, requests=20)
    command = [sys.executable, "-m", "benchmarks.simulated", json.dumps(asdict(case))]
    there = Took(**json.loads(subprocess.run(command, cwd=CHECKOUT, stdout=subprocess.PIPE, check=True).stdout))
    here = simulate(case)
    assert (there.requests, there.completed, there.goodput, there.events) == (here.requests, here.completed, here.goodput, here.events)
    assert there.completed + there.rejected == there.requests > 0
    assert there.cpu_s > 0 and there.peak_bytes > 0
