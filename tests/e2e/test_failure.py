"""Whatever dies in the middle of streams: each accepted request gets exactly one terminal reply, and the slots come back."""

from __future__ import annotations

import concurrent.futures
import threading

import httpx
import pytest

from tests.support import streams
from tests.support.cluster import Cluster
from tests.support.reference import random_prompt
from tests.support.streams import StreamEnd

NUM_STREAMS = 6
OUTPUT_TOKENS = 60


@pytest.fixture(scope="module")
def cluster():
    with Cluster(prefill=2, decode=2, server={"separate_gateway": True}) as cluster:
        yield cluster


def stream(cluster: Cluster, seed: int, on_first_token) -> StreamEnd:
    return streams.stream(cluster, random_prompt(seed, length=200 + 50 * seed), OUTPUT_TOKENS, on_first_token)


@pytest.mark.parametrize("victim", ["prefill-0", "prefill-1-store", "decode-0", "decode-1-store", "conductor-0", "valkey"])
def test_no_request_is_lost_when_a_process_is_killed(cluster: Cluster, victim: str) -> None:
    killed: list[int] = []
    turn = threading.Lock()

    def kill_once() -> None:
        with turn:
            if not killed:
                killed.append(cluster.kill(victim))

    with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as threads:
        ends = list(threads.map(lambda seed: stream(cluster, seed, kill_once), range(NUM_STREAMS)))

    assert killed
    assert ends == [StreamEnd(OUTPUT_TOKENS, ("length",), ())] * NUM_STREAMS
    cluster.wait_ready(restarted=victim)
    for node in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        cluster.wait_metric(f"{node}-store", "springtide_store_slots", lambda slots: slots == 0, labels={"state": "in_use"})
        cluster.wait_metric(f"{node}-store", "springtide_store_slots", lambda slots: slots == 0, labels={"state": "quarantined"})


def test_a_killed_gateway_leaves_nothing_running(cluster: Cluster) -> None:
    killed: list[int] = []

    def kill_once() -> None:
        if not killed:
            killed.append(cluster.kill("gateway-0"))

    def read() -> str:
        try:
            end = stream(cluster, 1, kill_once)
            return f"ended: {end}"
        except httpx.HTTPError as error:
            return type(error).__name__

    assert read() in {"RemoteProtocolError", "ReadError"}
    cluster.wait_ready(restarted="gateway-0")
    for node in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        cluster.wait_metric(f"{node}-store", "springtide_store_slots", lambda slots: slots == 0, labels={"state": "in_use"})


def test_a_hot_prefix_spreads_to_both_prefill_nodes(cluster: Cluster) -> None:
    prefix = random_prompt(seed=42, length=1500)

    def ask(index: int) -> int:
        request = {"model": cluster.model, "prompt": prefix + random_prompt(index, length=300), "max_tokens": 4, "ignore_eos": True}
        reply = httpx.post(f"{cluster.url}/v1/completions", json=request, timeout=120)
        assert reply.status_code == 200, reply.text
        return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    ask(0)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        cached = list(threads.map(ask, range(1, 17)))

    assert min(cached) >= 1472, f"someone recomputed the prefix: {cached}"
    blocks = [cluster.metric(f"prefill-{index}", "springtide_prefill_cached_tokens_total") for index in (0, 1)]
    assert min(blocks) > 0, "only one prefill node worked on the hot prefix"
    transfers = sum(cluster.metric(f"prefill-{index}-store", "springtide_store_fetched_bytes_total") for index in (0, 1))
    assert transfers >= 23 * 64 * 23_040, "no node fetched the prefix from another"
