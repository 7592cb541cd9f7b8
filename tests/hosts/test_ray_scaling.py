"""A pool of a cluster on Ray follows its load: more nodes on a step up, fewer on a step down, and every request is answered."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.generate import Generated, generate
from tests.support.ray_nodes import RayMachines, cluster_on
from tests.support.reference import Reference, random_prompt

pytest.importorskip("ray")

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(400)]
PATIENCE_S = 120.0
PROMPT_TOKENS, OUTPUT_TOKENS = 1500, 12
AT_A_TIME = 6
LONG = 250
SCALING = {"scale_load": 1.0, "scale_up_after_s": 2.0, "scale_down_after_s": 4.0}
"""Of `ray`."""


def settings_of(model: Path) -> dict[str, Any]:
    """With an objective that all who wait miss."""
    return {
        "model": str(model),
        "served_model_name": "placed",
        "dtype": "float32",
        "kv": {"block_tokens": 16, "arena_size": "64MiB", "transports": ["tcp"]},
        "slo": {"ttft_ms": 1.0},
    }


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    """Of one node of each role, and up to two of prefill: another is wanted while the objective is missed by all that wait, and none when
    nobody does, whatever the work was, of which a node has less than all of its time."""
    with RayMachines() as machines:
        machines.start_head().wait_started()
        machines.add(cpus=4).wait_started()
        with cluster_on(machines, PATIENCE_S, {"prefill": {"most": 2}, **SCALING}, **settings_of(model)) as cluster:
            yield cluster


def prefill_nodes(cluster: Cluster) -> set[str]:
    """That take requests."""
    return {name for name in cluster.ready_instances() if name.startswith("prefill-")}


class Load:
    """Requests, `at_a_time` of them all the time until it is ended, or with a pause between them. Those of another `first_seed` are
    others."""

    def __init__(
        self,
        cluster: Cluster,
        threads: ThreadPoolExecutor,
        at_a_time: int = AT_A_TIME,
        prompt_tokens: int = PROMPT_TOKENS,
        output_tokens: int = OUTPUT_TOKENS,
        first_seed: int = 0,
        pause_s: float = 0.0,
    ) -> None:
        self._cluster = cluster
        self._at_a_time, self._prompt_tokens, self._output_tokens = at_a_time, prompt_tokens, output_tokens
        self._pause_s = pause_s
        self._ended = Event()
        self._answers: list[Future[list[tuple[int, Generated]]]] = [
            threads.submit(self._ask, seed) for seed in range(first_seed, first_seed + at_a_time)
        ]

    def end(self) -> list[tuple[int, Generated]]:
        """All answers, each with its prompt's seed."""
        self._ended.set()
        return [answer for answers in self._answers for answer in answers.result()]

    def _ask(self, first: int) -> list[tuple[int, Generated]]:
        answers, seed = list[tuple[int, Generated]](), first
        while not self._ended.wait(self._pause_s):
            prompt = prompt_of(seed, self._prompt_tokens)
            answers.append((seed, generate(self._cluster.grpc_address, "placed", prompt, self._output_tokens)))
            seed += self._at_a_time
        return answers


def prompt_of(seed: int, length: int = PROMPT_TOKENS) -> list[int]:
    return random_prompt(seed, length, 10, 250)


def test_a_pool_grows_while_its_load_lasts_and_shrinks_when_it_is_over_and_no_request_is_lost(
    cluster: Cluster, reference: Reference
) -> None:
    assert prefill_nodes(cluster) == {"prefill-0"}
    with ThreadPoolExecutor(AT_A_TIME + 1) as threads:
        load = Load(cluster, threads)
        cluster.wait_until(lambda: len(prefill_nodes(cluster)) == 2, "a second prefill node under load", PATIENCE_S)
        asked = cluster.status().requests_scheduled
        cluster.wait_until(lambda: cluster.status().requests_scheduled >= asked + 4 * AT_A_TIME, "the load to go on with both", PATIENCE_S)
        # A stream goes on while the pool shrinks.
        begun = Event()
        stream = threads.submit(
            generate, cluster.grpc_address, "placed", prompt_of(9_999), LONG, on_token=lambda _: begun.set(), timeout_s=PATIENCE_S
        )
        assert begun.wait(PATIENCE_S)
        answers = load.end()
        cluster.wait_until(lambda: len(prefill_nodes(cluster)) == 1, "the second node to leave after the load", PATIENCE_S)
        answers.append((9_999, stream.result()))
    assert len(answers) > 4 * AT_A_TIME
    for seed, answer in answers[:: max(1, len(answers) // 8)]:
        expected = reference.greedy(prompt_of(seed), len(answer.token_ids))
        assert answer.token_ids == expected
    assert {len(answer.token_ids) for _, answer in answers} == {OUTPUT_TOKENS, LONG}
