"""One simulation in a process of its own (`python -m benchmarks.simulated CASE` prints what it took as JSON; CASE is a `Case` as JSON)."""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from simulator.cluster import Cluster
from simulator.result import result_of
from simulator.run import PAPER_TBT_SLO_MS, PAPER_TTFT_SLO_MS, Plan, find_hardware, options_of
from simulator.workload import Workload, generate, read_trace

HARDWARE = "a100-llama2-70b"
TURN_TOKENS, STEPS = 3000.0, 4.0
"""Of the generated conversations: mean length of a question, and mean number of turns."""
RATE_PER_S = 1.0
"""Requests of the generated conversations for each prefill instance: it is then at work for about half of the time, and some eight requests
are in the batch of each decode instance."""


@dataclass(frozen=True, slots=True)
class Case:
    instances: int
    """Half of them prefill, half decode."""
    requests: int = 0
    """Of a generated workload, about."""
    trace: str = ""
    """Of the Mooncake project, instead of that."""
    speed: float = 1.0

    def workload(self) -> Workload:
        if self.trace:
            trace = read_trace(Path(self.trace))
            return trace if self.speed == 1.0 else trace.sped_up(self.speed)
        rate = RATE_PER_S * (self.instances // 2)
        return generate("chat", rate, self.requests / rate, seed=1, first_tokens=TURN_TOKENS, new_tokens=TURN_TOKENS, steps=STEPS)


@dataclass(frozen=True, slots=True)
class Took:
    requests: int
    completed: int
    rejected: int
    goodput: int
    hit_rate: float
    prefill_busy: float
    """Share of the time that prefill instances are at work."""
    decode_busy: float
    cpu_s: float
    """Of the simulation, results included; reading or making the workload is not."""
    wall_s: float
    events: int
    """Moments of virtual time at which something was due."""
    peak_bytes: int
    """Of memory that the process ever held (resident), the workload included."""


def simulate(case: Case) -> Took:
    workload = case.workload()
    half = case.instances // 2
    plan = Plan(workload, find_hardware(HARDWARE), half, half)
    began, began_cpu = time.perf_counter(), time.process_time()
    cluster = Cluster(workload, options_of(plan))
    cluster.run()
    result = result_of(cluster.records, cluster.series.to_json(), {}, PAPER_TTFT_SLO_MS, PAPER_TBT_SLO_MS)
    cpu_s, wall_s = time.process_time() - began_cpu, time.perf_counter() - began
    summary, whole_s = result["summary"], half * cluster.loop.now
    return Took(
        requests=summary["requests"],
        completed=summary["completed"],
        rejected=summary["rejected"],
        goodput=summary["goodput_requests"],
        hit_rate=summary["hit_rate"],
        prefill_busy=sum(instance.busy_s for instance in cluster.prefills.values()) / whole_s,
        decode_busy=sum(instance.busy_s for instance in cluster.decodes.values()) / whole_s,
        cpu_s=cpu_s,
        wall_s=wall_s,
        events=cluster.loop.asked,
        peak_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )


if __name__ == "__main__":
    print(json.dumps(asdict(simulate(Case(**json.loads(sys.argv[1]))))))
