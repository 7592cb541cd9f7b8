"""The Conductor's core with attempts that live and engines that report, in one process and without sockets.

`python -m benchmarks.conductor_core WORKERS LIVE TOKENS` prints what its events cost as JSON: decisions on prompts of so many tokens, and
in between the load reports, renewals and ticks that come meanwhile. The core's time is the benchmark's: 1 / PER_S between two decisions.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from benchmarks.drivers.holdings import HOT, Holdings
from benchmarks.drivers.select_springtide import new_core
from benchmarks.live_cluster import BLOCK_TOKENS, LiveCluster, instance_id
from conductor.core.types.events import Decided, Event, LoadReported
from gateway.conductor_link import RENEW_EVERY_S
from node_runtime.servicer import REST_S
from springtide.clock import Tick
from springtide.config import ClusterConfig
from springtide.ids import AttemptId, BlockKey, GatewayId, RequestId
from springtide.protocol.attempts import Phase, Progress
from springtide.protocol.instances import Role
from springtide.protocol.scheduling import Schedule

PER_S, DECISIONS, WARM_UP = 200, 4000, 400
TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class Figures:
    decision_p50_us: float
    decision_p99_us: float
    report_us: float
    """Mean, of taking in one engine's report."""
    renewal_ms: float
    """Mean, of one gateway's."""
    tick_ms: float
    """The longest."""


class Clocked:
    """A core whose events are timed by their kind."""

    def __init__(self, live: LiveCluster, blocks: int) -> None:
        self.core = new_core(Holdings(live.workers, blocks), ClusterConfig().conductor.admission)
        self.seconds: dict[str, list[float]] = {}

    def handle(self, kind: str, event: Event, now: float) -> Sequence[object]:
        started = time.perf_counter()
        actions = self.core.handle(event, now)
        self.seconds.setdefault(kind, []).append(time.perf_counter() - started)
        return actions


def reports(live: LiveCluster) -> Iterator[list[LoadReported]]:
    """All that is reported between two decisions, and again for ever; every engine reports REST_S after its last report."""
    engines = [(instance_id(role, number), live.reports_of(role, number)) for number in range(live.workers) for role in Role]
    each = round(len(engines) / REST_S / PER_S)
    every = (LoadReported(name, 1, loads[turn % len(loads)]) for turn in itertools.count() for name, loads in engines)
    while True:
        yield list(itertools.islice(every, each))


def measure(live: LiveCluster, num_tokens: int) -> Figures:
    blocks = num_tokens // BLOCK_TOKENS
    clocked = Clocked(live, blocks)
    holdings = Holdings(live.workers, blocks)
    prompts = itertools.cycle([[BlockKey(key) for key in holdings.keys(prompt)] for prompt in range(2 * HOT)])
    renewals, coming = live.renewals(), reports(live)
    for renewal in renewals:
        clocked.handle("learnt", renewal, 0.0)
    renewing = itertools.cycle(renewals)
    renewed, ticked = 0.0, 0.0
    try:
        for number in range(WARM_UP + DECISIONS):
            if number == WARM_UP:
                clocked.seconds.clear()
                # As the Conductor's process does once the members are there.
                gc.collect()
                gc.freeze()
            now = number / PER_S
            for event in next(coming):
                clocked.handle("report", event, now)
            while renewed <= now:
                clocked.handle("renewal", next(renewing), now)
                renewed += RENEW_EVERY_S / len(renewals)
            if ticked <= now:
                clocked.handle("tick", Tick(), now)
                ticked += TICK_S
            attempt_id = AttemptId(f"asked-{number}")
            asked = Schedule(attempt_id, RequestId(attempt_id), GatewayId("asker"), next(prompts), num_tokens + 1, 100)
            (decided,) = clocked.handle("decision", asked, now)
            assert isinstance(decided, Decided) and decided.assignment is not None
            clocked.handle("end", Progress(attempt_id, Phase.FAILED), now)
    finally:
        gc.unfreeze()
    assert len(clocked.core.state.attempts) == live.live
    seconds = clocked.seconds
    return Figures(
        decision_p50_us=1e6 * statistics.median(seconds["decision"]),
        decision_p99_us=1e6 * statistics.quantiles(seconds["decision"], n=100)[98],
        report_us=1e6 * statistics.fmean(seconds["report"]),
        renewal_ms=1e3 * statistics.fmean(seconds["renewal"]),
        tick_ms=1e3 * max(seconds["tick"]),
    )


if __name__ == "__main__":
    workers, num_live, prompt_tokens = map(int, sys.argv[1:])
    print(json.dumps(asdict(measure(LiveCluster(workers, num_live), prompt_tokens))))
