"""A cluster over machines of its own: networks, host names, processes and shared memory apart, links of limited rate; put together by
`springtide up` on the first and `springtide node` on the others; then machines are cut off, killed and restarted one by one under load."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import pytest

from springtide.config import TlsConfig
from springtide.protocol import wire
from springtide.protocol.status import ClusterStatus
from springtide.rpc import conductor_pb2 as pb
from springtide.rpc import conductor_pb2_grpc
from springtide.rpc.authentication import TOKEN_KEY
from tests.support.balancer import Balancer
from tests.support.clients import WORKERS, Load, Questions, ask, prompt_of
from tests.support.cluster import members_of, metric_at
from tests.support.generate import generate
from tests.support.hosts import HEAD_NAME, Host, Hosts, Running, wait_until, with_settings
from tests.support.reference import Reference

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(os.geteuid() != 0, reason="wants root, for namespaces"), pytest.mark.timeout(420)]

MODEL = "hosts"
MBIT_PER_S, DELAY_MS = 200.0, 1.0
JOIN_PORT, VALKEY_PORT, HTTP_PORT, GRPC_PORT = 8002, 8003, 8000, 8001
SHORT, LONG, VERY_LONG = 24, 160, 800
ASKED = (*((seed, SHORT) for seed in range(12)), (0, LONG), (6, LONG), (0, VERY_LONG))
"""Prompts' numbers, and how many tokens."""
DRAIN_S = 60


@dataclass
class Fleet:
    """The cluster, by the names of what was started."""

    hosts: Hosts
    running: dict[str, Running]
    token: str = ""
    questions: Questions = field(default_factory=lambda: Questions(MODEL))

    @property
    def head(self) -> Running:
        return self.running["head"]

    @property
    def gateways(self) -> list[str]:
        return [f"{self.running[name].host.address}:{HTTP_PORT}" for name in ("head", "gateway")]

    def url(self, name: str) -> str:
        return f"http://{self.running[name].host.address}:{HTTP_PORT}/v1"

    def join(self, host: Host, role: str, *options: str) -> Running:
        """As an operator does; does not wait until it is ready."""
        command = ("node", role, "--join", f"{HEAD_NAME}:{JOIN_PORT}", "--set", f"drain_s={DRAIN_S}", *options)
        node = self.running[host.name if role in ("prefill", "decode") else role] = Running(host, f"{role}-node", *command)
        node.start("--token", self.token)
        return node

    def logs(self) -> str:
        return "\n".join(running.logs() for running in self.running.values())

    def status(self) -> ClusterStatus:
        """Raises grpc.RpcError, AssertionError."""
        record = self.head.record
        members = members_of(record.redis_url, record.cluster, record.credentials)
        tls = record.credentials.tls
        assert tls is not None
        for conductor in (member for member in members if member.role == "conductor"):
            with grpc.secure_channel(conductor.address, tls.channel_credentials()) as channel:
                stub, metadata = conductor_pb2_grpc.ConductorStub(channel), ((TOKEN_KEY, str(record.credentials.token)),)
                try:
                    return wire.CLUSTER_STATUS.decode(stub.GetCluster(pb.GetClusterRequest(), timeout=5, metadata=metadata))
                except grpc.RpcError:
                    continue
        raise AssertionError("no Conductor answers")

    def instances(self) -> set[str]:
        try:
            return {each.instance.instance_id for each in self.status().instances if each.ready}
        except (grpc.RpcError, AssertionError, StopIteration):
            return set()

    def running_at(self, name: str) -> int:
        return sum(each.running for each in self.status().instances if each.instance.instance_id == name)

    def metric(self, role: str, metric: str, labels: dict[str, str]) -> float:
        record = self.head.record
        members = members_of(record.redis_url, record.cluster, record.credentials)
        addresses = [member.metrics_address for member in members if member.role == role]
        return sum(metric_at(address, metric, labels, TlsConfig.model_validate(record.tls)) for address in addresses)

    def load(self, base_urls: Sequence[str]) -> Load:
        return Load(self.questions, base_urls, LONG, self.logs)

    def wait_whole(self) -> None:
        wait_until(lambda: self.instances() == INSTANCES, f"the Conductor to know {INSTANCES}", self.logs)
        wait_until(lambda: all(is_ready(gateway) for gateway in self.gateways), "both gateways to be ready", self.logs)


ENGINES = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}
INSTANCES = {f"{role}-{host}" for host, role in ENGINES.items()}


def is_ready(gateway: str) -> bool:
    try:
        return httpx.get(f"http://{gateway}/ready", timeout=2, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def fleet(model: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    hosts = Hosts(("head", "edge", *ENGINES), tmp_path_factory.mktemp("hosts"), MBIT_PER_S, DELAY_MS)
    print(f"\nlinks of {MBIT_PER_S:g} Mbit/s, {DELAY_MS:g} ms each way")
    try:
        fleet = started(hosts, model)
        fleet.questions.learn(f"{fleet.head.host.address}:{GRPC_PORT}", reference, ASKED)
        yield fleet
    finally:
        hosts.close()


def started(hosts: Hosts, model: Path) -> Fleet:
    given = with_settings(
        model,
        MODEL,
        # Who leads goes on deciding for so long while Valkey, which is the head's, is started anew.
        {"conductor.leader_lease_s": 10.0, "drain_s": DRAIN_S},
    )
    place = ("--address", hosts.head.address, "--host", "0.0.0.0", "--prefill", "0", "--decode", "0")
    fleet = Fleet(hosts, {"head": Running(hosts.head, "head", "up", *place, *given)})
    fleet.head.start()
    fleet.head.wait_ready()
    fleet.token = str(json.loads(fleet.head.host.run("token", "create", "--json"))["token"])
    for host, role in ENGINES.items():
        fleet.join(hosts.hosts[host], role, "--set", f"{role}_node.threads=1")
    fleet.join(hosts.hosts["edge"], "gateway", "--host", "0.0.0.0")
    fleet.join(hosts.hosts["edge"], "conductor")
    for running in fleet.running.values():
        running.wait_ready()
    fleet.wait_whole()
    return fleet


# ---- what is answered ----


def test_machines_that_have_joined_answer_as_transformers_do(fleet: Fleet) -> None:
    for gateway in ("head", "gateway"):
        for asked in ((0, SHORT), (0, LONG)):
            answer = ask(fleet.questions, fleet.url(gateway), *asked)
            assert answer.error is None and answer.right, answer


def test_the_head_shows_every_machine(fleet: Fleet) -> None:
    shown = fleet.head.host.run("status")
    assert all(name in shown for name in INSTANCES), shown


def test_bytes_of_the_pool_go_over_the_network_and_processes_of_a_machine_share_memory_with_no_other(fleet: Fleet) -> None:
    """Though all of these have one kernel. What each store moved through shared memory before was its own test of itself."""
    metric = "springtide_messenger_bytes_total"
    before = {transport: fleet.metric("store", metric, {"transport": transport}) for transport in ("tcp", "shm")}
    generate(f"{fleet.head.host.address}:{GRPC_PORT}", MODEL, prompt_of(100, 300), 4)
    assert fleet.metric("store", metric, {"transport": "tcp"}) - before["tcp"] >= 300 * 3 * 2 * 2 * 16 * 4, "K, V: 3 layers, 2 heads of 16"
    assert fleet.metric("store", metric, {"transport": "shm"}) == before["shm"]


def test_machines_listen_where_the_documentation_says(fleet: Fleet) -> None:
    low, high = fleet.head.host.ephemeral_ports
    fixed = {"head": {HTTP_PORT, GRPC_PORT, JOIN_PORT, VALKEY_PORT}, "edge": {HTTP_PORT, GRPC_PORT}}
    for host in fleet.hosts.hosts.values():
        listening = host.listening()
        ephemeral = {(address, port) for address, port in listening if port not in fixed.get(host.name, set())}
        beyond = {(address, port) for address, port in ephemeral if address != host.address or not low <= port <= high}
        assert not beyond, f"{host.name} at {host.address}, {low} to {high}"
        assert {port for _, port in listening - ephemeral} == fixed.get(host.name, set())


# ---- who is lost ----


@pytest.mark.parametrize(("name", "how"), [("d2", "cut"), ("p2", "swallow")])
def test_a_machine_that_is_cut_off_is_gone_around_and_comes_back(fleet: Fleet, name: str, how: str) -> None:
    """What was under way there goes on elsewhere, and nobody sees an error."""
    network = fleet.hosts.hosts[name].network
    with fleet.load([fleet.url("gateway"), fleet.url("head")]) as load:
        load.wait_answered(WORKERS)
        getattr(network, how)()
        try:
            wait_until(lambda: f"{ENGINES[name]}-{name}" not in fleet.instances(), f"the Conductor to miss {name}", fleet.logs)
            load.wait_answered(2 * WORKERS)
        finally:
            network.mend()
        wait_until(lambda: fleet.instances() == INSTANCES, f"{name} to be back", fleet.logs)
        load.wait_answered(WORKERS)
    load.check()


def test_streams_go_on_while_the_head_is_cut_off(fleet: Fleet) -> None:
    """New requests wait for it, and are answered when it is back."""
    pieces: list[float] = []
    with ThreadPoolExecutor(3) as threads:
        url = fleet.url("gateway")
        streams = [threads.submit(ask, fleet.questions, url, 0, VERY_LONG, lambda: pieces.append(time.monotonic())) for _ in range(2)]
        wait_until(lambda: len(pieces) > 20, "streams to begin", fleet.logs)
        fleet.head.host.network.swallow()
        try:
            waiting = threads.submit(ask, fleet.questions, url, 1, SHORT)
            enough = len(pieces) + 100
            wait_until(lambda: len(pieces) > enough, "streams to go on", fleet.logs)
            assert not waiting.done(), waiting.result()
        finally:
            fleet.head.host.network.mend()
        answers = [each.result() for each in (*streams, waiting)]
    assert all(answer.right for answer in answers), answers
    fleet.wait_whole()


def test_a_machine_that_has_lost_its_power_comes_back_without_a_token(fleet: Fleet) -> None:
    """Within the lease of its own name; and nothing of its connections stays at the head."""
    host, node = fleet.hosts.hosts["p1"], fleet.running["p1"]
    with fleet.load([fleet.url("gateway"), fleet.url("head")]) as load:
        load.wait_answered(WORKERS)
        host.lose_power()
        load.wait_answered(2 * WORKERS)
        wait_until(lambda: "prefill-p1" not in fleet.instances(), "the Conductor to miss it", fleet.logs)
        wait_until(lambda: host.address not in fleet.head.host.connections(VALKEY_PORT), "its connections to Valkey to end", fleet.logs)
        fleet.hosts.boot(host)
        node.start()
        node.wait_ready()
        wait_until(lambda: fleet.instances() == INSTANCES, "it to be back", fleet.logs)
        load.wait_answered(WORKERS)
    load.check()


def test_a_gateway_is_killed_behind_a_balancer_and_its_sibling_serves(fleet: Fleet) -> None:
    """Whoever was being answered by it sees the connection end, and only then; the others see nothing."""
    with Balancer(fleet.gateways) as balancer:
        wait_until(lambda: len(balancer.ready) == 2, "the balancer to see both")
        with fleet.load([fleet.url("head")]) as others, fleet.load([f"{balancer.url}/v1"]) as load:
            load.wait_answered(2 * WORKERS)
            assert all(balancer.connections.values()), balancer.connections
            fleet.running["gateway"].kill()
            wait_until(lambda: not is_ready(fleet.gateways[1]), "the gateway to be gone")
            gone_at = time.monotonic()
            load.wait_answered(4 * WORKERS)
            fleet.running["gateway"].start()
            fleet.running["gateway"].wait_ready()
            wait_until(lambda: len(balancer.ready) == 2, "the balancer to see it again", fleet.logs)
            load.wait_answered(WORKERS)
    others.check()
    broken = [answer for answer in load.answers if answer.error is not None]
    assert len(broken) <= WORKERS and all(answer.began <= gone_at for answer in broken), broken
    load.check(but=broken)


# ---- who is restarted ----


def test_every_process_is_restarted_under_load_and_no_request_is_lost(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    """One machine after the other, as for an upgrade: told to stop, waited for, started as it was; no client tries anything twice."""
    with Balancer(fleet.gateways) as balancer:
        wait_until(lambda: len(balancer.ready) == 2, "the balancer to see both", fleet.logs)
        with fleet.load([f"{balancer.url}/v1"]) as load:
            load.wait_answered(WORKERS)
            calm_until = time.monotonic()
            for name in ("conductor", *ENGINES, "gateway", "head"):
                running = fleet.running[name]
                assert running.terminate() == 0, running.logs()
                assert "has not ended all its work" not in running.said, running.logs()
                running.start()
                running.wait_ready()
                fleet.wait_whole()
                wait_until(lambda: len(balancer.ready) == 2, "the balancer to see both", fleet.logs)
            load.wait_answered(WORKERS)
    load.check()
    with capsys.disabled():
        print(f"\nbefore:  {load.summary(until=calm_until)}\nrestarts: {load.summary(since=calm_until)}")
