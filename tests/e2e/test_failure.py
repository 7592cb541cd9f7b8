"""Whatever dies, or switches its role, in the middle of streams: each accepted request gets exactly one terminal reply, and the slots come
back."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading

import grpc
import httpx
import pytest

from springtide.protocol.instances import Role
from tests.support import streams
from tests.support.cluster import Cluster
from tests.support.profiles import DEMO_PROFILE
from tests.support.reference import random_prompt
from tests.support.role_switch import engine, switch
from tests.support.streams import StreamEnd

NUM_STREAMS = 6
OUTPUT_TOKENS, SWITCH_TOKENS = 60, 80


@pytest.fixture(scope="module")
def cluster():
    with Cluster(prefill=2, decode=2, server={"separate_gateway": True}, profile=DEMO_PROFILE) as cluster:
        yield cluster


def stream(cluster: Cluster, seed: int, on_token, output_tokens: int = OUTPUT_TOKENS, more: int = 50) -> StreamEnd:
    """`more`: tokens of the prompt that it has beyond that of the seed before."""
    return streams.stream(cluster, random_prompt(seed, length=200 + more * seed), output_tokens, on_token)


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


def roles(cluster: Cluster) -> dict[str, str]:
    """Of the instances that the Conductor would place requests on."""
    return {instance.instance.instance_id: instance.instance.role for instance in cluster.status().instances if instance.ready}


@pytest.mark.parametrize(
    ("name", "role", "drain_ms", "afterwards"),
    [
        ("decode-1", "prefill", 30_000.0, {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "prefill"}),
        ("decode-1", "decode", 0.0, {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"}),
        ("decode-0", "prefill", 0.0, {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "prefill", "decode-1": "decode"}),
    ],
    ids=["decode to prefill, in its own time", "and back, at once", "another, in the middle of its streams"],
)
def test_no_request_is_lost_when_an_instance_switches_its_role(
    cluster: Cluster, name: str, role: str, drain_ms: float, afterwards: dict[str, str]
) -> None:
    pid, incarnation = cluster.pid_of(name), engine(cluster, name).incarnation
    turn, seen, ordered = threading.Lock(), itertools.count(1), []

    def switch_once() -> None:
        with turn:
            if next(seen) >= 4 * NUM_STREAMS and not ordered:
                ordered.append(name)
                switch(cluster, name, Role(role), drain_ms)

    with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as threads:
        ends = list(threads.map(lambda seed: stream(cluster, seed, switch_once, SWITCH_TOKENS, more=10), range(2 * NUM_STREAMS)))

    assert ordered
    assert ends == [StreamEnd(SWITCH_TOKENS, ("length",), ())] * (2 * NUM_STREAMS)
    cluster.wait_until(lambda: roles(cluster) == afterwards, "the Conductor to know the new roles")
    assert engine(cluster, name).incarnation != incarnation
    assert cluster.pid_of(name) == engine(cluster, name).pid == pid, "it is the same process, and its supervisor knows it"
    for node in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        cluster.wait_metric(f"{node}-store", "springtide_store_slots", lambda slots: slots == 0, labels={"state": "in_use"})
        cluster.wait_metric(f"{node}-store", "springtide_store_slots", lambda slots: slots == 0, labels={"state": "quarantined"})


def test_it_serves_in_its_new_role(cluster: Cluster) -> None:
    """decode-0 has become a prefill instance above."""
    assert roles(cluster)["decode-0"] == "prefill"
    with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as threads:
        seeds = range(100, 100 + 2 * NUM_STREAMS)
        ends = list(threads.map(lambda seed: stream(cluster, seed, lambda: None, SWITCH_TOKENS, more=10), seeds))
    assert ends == [StreamEnd(SWITCH_TOKENS, ("length",), ())] * (2 * NUM_STREAMS)
    assert cluster.metric("decode-0", "springtide_prefill_tokens_total") > 0
    assert cluster.metric("decode-0", "springtide_decode_tokens_total") == 0


def test_an_order_for_the_role_that_it_has_is_refused(cluster: Cluster) -> None:
    with pytest.raises(grpc.RpcError) as error:
        switch(cluster, "prefill-0", Role.PREFILL)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
