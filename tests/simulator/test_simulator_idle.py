"""Batches beside online load, in virtual time, by the cores that are shipped."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from simulator.cluster import Cluster
from simulator.hardware import load
from simulator.run import Plan, options_of
from simulator.workload import SimRequest, Workload

BLOCK = 512
NUM_ONLINE, NUM_IDLE = 300, 400


def requests(with_idle: bool) -> list[SimRequest]:
    """Of the online ones some 60% of what the cluster can do, over ten minutes; the idle ones come in four waves."""
    rng = random.Random(7)
    online = [(rng.uniform(0, 600), rng.randrange(500, 12_000), rng.randrange(50, 400), False) for _ in range(NUM_ONLINE)]
    idle = [
        (rng.choice([5.0, 155.0, 305.0, 455.0]), rng.randrange(1_000, 6_000), rng.randrange(20, 200), True)
        for _ in range(NUM_IDLE if with_idle else 0)
    ]
    ids = iter(range(1 << 30))
    return [
        SimRequest(number, at, tokens, output, tuple(next(ids) for _ in range(-(-tokens // BLOCK))), idle=is_idle)
        for number, (at, tokens, output, is_idle) in enumerate(sorted([*online, *idle], key=lambda row: row[0]))
    ]


def run(rows: list[SimRequest]) -> Cluster:
    workload = Workload("idle", BLOCK, rows)
    cluster = Cluster(workload, options_of(Plan(workload, load("a100-llama2-70b"), 2, 2)))
    cluster.run()
    cluster.validate()
    return cluster


def percentile(cluster: Cluster, figures: object, share: float) -> float:
    rows = [index for index, request in enumerate(cluster.records.requests) if not request.idle]
    return float(np.percentile(np.asarray(figures)[rows], share))


def test_every_idle_request_is_served_and_others_hardly_notice() -> None:
    alone, together = run(requests(False)), run(requests(True))
    for cluster in (alone, together):
        whole = [cluster.records.output_tokens[i] == request.output_tokens for i, request in enumerate(cluster.records.requests)]
        assert all(whole)
    assert percentile(together, together.records.ttft_ms, 90) <= 1.1 * percentile(alone, alone.records.ttft_ms, 90)
    assert percentile(together, together.records.tbt_ms, 99) <= 1.1 * percentile(alone, alone.records.tbt_ms, 99)


def test_asked_for_like_others_they_are_noticed() -> None:
    """What the test above would see if idle capacity were nothing special."""
    rows = requests(True)
    alone, together = run(requests(False)), run([replace(request, idle=False) for request in rows])
    online = [index for index, request in enumerate(rows) if not request.idle]
    ttft_ms = float(np.percentile(np.asarray(together.records.ttft_ms)[online], 90))
    assert ttft_ms > 1.1 * percentile(alone, alone.records.ttft_ms, 90)
