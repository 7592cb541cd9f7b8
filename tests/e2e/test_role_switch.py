"""An instance switches its role while requests stream: none is lost, and it serves on in the new one."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading

import grpc
import httpx
import pytest

from springtide.membership import Member
from springtide.protocol import wire
from springtide.protocol.instances import Role, RoleSwitch
from springtide.rpc.node_pb2_grpc import DecodeNodeStub, PrefillNodeStub
from tests.support import streams
from tests.support.cluster import Cluster
from tests.support.reference import random_prompt
from tests.support.streams import StreamEnd

NUM_STREAMS = 6
OUTPUT_TOKENS = 80


@pytest.fixture(scope="module")
def cluster():
    with Cluster(prefill=2, decode=2, server={"separate_gateway": True}) as cluster:
        yield cluster


def stream(cluster: Cluster, seed: int, on_token) -> StreamEnd:
    return streams.stream(cluster, random_prompt(seed, length=200 + 10 * seed), OUTPUT_TOKENS, on_token)


def engine(cluster: Cluster, name: str) -> Member:
    return next(member for member in cluster.members() if member.member_id == name and member.role != "store")


def switch(cluster: Cluster, name: str, role: str, drain_s: float) -> None:
    member = engine(cluster, name)
    with grpc.insecure_channel(member.address) as channel:
        stub = PrefillNodeStub(channel) if member.role == "prefill" else DecodeNodeStub(channel)
        stub.SwitchRole(wire.ROLE_SWITCH.encode(RoleSwitch(Role(role), drain_s)), timeout=10, metadata=cluster.metadata)


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
                switch(cluster, name, role, drain_ms)

    with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as threads:
        ends = list(threads.map(lambda seed: stream(cluster, seed, switch_once), range(2 * NUM_STREAMS)))

    assert ordered
    assert ends == [StreamEnd(OUTPUT_TOKENS, ("length",), ())] * (2 * NUM_STREAMS)
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
        ends = list(threads.map(lambda seed: stream(cluster, seed, lambda: None), range(100, 100 + 2 * NUM_STREAMS)))
    assert ends == [StreamEnd(OUTPUT_TOKENS, ("length",), ())] * (2 * NUM_STREAMS)
    assert cluster.metric("decode-0", "springtide_prefill_tokens_total") > 0
    assert cluster.metric("decode-0", "springtide_decode_tokens_total") == 0


def test_an_order_for_the_role_that_it_has_is_refused(cluster: Cluster) -> None:
    with pytest.raises(grpc.RpcError) as error:
        switch(cluster, "prefill-0", "prefill", 0.0)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_conductor_moves_an_idle_decode_node_to_where_the_work_is() -> None:
    balance = {"pool_balance": True, "pool_balance_load": 0.01, "pool_balance_after_s": 1.0, "pool_balance_pause_s": 1e6}
    with Cluster(prefill=1, decode=2, conductor=balance, slo={"ttft_ms": 120_000}) as cluster:

        def ask(seed: int) -> int:
            request = {"model": cluster.model, "prompt": random_prompt(seed, length=1_500), "max_tokens": 2, "ignore_eos": True}
            reply = httpx.post(f"{cluster.url}/v1/completions", json=request, timeout=120)
            return reply.json()["usage"]["completion_tokens"]

        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            assert list(threads.map(ask, range(8))) == [2] * 8
        cluster.wait_until(lambda: sorted(roles(cluster).values()) == ["decode", "prefill", "prefill"], "a decode node to switch")
        assert cluster.status().wanted_prefill == 2
        assert cluster.metric("conductor-0", "springtide_conductor_role_switches_total", {"to": "prefill", "outcome": "ordered"}) == 1
        assert ask(99) == 2
