"""A load step on a cluster that Ray scales: more nodes while it lasts, fewer when it is over (`make bench-scaling`, after `pip install
'.[ray]'`). Starts a Ray of several nodes on this machine; takes six minutes.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np

from benchmarks.driven import CHECKOUT, console, others_at_work, with_remarks
from benchmarks.results import Row, show, write
from deploy.bench.driver import drive
from deploy.bench.statistics import RequestRecord
from deploy.bench.workload import BenchWorkload
from deploy.ray.placement import Phase
from deploy.ray.record import PlacementBook
from deploy.ray.resources import Pool
from simulator.report import style
from simulator.report.drawing import Floats, count_axis, figure, legend_above, limit_across, over_time, time_unit
from springtide.config import TlsConfig
from springtide.protocol.instances import Role
from springtide.valkey import ValkeyClient
from tests.support.cluster import Cluster, metric_at
from tests.support.ray_nodes import RayMachines, cluster_on

PICTURE = CHECKOUT / "docs" / "scaling.png"
RAY_NODES, CPUS_EACH = 2, 2
"""Beside a head that places nothing on itself."""
MOST = 3
"""Prefill nodes; there is one at least, and one decode node."""
PROMPT_TOKENS, OUTPUT_TOKENS, VOCABULARY = 512, 4, 49152
LOW, HIGH = 0.2, 1.3
"""Of what one prefill node can do."""
LOW_S, HIGH_S, AFTER_S = 30.0, 120.0, 150.0
TTFT_SLO_MS = 5000.0
SCALE_DOWN_AFTER_S = 45.0
ALONE = 6
"""Requests one after the other, of which the rates are taken."""
START_S = 180.0
LOOK_EVERY_S = 1.0
ROLLING_S = 10.0
"""Of the TTFT that is drawn as a line."""
QUEUED = "springtide_conductor_queued_prefill_tokens"
NOTES = (
    f"`springtide up --ray` on a Ray of {RAY_NODES} nodes with {CPUS_EACH} processors each and a head without any, all on this machine; "
    f"SmolLM2-135M-Instruct in bfloat16, prefill nodes with a thread each, from 1 to {MOST} of them, one decode node. Prompts of "
    f"{PROMPT_TOKENS} tokens that nobody has seen, {OUTPUT_TOKENS} tokens of output, in a Poisson process over HTTP: {LOW_S:g} s at "
    f"{LOW:g}, {HIGH_S:g} s at {HIGH:g}, {AFTER_S:g} s at {LOW:g} of the rate that one node does, taken from the median time to the first "
    f"token of {ALONE} requests one after the other. `slo.ttft_ms` {TTFT_SLO_MS:g}, `conductor.admission` `baseline` (nothing is refused "
    f"for load), `ray.scale_down_after_s` {SCALE_DOWN_AFTER_S:g}, everything else as it is by default. Wanted are the nodes that the "
    "placer has asked Ray for and that have not been told to leave, running those that take requests, once a second. The client, Ray and "
    "all nodes share this machine's processors, so that three prefill nodes do not do three times as much here."
)


@dataclass(frozen=True, slots=True)
class Sample:
    """The prefill pool at a moment, by `time.monotonic`."""

    at: float
    wanted: int
    running: int
    queued_tokens: float
    work: float
    """Nodes that the work of late would keep busy, by the Conductor's figures."""


@dataclass(frozen=True, slots=True)
class Seen:
    """All that was seen; `began` is when the first of the phases did, by `time.monotonic`."""

    began: float
    records: Sequence[RequestRecord]
    samples: Sequence[Sample]

    @property
    def step_up(self) -> float:
        return self.began + LOW_S

    @property
    def step_down(self) -> float:
        return self.step_up + HIGH_S

    def first(self, holds: str, count: int, since: float, more: bool) -> float | None:
        """Seconds from `since` until so many nodes, or more, or fewer, were `wanted` or `running`."""
        for sample in self.samples:
            value = getattr(sample, holds)
            if sample.at >= since and (value >= count if more else value <= count):
                return sample.at - since
        return None

    def ttfts_s(self, since: float, until: float) -> list[float]:
        """Of the requests sent in between."""
        return [record.ttft_ms / 1e3 for record in self.records if record.error is None and since <= record.sent_s < until]


@contextmanager
def scaled_cluster() -> Iterator[Cluster]:
    """With one node of each role on a Ray of its own."""
    with RayMachines() as machines:
        machines.start_head().wait_started()
        for _ in range(RAY_NODES):
            machines.add(cpus=CPUS_EACH).wait_started()
        kv = {"arena_size": "256MiB", "transports": ["tcp"]}
        ray = {"prefill": {"most": MOST, "cpus": 1}, "decode": {"cpus": 1}, "scale_down_after_s": SCALE_DOWN_AFTER_S}
        with cluster_on(machines, START_S, ray, kv=kv, slo={"ttft_ms": TTFT_SLO_MS}) as cluster:
            cluster.wait_until(
                lambda: {one.instance.role for one in cluster.status().instances if one.ready} == set(Role), "a node of each role"
            )
            yield cluster


async def sample(cluster: Cluster, samples: list[Sample]) -> None:
    """For ever. A look that the Conductor does not answer is left out."""
    record = cluster.record
    (conductor,) = [member for member in cluster.members() if member.role == "conductor"]
    tls = TlsConfig.model_validate(record.tls)
    async with ValkeyClient.from_url(record.redis_url) as valkey:
        book = PlacementBook(valkey, record.cluster, cluster.credentials)
        while True:
            at = time.monotonic()
            placed, status = await book.read(), await asyncio.to_thread(cluster.status)
            queued = await asyncio.to_thread(metric_at, conductor.metrics_address, QUEUED, None, tls)
            assert placed is not None, "the placer has said nothing yet"
            wanted = sum(node.pool is Pool.PREFILL and node.phase is not Phase.LEAVING for node in placed.nodes.values())
            running = sum(one.ready and one.instance.role is Role.PREFILL for one in status.instances)
            samples.append(Sample(at, wanted, running, queued, status.prefill_work))
            await asyncio.sleep(max(0.0, at + LOOK_EVERY_S - time.monotonic()))


async def play(cluster: Cluster) -> Seen:
    alone = BenchWorkload(ALONE, PROMPT_TOKENS, OUTPUT_TOKENS, 0.0, 1, None, VOCABULARY, seed=1)
    _, warm = await drive(cluster.url, None, alone, lambda record: None)
    node_per_s = 1e3 / statistics.median(record.ttft_ms for record in warm)
    console.print(f"one prefill node does {node_per_s:.2f} requests a second")
    samples: list[Sample] = []
    sampling, began = asyncio.create_task(sample(cluster, samples)), time.monotonic()

    async def phase(after_s: float, seconds: float, load: float, seed: int) -> list[RequestRecord]:
        rate = load * node_per_s
        await asyncio.sleep(began + after_s - time.monotonic())
        workload = BenchWorkload(max(1, round(rate * seconds)), PROMPT_TOKENS, OUTPUT_TOKENS, 0.0, None, rate, VOCABULARY, seed)
        return (await drive(cluster.url, None, workload, lambda record: None))[1]

    played = await asyncio.gather(phase(0.0, LOW_S, LOW, 2), phase(LOW_S, HIGH_S, HIGH, 3), phase(LOW_S + HIGH_S, AFTER_S, LOW, 4))
    await asyncio.sleep(began + LOW_S + HIGH_S + AFTER_S - time.monotonic())
    sampling.cancel()
    await asyncio.wait([sampling])
    if not sampling.cancelled():
        await sampling
    return Seen(began, sorted((record for records in played for record in records), key=lambda record: record.sent_s), samples)


# ---- what is told of it ----


def rows(seen: Seen) -> list[Row]:
    found = [
        _since("from the step up until a second node is wanted", seen.first("wanted", 2, seen.step_up, more=True)),
        _since("from the step up until it takes requests", grown := seen.first("running", 2, seen.step_up, more=True)),
        _since("from the step down until one node is wanted", seen.first("wanted", 1, seen.step_down, more=False)),
        _since("from the step down until there is one", seen.first("running", 1, seen.step_down, more=False)),
        Row("most prefill nodes at a time", "", max(sample.running for sample in seen.samples)),
        Row("most prompt tokens queued", "", max(sample.queued_tokens for sample in seen.samples)),
    ]
    steps = {
        "before the step": (seen.began, seen.step_up),
        "after it, until a second node takes requests": (seen.step_up, seen.step_up + (grown or HIGH_S)),
        "the last half minute of the load": (seen.step_down - 30.0, seen.step_down),
        "after the load": (seen.step_down + 10.0, seen.step_down + AFTER_S),
    }
    for case, (since, until) in steps.items():
        ttfts_s = seen.ttfts_s(since, until)
        if ttfts_s:
            found += [
                Row(f"TTFT {name}", "s", float(np.percentile(ttfts_s, share)), case=case) for name, share in (("p50", 50), ("p90", 90))
            ]
    lost = sum(record.error is not None for record in seen.records)
    return [*(row for row in found if row is not None), Row("requests", "", len(seen.records)), Row("requests that were lost", "", lost)]


def _since(name: str, seconds: float | None) -> Row | None:
    return None if seconds is None else Row(name, "s", seconds)


def draw(seen: Seen, path: Path) -> None:
    longest_s = LOW_S + HIGH_S + AFTER_S
    unit = time_unit(longest_s)[0]

    def times(at: Sequence[float]) -> Floats:
        return (np.array(at) - seen.began) / unit

    at = times([sample.at for sample in seen.samples])
    with mpl.rc_context(style.RC):
        picture, (nodes, queued, ttft) = figure(3, 1, 6.4, share_x=True)
        nodes.set_title("Prefill nodes")
        for index, (label, values) in enumerate(
            {
                "wanted": [sample.wanted for sample in seen.samples],
                "running": [sample.running for sample in seen.samples],
                "work of late": [sample.work for sample in seen.samples],
            }.items()
        ):
            nodes.plot(at, values, label=label, drawstyle="default" if index == 2 else "steps-post", **style.line(index))
        nodes.set_ylim(0.0, MOST + 0.3)
        legend_above(nodes)
        queued.set_title("Prompt tokens that wait for prefill")
        queued.plot(at, [sample.queued_tokens for sample in seen.samples], **style.line(0, restless=True))
        queued.set_ylim(bottom=0.0)
        count_axis(queued)
        answered = [record for record in seen.records if record.error is None]
        sent, ttfts_s = np.array([record.sent_s for record in answered]), np.array([record.ttft_ms / 1e3 for record in answered])
        ttft.set_title("TTFT, s")
        ttft.scatter(times(sent), ttfts_s, s=7, color=style.MUTED.light, alpha=0.5, linewidths=0, label="a request")
        rolling = [float(np.median(ttfts_s[np.abs(sent - now) <= ROLLING_S / 2])) for now in sent]
        ttft.plot(times(sent), rolling, label=f"median of {ROLLING_S:g} s", **style.line(1, restless=True))
        ttft.set_ylim(bottom=0.0)
        limit_across(ttft, TTFT_SLO_MS / 1e3, "objective")
        legend_above(ttft)
        for axes in (nodes, queued, ttft):
            axes.axvspan(LOW_S / unit, (LOW_S + HIGH_S) / unit, color=style.GRID.light, alpha=0.45, linewidth=0)
        over_time(ttft, longest_s)
        picture.savefig(path, dpi=150, metadata={"Software": None})


def main() -> None:
    remark = others_at_work()
    console.print("starting Ray and a cluster on it")
    with scaled_cluster() as cluster:
        seen = asyncio.run(play(cluster))
    found = rows(seen)
    show("Scaling", found)
    draw(seen, PICTURE)
    notes = with_remarks(NOTES, [], remark)
    headlines = ("from the step up until it takes requests",)
    print(write("scaling", "make bench-scaling", found, notes, headlines))
    print(PICTURE)


if __name__ == "__main__":
    main()
