"""The Conductor has instances switch their roles as the work does."""

from __future__ import annotations

import concurrent.futures

import httpx

from tests.support.cluster import Cluster
from tests.support.profiles import DEMO_PROFILE
from tests.support.reference import random_prompt


def test_the_conductor_moves_an_idle_decode_node_to_where_the_work_is() -> None:
    balance = {"pool_balance": True, "pool_balance_load": 0.01, "pool_balance_after_s": 1.0, "pool_balance_pause_s": 1e6}
    with Cluster(prefill=1, decode=2, conductor=balance, slo={"ttft_ms": 120_000}, profile=DEMO_PROFILE) as cluster:

        def ask(seed: int) -> int:
            request = {"model": cluster.model, "prompt": random_prompt(seed, length=1_500), "max_tokens": 2, "ignore_eos": True}
            reply = httpx.post(f"{cluster.url}/v1/completions", json=request, timeout=120)
            return reply.json()["usage"]["completion_tokens"]

        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            assert list(threads.map(ask, range(8))) == [2] * 8

        def roles() -> list[str]:
            return sorted(one.instance.role for one in cluster.status().instances if one.ready)

        cluster.wait_until(lambda: roles() == ["decode", "prefill", "prefill"], "a decode node to switch")
        assert cluster.status().wanted_prefill == 2
        assert cluster.metric("conductor-0", "springtide_conductor_role_switches_total", {"to": "prefill", "outcome": "ordered"}) == 1
        assert ask(99) == 2
