"""What somebody can do who reaches a running cluster's ports, or gets at its Valkey, and does not know its secret: nothing."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import redis

from springtide.credentials import Credentials
from springtide.membership import Member
from springtide.rpc import common_pb2, conductor_pb2, conductor_pb2_grpc, node_pb2, node_pb2_grpc, store_pb2, store_pb2_grpc
from springtide.rpc.authentication import TOKEN_KEY
from tests.support import streams
from tests.support.cluster import Cluster
from tests.support.reference import random_prompt
from tests.support.scheduling import question

TIMEOUT_S = 10
KINDS = {(False, False): "unary_unary", (False, True): "unary_stream", (True, False): "stream_unary", (True, True): "stream_stream"}
SERVICES = (
    *conductor_pb2.DESCRIPTOR.services_by_name.values(),
    *node_pb2.DESCRIPTOR.services_by_name.values(),
    *store_pb2.DESCRIPTOR.services_by_name.values(),
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(server={"separate_gateway": True}, kv={"arena_size": "256MiB"}) as cluster:
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
    end = streams.stream(cluster, random_prompt(1, length=100), 4, lambda: None)
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


def asked_of(channel: grpc.Channel) -> Callable[..., Any]:
    """Asks a Conductor where a request should run."""
    conductor = conductor_pb2_grpc.ConductorStub(channel)
    return lambda asked, **options: next(conductor.Schedule(iter([question(asked)]), **options))


@pytest.mark.parametrize("token", ["", str(Credentials(b"the secret of another cluster", "springtide").token)], ids=["none", "another's"])
def test_a_stranger_gives_no_orders(cluster: Cluster, token: str) -> None:
    metadata = ((TOKEN_KEY, token),) if token else ()
    before = {instance.instance.instance_id: instance.instance.role for instance in cluster.status().instances}
    asked = cluster.status().requests_scheduled
    schedule = conductor_pb2.ScheduleRequest(attempt_id="r.1", request_id="r", num_tokens=1, max_new_tokens=1, gateway_id="nobody")
    forgets_all = conductor_pb2.RenewRequest(gateway_id="gateway-0")
    with (
        grpc.insecure_channel(member(cluster, "conductor").address) as conductor,
        grpc.insecure_channel(member(cluster, "decode").address) as decode,
        grpc.insecure_channel(member(cluster, "store").address) as store,
    ):
        for call, request in (
            (asked_of(conductor), schedule),
            (conductor_pb2_grpc.ConductorStub(conductor).Renew, forgets_all),
            (node_pb2_grpc.DecodeNodeStub(decode).SwitchRole, node_pb2.SwitchRoleRequest(to=common_pb2.ROLE_PREFILL)),
            (store_pb2_grpc.StoreStub(store).Evict, store_pb2.EvictRequest(all=True)),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call(request, timeout=TIMEOUT_S, metadata=metadata)
            assert code_of(refused.value) is grpc.StatusCode.UNAUTHENTICATED
    assert {instance.instance.instance_id: instance.instance.role for instance in cluster.status().instances} == before
    assert cluster.status().requests_scheduled == asked
    assert "refused a call of /springtide.v1.Conductor/Schedule by a stranger" in cluster.log("conductor-0")
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
