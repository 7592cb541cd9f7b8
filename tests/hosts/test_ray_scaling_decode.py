"""The decode pool of a cluster on Ray follows the streams that there are: it grows on a step up, shrinks on a step down while others go on,
and every one is answered."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.hosts.test_ray_scaling import SCALING, Load, prompt_of, settings_of
from tests.support.cluster import Cluster
from tests.support.ray_nodes import RayMachines, cluster_on
from tests.support.reference import Reference

pytest.importorskip("ray")

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]
PATIENCE_S = 200.0
MANY, LONG = 8, 400
"""Streams at a time, and the tokens of each."""
SHORT, PAUSE_S = 24, 3.0
"""Of the one stream that there is at a time afterwards, and until the next."""
BUSY = 0.2
"""Share of a node's time that is far more than those few take, and far less than the many do, however busy the machine is besides."""
PROMPT_TOKENS = 64


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    """Of one node of each role, and up to two of decode."""
    settings = {**settings_of(model), "slo": {}, "decode_node": {"max_batch": MANY}}
    with RayMachines() as machines:
        machines.start_head().wait_started()
        machines.add(cpus=3).wait_started()
        with cluster_on(machines, PATIENCE_S, {**SCALING, "scale_load": BUSY, "decode": {"most": 2}}, **settings) as cluster:
            yield cluster


def decode_nodes(cluster: Cluster) -> dict[str, int]:
    """Those that take requests, with the streams that each has."""
    decode = [each for each in cluster.status().instances if each.ready and each.instance.role == "decode"]
    return {each.instance.instance_id: each.running for each in decode}


def test_the_decode_pool_grows_with_its_streams_and_shrinks_when_they_become_few_and_none_is_lost(
    cluster: Cluster, reference: Reference
) -> None:
    assert decode_nodes(cluster).keys() == {"decode-0"}
    with ThreadPoolExecutor(MANY + 1) as threads:
        many = Load(cluster, threads, MANY, PROMPT_TOKENS, LONG)
        try:
            cluster.wait_until(lambda: len(decode_nodes(cluster)) == 2, "a second decode node under load", PATIENCE_S)
            cluster.wait_until(lambda: all(decode_nodes(cluster).values()), "streams at both", PATIENCE_S)
            # They begin while the many run, for the second node may leave at the last of these.
            few = Load(cluster, threads, 1, PROMPT_TOKENS, SHORT, first_seed=100_000, pause_s=PAUSE_S)
            try:
                answers = many.end()
                cluster.wait_until(lambda: len(decode_nodes(cluster)) == 1, "the second node to leave after the load", PATIENCE_S)
            finally:
                later = few.end()
        finally:
            many.end()
    assert later and {len(answer.token_ids) for _, answer in answers} == {LONG}
    assert {len(answer.token_ids) for _, answer in later} == {SHORT}
    answers += later
    for seed, answer in answers[:: max(1, len(answers) // 8)]:
        assert answer.token_ids == reference.greedy(prompt_of(seed, PROMPT_TOKENS), len(answer.token_ids))
