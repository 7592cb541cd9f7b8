"""Two Conductors, one leads: whatever happens to it, each accepted request gets exactly one terminal reply, and soon the other leads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from deploy.local.plan import VALKEY_DIRECTORY
from gateway.app import TAKE_OVER_S
from springtide.rpc import conductor_pb2, conductor_pb2_grpc
from springtide.rpc.channels import connect
from tests.support.cluster import Cluster, hanging
from tests.support.gaps import LONGEST_GAP_S, streams_while
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE
from tests.support.reference import random_prompt
from tests.support.scheduling import asking
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]

NUM_CLIENTS = 3
OUTPUT_TOKENS = 12
LEASE_S = 2.0
STREAM_TOKENS = 1200
"""For longer than it takes until another leads."""
WAIT_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    shape = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 8, "max_position_embeddings": 8192}
    model = make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", **shape)
    with Cluster(
        model=str(model),
        dtype="float32",
        profile=TINY_PROFILE,
        prefill=1,
        decode=1,
        prefill_node={"threads": 1},
        decode_node={"threads": 1},
        conductor={"replicas": 2, "leader_lease_s": LEASE_S},
        kv={"arena_size": "256MiB"},
    ) as cluster:
        yield cluster


@dataclass(frozen=True, slots=True)
class StreamEnd:
    status: int
    tokens: int
    terminals: tuple[str, ...]


GOOD = StreamEnd(200, OUTPUT_TOKENS, ("length", "[DONE]"))


@dataclass
class Load:
    """Clients that stream one completion after the other until they are told to stop."""

    cluster: Cluster
    ends: list[StreamEnd] = field(default_factory=list)
    first_tokens: list[tuple[float, float]] = field(default_factory=list)
    """When each request was sent, and when its first token came."""
    over: threading.Event = field(default_factory=threading.Event)

    def run(self, client: int) -> None:
        turn = 0
        while not self.over.is_set():
            turn += 1
            self.ends.append(self._stream(1000 * client + turn))

    def _stream(self, seed: int) -> StreamEnd:
        request = {"model": self.cluster.model, "prompt": random_prompt(seed, 40, 10, 250), "max_tokens": OUTPUT_TOKENS}
        request |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        tokens, terminals = 0, []
        sent_at, first_at = time.monotonic(), None
        with httpx.stream("POST", f"{self.cluster.url}/v1/completions", json=request, timeout=120) as response:
            for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    terminals.append("[DONE]")
                    continue
                event = json.loads(line.removeprefix("data: "))
                terminals += [event["error"]["message"]] if "error" in event else []
                terminals += [choice["finish_reason"] for choice in event.get("choices", ()) if choice["finish_reason"]]
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                first_at = first_at or time.monotonic()
        if first_at is not None:
            self.first_tokens.append((sent_at, first_at))
        return StreamEnd(response.status_code, tokens, tuple(terminals))

    def wait_for_more(self) -> None:
        """Until each client has sent another request, which was scheduled."""
        now = time.monotonic()

        def scheduled() -> bool:
            assert set(self.ends) <= {GOOD}
            return sum(sent_at > now for sent_at, _ in list(self.first_tokens)) >= NUM_CLIENTS

        wait_until(scheduled)

    def report(self, what: str, since: float) -> str:
        waits = [first_at - sent_at for sent_at, first_at in self.first_tokens]
        hit = [first_at - sent_at for sent_at, first_at in self.first_tokens if first_at > since]
        firsts = sorted(first_at for _, first_at in self.first_tokens)
        gap = max((late - early for early, late in itertools.pairwise(firsts) if late > since), default=0.0)
        return (
            f"{what}: {len(self.ends)} requests, lease {LEASE_S:g} s; longest wait for a first token {max(hit):.2f} s "
            f"(median {statistics.median(waits):.2f} s), longest time between first tokens {gap:.2f} s"
        )


@contextmanager
def load_on(cluster: Cluster) -> Iterator[Load]:
    load = Load(cluster)
    with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as threads:
        running = [threads.submit(load.run, client) for client in range(NUM_CLIENTS)]
        try:
            load.wait_for_more()
            yield load
            load.wait_for_more()
        finally:
            load.over.set()
        for client in running:
            client.result()


def standings(cluster: Cluster) -> dict[str, conductor_pb2.ClusterStatus]:
    """What each Conductor that answers says of itself."""
    said = {name: standing(cluster, address) for name, address in conductors(cluster).items()}
    return {name: status for name, status in said.items() if status is not None}


def conductors(cluster: Cluster) -> dict[str, str]:
    """Their names and addresses."""
    return {member.member_id: member.address for member in cluster.members() if member.role == "conductor"}


def standing(cluster: Cluster, address: str) -> conductor_pb2.ClusterStatus | None:
    """What the Conductor there says of itself, if it answers."""
    with grpc.insecure_channel(address) as channel:
        try:
            stub = conductor_pb2_grpc.ConductorStub(channel)
            return stub.GetCluster(conductor_pb2.GetClusterRequest(), timeout=1, metadata=cluster.metadata)
        except grpc.RpcError:
            return None


def leads(cluster: Cluster, address: str) -> bool:
    return (status := standing(cluster, address)) is not None and status.leads


def eligible_standby(cluster: Cluster, leader: str) -> str:
    """The address of the other Conductor, once it has run for so long that it leaves the lease to nobody any more."""
    ((name, address),) = wait_until(lambda: [each for each in conductors(cluster).items() if each[0] != leader])
    pid = cluster.pid_of(name)
    assert pid is not None
    started_at = psutil.Process(pid).create_time()
    wait_until(lambda: time.time() - started_at > 2 * (LEASE_S + TAKE_OVER_S))
    return address


def leader_of(cluster: Cluster) -> tuple[str, int]:
    """Its name and epoch. There is never more than one."""
    found: list[tuple[str, int]] = []

    def one_leads() -> bool:
        found[:] = [(name, status.epoch) for name, status in standings(cluster).items() if status.leads]
        assert len(found) < 2, found
        return len(found) == 1

    wait_until(one_leads)
    return found[0]


def shown_status(cluster: Cluster) -> str:
    return subprocess.check_output([sys.executable, "-m", "deploy.cli", "status", "--url", cluster.url], text=True)


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_another_leads_soon_after_the_leader_is_gone_and_no_stream_stands_still_meanwhile(cluster: Cluster, how: str) -> None:
    leader, _ = leader_of(cluster)
    standby, pid = eligible_standby(cluster, leader), cluster.pid_of(leader)
    assert pid is not None
    took_s = 0.0

    @contextmanager
    def fault() -> Iterator[None]:
        nonlocal took_s
        began = time.monotonic()
        with hanging([pid]) if how == "stopped" else contextlib.nullcontext(cluster.kill(leader)):
            wait_until(lambda: leads(cluster, standby))
            took_s = time.monotonic() - began
            yield

    gaps = streams_while(fault, cluster, STREAM_TOKENS)
    print(f"{how}: another leads after {took_s:.2f} s, lease {LEASE_S:g} s; longest gaps {[round(gap, 2) for gap in gaps]} s")
    assert took_s <= LEASE_S + TAKE_OVER_S
    assert max(gaps) <= LONGEST_GAP_S
    cluster.wait_ready(restarted=leader if how == "killed" else None)


def test_a_killed_leader_costs_no_request(cluster: Cluster) -> None:
    for kill in (1, 2):
        leader, epoch = leader_of(cluster)
        with load_on(cluster) as load:
            killed_at = time.monotonic()
            cluster.kill(leader)
            load.wait_for_more()
        heir, next_epoch = leader_of(cluster)
        print(load.report(f"kill {kill} of the leader", killed_at))
        assert set(load.ends) == {GOOD}
        assert heir != leader and next_epoch > epoch
        cluster.wait_ready(restarted=leader)


async def test_a_leader_that_stood_still_is_not_believed_when_it_goes_on(cluster: Cluster) -> None:
    leader, epoch = leader_of(cluster)
    credentials = cluster.record.credentials
    address = next(member.address for member in cluster.members() if member.member_id == leader)
    asked = conductor_pb2.ScheduleRequest(attempt_id="r.1", request_id="r", num_tokens=1, max_new_tokens=1, gateway_id="nobody")
    pid = cluster.pid_of(leader)
    assert pid is not None
    with load_on(cluster) as load:
        async with connect(address, credentials) as channel, asking(channel, credentials) as conductor:
            # There is a connection, then.
            await conductor.renew(conductor_pb2.RenewRequest(gateway_id="nobody"), WAIT_S)
            os.kill(pid, signal.SIGSTOP)
            try:
                stopped_at = time.monotonic()
                late = asyncio.create_task(conductor.ask(asked, WAIT_S))
                await asyncio.to_thread(load.wait_for_more)
                heir, next_epoch = await asyncio.to_thread(leader_of, cluster)
                assert f"conductor: {heir} leads (epoch {next_epoch})" in await asyncio.to_thread(shown_status, cluster)
            finally:
                os.kill(pid, signal.SIGCONT)
            answer = await late
        load.wait_for_more()
        print(load.report("the leader stopped by SIGSTOP", stopped_at))
    assert set(load.ends) == {GOOD}
    assert heir != leader and next_epoch > epoch
    assert answer.WhichOneof("outcome") == "not_leader" or answer.epoch < next_epoch
    wait_until(lambda: len(standings(cluster)) == 2)
    assert f"conductor: {heir} leads (epoch {next_epoch}), {leader} stands by" in shown_status(cluster)
    assert leader_of(cluster) == (heir, next_epoch)
    assert standings(cluster)[leader].leader_address == standings(cluster)[heir].leader_address
    assert cluster.metric(leader, "springtide_conductor_is_leader") == 0
    assert cluster.metric(heir, "springtide_conductor_is_leader") == 1


def test_a_valkey_that_comes_back_empty_costs_no_request(cluster: Cluster) -> None:
    _, epoch = leader_of(cluster)
    with load_on(cluster) as load:
        killed_at = time.monotonic()
        # What it would find again when it is started anew.
        shutil.rmtree(Path(cluster.record.run_dir, VALKEY_DIRECTORY))
        cluster.kill("valkey")
        load.wait_for_more()
        cluster.wait_ready(restarted="valkey")
    print(load.report("kill of Valkey", killed_at))
    assert set(load.ends) == {GOOD}
    assert leader_of(cluster)[1] > epoch, "Valkey lost its count of leaderships, the Conductors did not"
