"""What somebody can do who reaches a running cluster's ports, or gets at its Valkey, and does not know its secret: nothing."""

from __future__ import annotations

import json
import socket
import ssl
import stat
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import psutil
import pytest
import redis

from deploy.ca.authority import Authority
from deploy.ca.identity import Identity, issue_to
from springtide.credentials import Credentials
from springtide.membership import Member
from springtide.rpc import (
    common_pb2,
    conductor_pb2,
    conductor_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    observation_pb2,
    store_pb2,
    store_pb2_grpc,
)
from springtide.rpc.authentication import REFUSAL, TOKEN_KEY
from springtide.rpc.frames import SCHEDULE
from tests.support import streams
from tests.support.cluster import Cluster
from tests.support.models import make_tiny_llama
from tests.support.profiles import TINY_PROFILE
from tests.support.reference import random_prompt

TIMEOUT_S = 10
KINDS = {(False, False): "unary_unary", (False, True): "unary_stream", (True, False): "stream_unary", (True, True): "stream_stream"}
SERVICES = (
    *conductor_pb2.DESCRIPTOR.services_by_name.values(),
    *node_pb2.DESCRIPTOR.services_by_name.values(),
    *observation_pb2.DESCRIPTOR.services_by_name.values(),
    *store_pb2.DESCRIPTOR.services_by_name.values(),
)


SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "profile": TINY_PROFILE,
    "server": {"separate_gateway": True},
    "kv": {"arena_size": "256MiB"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def cluster(model: str) -> Iterator[Cluster]:
    with Cluster(**SETTINGS, model=model) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def certified(model: str) -> Iterator[Cluster]:
    """Whose processes have certificates, as in a cluster of several machines."""
    with Cluster(**SETTINGS, model=model, join_port=0, valkey_port=0) as cluster:
        yield cluster


def code_of(error: grpc.RpcError) -> grpc.StatusCode:
    code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
    return code


def answer_to(channel: grpc.Channel, service: str, method: str, kind: str) -> grpc.StatusCode:
    """To an empty message of a stranger."""
    call = getattr(channel, kind)(f"/{service}/{method}")
    try:
        reply = call(iter([b""]) if kind.startswith("stream") else b"", timeout=TIMEOUT_S)
        if kind.endswith("stream"):
            next(reply, None)
    except grpc.RpcError as error:
        return code_of(error)
    return grpc.StatusCode.OK


def member(cluster: Cluster, role: str) -> Member:
    return next(member for member in cluster.members() if member.role == role)


def serves(cluster: Cluster) -> bool:
    end = streams.stream(cluster, random_prompt(1, 100, 10, 250), 4, lambda: None)
    return end.finish_reasons == ("length",) and not end.errors


def grpc_ports(cluster: Cluster) -> dict[str, str]:
    """Which TCP ports of the cluster's processes speak gRPC, and whose they are."""
    found = {}
    for name, pid in cluster.record.processes.items():
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                address = f"127.0.0.1:{connection.laddr.port}"
                with grpc.insecure_channel(address) as channel:
                    try:
                        grpc.channel_ready_future(channel).result(timeout=1)
                        found[address] = name
                    except grpc.FutureTimeoutError:
                        continue
    return found


def test_no_port_of_the_cluster_but_the_public_one_answers_a_stranger(cluster: Cluster) -> None:
    ports = grpc_ports(cluster)
    assert set(ports.values()) == {"prefill-0", "decode-0", "prefill-0-store", "decode-0-store", "conductor-0", "gateway-0"}
    for address, name in ports.items():
        refused = {grpc.StatusCode.UNIMPLEMENTED if name == "gateway-0" else grpc.StatusCode.UNAUTHENTICATED}
        with grpc.insecure_channel(address) as channel:
            for service in SERVICES:
                for method in service.methods:
                    kind = KINDS[method.client_streaming, method.server_streaming]
                    assert {answer_to(channel, service.full_name, method.name, kind)} == refused, f"{name}: {method.full_name}"
    assert serves(cluster)


def told(address: str, greeting: bytes, *questions: conductor_pb2.ScheduleQuestion) -> bytes:
    """All that a Conductor says to who greets it so, and does not wait to be welcomed."""
    host, _, port = address.rpartition(":")
    messages = (greeting, *(question.SerializeToString() for question in questions))
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as plain:
        plain.sendall(b"".join(struct.pack("<I", len(message)) + message for message in messages))
        return b"".join(iter(lambda: plain.recv(1 << 16), b""))


@pytest.mark.parametrize("token", ["", str(Credentials(b"the secret of another cluster", "springtide").token)], ids=["none", "another's"])
def test_a_stranger_gives_no_orders(cluster: Cluster, token: str) -> None:
    metadata = ((TOKEN_KEY, token),) if token else ()
    before = {instance.instance.instance_id: instance.instance.role for instance in cluster.status().instances}
    asked = cluster.status().requests_scheduled
    schedule = conductor_pb2.ScheduleRequest(attempt_id="r.1", request_id="r", num_tokens=1, max_new_tokens=1, gateway_id="nobody")
    forgets_all = conductor_pb2.RenewRequest(gateway_id="gateway-0")
    conductor_at = member(cluster, "conductor").address
    with cluster.channel(conductor_at) as known:
        stub = conductor_pb2_grpc.ConductorStub(known)
        asked_at = stub.GetScheduleAddress(conductor_pb2.GetScheduleAddressRequest(), timeout=TIMEOUT_S, metadata=cluster.metadata).address
    with (
        grpc.insecure_channel(conductor_at) as conductor,
        grpc.insecure_channel(member(cluster, "decode").address) as decode,
        grpc.insecure_channel(member(cluster, "store").address) as store,
    ):
        for call, request in (
            (conductor_pb2_grpc.ConductorStub(conductor).GetScheduleAddress, conductor_pb2.GetScheduleAddressRequest()),
            (node_pb2_grpc.DecodeNodeStub(decode).SwitchRole, node_pb2.SwitchRoleRequest(to=common_pb2.ROLE_PREFILL)),
            (store_pb2_grpc.StoreStub(store).Evict, store_pb2.EvictRequest(all=True)),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call(request, timeout=TIMEOUT_S, metadata=metadata)
            assert code_of(refused.value) is grpc.StatusCode.UNAUTHENTICATED
    questions = conductor_pb2.ScheduleQuestion(request=schedule), conductor_pb2.ScheduleQuestion(number=1, renew=forgets_all)
    refusal = told(asked_at, SCHEDULE + b"\n" + token.encode(), *questions)
    assert refusal == struct.pack("<I", len(REFUSAL)) + REFUSAL.encode()
    assert {instance.instance.instance_id: instance.instance.role for instance in cluster.status().instances} == before
    assert cluster.status().requests_scheduled == asked
    assert "refused a call of /springtide.v1.Conductor/GetScheduleAddress by a stranger" in cluster.log("conductor-0")
    assert "refused a connection of a stranger at" in cluster.log("conductor-0")
    assert serves(cluster)


def test_nobody_takes_the_engines_place_from_a_port_the_clusters_own_included(cluster: Cluster) -> None:
    commands = [
        store_pb2.EngineCommand(hello=store_pb2.EngineHello(instance_id="prefill-0", incarnation=1)),
        store_pb2.EngineCommand(acquire=store_pb2.Acquire(attempt_id="stranger", keys=[b"k" * 16], num_blocks=1)),
        store_pb2.EngineCommand(commit=store_pb2.Commit(attempt_id="stranger", keys=[b"k" * 16])),
    ]
    for store in [member for member in cluster.members() if member.role == "store"]:
        with grpc.insecure_channel(store.address) as channel:
            for metadata, expected in (((), grpc.StatusCode.UNAUTHENTICATED), (cluster.metadata, grpc.StatusCode.UNIMPLEMENTED)):
                for service in ("LocalStore", "Store"):
                    engine = channel.stream_stream(
                        f"/springtide.v1.{service}/Engine", request_serializer=store_pb2.EngineCommand.SerializeToString
                    )
                    with pytest.raises(grpc.RpcError) as refused:
                        next(engine(iter(commands), timeout=TIMEOUT_S, metadata=metadata))
                    assert code_of(refused.value) is expected
    assert serves(cluster)


def test_the_embedded_valkey_is_to_be_had_by_this_user_only(cluster: Cluster) -> None:
    pid = cluster.pid_of("valkey")
    assert pid is not None and not psutil.Process(pid).net_connections("inet")
    assert cluster.record.redis_url.startswith("unix://")
    for path in (Path(cluster.record.run_dir), Path(cluster.record.run_dir, "valkey.sock")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    password = str(urlsplit(cluster.record.redis_url).password)
    assert password and password not in " ".join(psutil.Process(pid).cmdline())


def test_who_has_a_certificate_to_read_metrics_does_not_get_at_valkey(certified: Cluster, tmp_path: Path) -> None:
    """Nor whoever else the authority of given certificates has signed."""
    scraper = Identity(tmp_path / "prometheus")
    issue_to(scraper, Authority.open(Path(certified.record.ca_dir)), "prometheus", ("127.0.0.1",))
    context = ssl.create_default_context(cafile=scraper.authorities)
    context.load_cert_chain(scraper.certificate, scraper.key)
    relay = next(address for address, name in listening(certified).items() if name == "relay")
    host, port = relay.split(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as plain:
        stream = context.wrap_socket(plain, server_hostname=host)
        stream.sendall(b"*2\r\n$4\r\nKEYS\r\n$1\r\n*\r\n")
        assert stream.recv(1 << 16).startswith(b"-NOAUTH")


def test_who_announces_himself_without_the_secret_is_sent_nothing(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with redis.Redis.from_url(cluster.record.redis_url) as valkey:
            for role in ("store", "prefill", "decode", "conductor"):
                fake = Member(role, "a-fake", 1, address, "a-fake", details={"store_address": address})  # type: ignore[arg-type]
                for key, record in (
                    (f"{role}:a-fake", json.dumps(asdict(fake))),
                    (f"{role}:a-bad-one", '{"details": null, "member_id": 5}'),
                ):
                    valkey.set(f"springtide:member:{key}", record)
            try:
                for name in ("conductor-0", "gateway-0"):
                    cluster.wait_until(lambda name=name: "prefill:a-fake" in cluster.log(name), f"{name} to have seen it")  # type: ignore[misc]
                assert serves(cluster)
                known = {instance.instance.instance_id for instance in cluster.status().instances}
                assert known == {"prefill-0", "decode-0"}
                listening.settimeout(0)
                with pytest.raises(BlockingIOError):
                    listening.accept()
            finally:
                valkey.delete(*valkey.keys("springtide:member:*:a-*"))


def listening(cluster: Cluster) -> dict[str, str]:
    """The TCP ports of the cluster's processes, and whose they are; the gateway's public ones and the join service's apart."""
    public = {address.rpartition(":")[2] for address in (cluster.url, cluster.grpc_address, cluster.record.join_address)}
    found = {}
    for name, pid in {**cluster.record.processes, "relay": cluster.supervisor.pid}.items():
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and str(connection.laddr.port) not in public:
                found[f"127.0.0.1:{connection.laddr.port}"] = name
    return found


def messenger_ports(cluster: Cluster) -> set[str]:
    return {json.loads(store.details["endpoint"])["addresses"]["tcp"] for store in cluster.members() if store.role == "store"}


def test_with_certificates_no_port_shakes_hands_with_who_has_none_or_anothers(certified: Cluster, tmp_path: Path) -> None:
    stranger = Identity(tmp_path / "stranger")
    issue_to(stranger, Authority.create(tmp_path / "ca", "springtide"), "a-stranger", ("127.0.0.1",))
    none, other = (ssl.create_default_context(cafile=certified.record.tls["ca"]) for _ in range(2))
    other.load_cert_chain(stranger.certificate, stranger.key)
    ports = {address: name for address, name in listening(certified).items() if address not in messenger_ports(certified)}
    nodes = ("prefill-0", "decode-0", "prefill-0-store", "decode-0-store")
    assert Counter(ports.values()) == {**dict.fromkeys(nodes, 2), "conductor-0": 3, "gateway-0": 1, "relay": 1}, (
        "gRPC and metrics of each, and where the Conductor is asked"
    )
    for address, name in ports.items():
        host, port = address.split(":")
        for context in (none, other, None):
            with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as plain:
                answer = b""
                try:
                    stream = plain if context is None else context.wrap_socket(plain, server_hostname=host)
                    stream.sendall(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n")
                    answer = stream.recv(1 << 16)
                except OSError:  # a handshake that fails, or a connection that ends
                    pass
            assert b"HTTP" not in answer and b"springtide" not in answer, f"{name} at {address} has answered"
    assert serves(certified)


def test_with_certificates_the_cluster_works_as_without(certified: Cluster) -> None:
    assert serves(certified)
    assert {instance.instance.instance_id for instance in certified.status().instances} == {"prefill-0", "decode-0"}
    assert certified.metric("decode-0-store", "springtide_store_slots") > 0


def test_a_rotated_authority_is_followed_while_a_stream_goes_on(certified: Cluster) -> None:
    authority = Authority.open(Path(certified.record.ca_dir))
    before = Path(certified.record.tls["certificate"]).read_bytes()
    rotated: list[Authority] = []

    def rotate() -> None:
        if not rotated:
            rotated.append(authority.rotate())
            certified.wait_until(lambda: Path(certified.record.tls["certificate"]).read_bytes() != before, "a new certificate")

    end = streams.stream(certified, random_prompt(2, 100, 10, 250), 200, rotate)
    assert rotated and end.finish_reasons == ("length",) and not end.errors
    certified.kill("decode-0-store")
    certified.wait_ready("decode-0-store")
    assert serves(certified)
