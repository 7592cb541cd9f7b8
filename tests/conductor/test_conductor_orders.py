"""The core's orders are given to real stores, by a Conductor that leads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from conductor_nodes import Node, schedule_request
from conductor_support import SETTINGS, ref
from conductor_support import keys_of as support_keys

from conductor.core.conductor import ConductorCore
from conductor.core.types.events import Action, Event, Replicate, ReplicationEnded, SwitchFailed, SwitchRole
from conductor.server.leadership import OnlyConductor, Standing
from conductor.server.orders import Orders
from conductor.server.runner import CoreRunner
from conductor.server.server import ConductorServer
from springtide.blocks import block_keys, namespace_root
from springtide.clock import MonotonicClock
from springtide.config import ClusterConfig
from springtide.ids import BlockKey, InstanceId, NodeId
from springtide.modelinfo import ModelInfo
from springtide.process import ProcessArguments
from springtide.protocol import wire
from springtide.protocol.instances import Role, RoleSwitch
from springtide.protocol.sampling import SamplingParams
from springtide.protocol.scheduling import PrefixSource
from springtide.rpc import conductor_pb2, node_pb2, node_pb2_grpc
from springtide.rpc.channels import connect, new_server
from springtide.rpc.conductor_pb2_grpc import ConductorStub
from tests.support.engine_nodes import EngineNodes
from tests.support.models import make_tiny_llama
from tests.support.scheduling import scheduled
from tests.support.valkey import new_valkey
from tests.support.waiting import until

BLOCK_TOKENS = 16
PROMPT = list(range(10, 210))


class Standby(OnlyConductor):
    def standing(self, heard_epoch: int = 0) -> Standing:
        return Standing(False, 1, "")


class Runner(CoreRunner):
    """Remembers what the core was told."""

    def __init__(self) -> None:
        super().__init__(ConductorCore(SETTINGS), MonotonicClock())
        self.told: list[Event] = []

    def feed(self, event: Event) -> list[Action]:
        self.told.append(event)
        return super().feed(event)


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[EngineNodes]:
    make_tiny_llama(tmp_path / "model")
    kv = {"block_tokens": BLOCK_TOKENS, "arena_size": "8MiB"}
    async with EngineNodes(tmp_path, tmp_path / "model", prefill=2, decode=1, kv=kv) as running:
        yield running


def keys_of(nodes: EngineNodes, num_tokens: int) -> tuple[BlockKey, ...]:
    spec = nodes.info.kv_spec("float32", BLOCK_TOKENS)
    return tuple(block_keys(namespace_root(nodes.info.fingerprint, spec.dtype, BLOCK_TOKENS), PROMPT[:num_tokens], BLOCK_TOKENS))


def order(nodes: EngineNodes, keys: tuple[BlockKey, ...]) -> Replicate:
    addresses = {name: member.details["store_address"] for name, member in nodes.members.items()}
    source = PrefixSource(NodeId("prefill-0"), addresses["prefill-0"], len(keys))
    return Replicate(NodeId("prefill-1"), addresses["prefill-1"], keys, (source,), 0, within_s=30.0)


async def test_a_store_takes_a_copy_and_the_core_hears_of_it(nodes: EngineNodes) -> None:
    await nodes.gateway.run(PROMPT, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    runner, keys = Runner(), keys_of(nodes, 160)
    orders = Orders(runner, OnlyConductor(""))
    orders.give([order(nodes, keys)])
    await until(lambda: runner.told)
    assert runner.told == [ReplicationEnded(NodeId("prefill-1"), keys[-1], 10, failed=False)]
    assert nodes.stores["prefill-1"].pool.num_held(keys) == 10
    await orders.close()


async def test_a_copy_of_what_nobody_holds_has_failed(nodes: EngineNodes) -> None:
    runner, keys = Runner(), keys_of(nodes, 160)
    orders = Orders(runner, OnlyConductor(""))
    orders.give([order(nodes, keys)])
    await until(lambda: runner.told)
    assert runner.told == [ReplicationEnded(NodeId("prefill-1"), keys[-1], 0, failed=True)]
    await orders.close()


async def test_a_standby_gives_no_orders() -> None:
    runner, key = Runner(), BlockKey(bytes(16))
    orders = Orders(runner, Standby(""))
    orders.give(
        [
            Replicate(NodeId("n"), "127.0.0.1:1", (key,), (PrefixSource(NodeId("m"), "127.0.0.1:1", 1),), 0, within_s=30.0),
            SwitchRole(ref("d0", Role.DECODE), RoleSwitch(Role.PREFILL, 1.0)),
        ]
    )
    assert runner.told == [ReplicationEnded(NodeId("n"), key, 0, failed=True), SwitchFailed(InstanceId("d0"))]
    await orders.close()


async def test_the_core_hears_of_an_instance_that_did_not_take_its_order() -> None:
    runner = Runner()
    orders = Orders(runner, OnlyConductor(""))
    nobody = replace(ref("d0", Role.DECODE), address="127.0.0.1:1")
    orders.give([SwitchRole(nobody, RoleSwitch(Role.PREFILL, 1.0))])
    await until(lambda: runner.told)
    assert runner.told == [SwitchFailed(InstanceId("d0"))]
    await orders.close()


class Babbler(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Answers every call with what is no message of ours."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def answer(request: bytes, context: Any) -> bytes:
            return b"\xff"

        return grpc.unary_unary_rpc_method_handler(answer)


async def test_the_core_hears_of_a_copy_whose_end_is_told_in_no_words_of_ours() -> None:
    server, runner, key = new_server(), Runner(), BlockKey(bytes(16))
    server.add_generic_rpc_handlers((Babbler(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    orders = Orders(runner, OnlyConductor(""))
    orders.give([Replicate(NodeId("n"), address, (key,), (PrefixSource(NodeId("m"), "127.0.0.1:1", 1),), 0, within_s=30.0)])
    await until(lambda: runner.told)
    assert runner.told == [ReplicationEnded(NodeId("n"), key, 0, failed=True)]
    await orders.close()
    await server.stop(None)


async def test_an_instance_is_told_its_new_role_and_how_long_it_may_take() -> None:
    told: asyncio.Queue[node_pb2.SwitchRoleRequest] = asyncio.Queue()

    class Engine(node_pb2_grpc.DecodeNodeServicer):
        async def SwitchRole(self, request: node_pb2.SwitchRoleRequest, context: Any) -> node_pb2.SwitchRoleReply:
            told.put_nowait(request)
            return node_pb2.SwitchRoleReply()

    server = new_server()
    node_pb2_grpc.add_DecodeNodeServicer_to_server(Engine(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    orders = Orders(Runner(), OnlyConductor(""))
    instance = ref("d0", Role.DECODE)
    orders.give(
        [SwitchRole(type(instance)(instance.instance_id, instance.role, address, instance.node_id, ""), RoleSwitch(Role.PREFILL, 2.5))]
    )
    async with asyncio.timeout(10):
        request = await told.get()
    assert wire.ROLE_SWITCH.decode(request) == RoleSwitch(Role.PREFILL, 2.5)
    await orders.close()
    await server.stop(None)


async def test_a_conductor_has_what_its_requests_share_copied_off_a_congested_node(tmp_path: Path) -> None:
    model = ModelInfo("/model", "tiny", "llama", "fingerprint-1", 8192, 2, 1, 8, 100, (0,))
    with new_valkey() as valkey:
        nodes = [Node(name, name[:-2], valkey.connection_url, "copies", 5.0) for name in ("prefill-0", "prefill-1", "decode-0")]
        holder, other, _ = nodes
        holder.store.keys = support_keys(20)
        holder.engine.report(queue_ms=5_000.0)
        conductor = {"lease_s": 5.0, "replication_gain_ms": 1.0, "transfer_bytes_per_s": 1e4}
        config = ClusterConfig.model_validate(
            {
                "redis_url": valkey.connection_url,
                "cluster": "copies",
                "kv": {"block_tokens": 8, "open_to_strangers": True},
                "conductor": conductor,
            }
        )
        server, stop = ConductorServer(ProcessArguments(config, model, tmp_path, "", "conductor-0", "127.0.0.1")), asyncio.Event()
        for node in nodes:
            await node.start()
        address = await server.start()
        running = asyncio.create_task(server.run(stop))
        async with connect(address) as channel, asyncio.timeout(30):
            stub = ConductorStub(channel)
            while not (await stub.GetCluster(conductor_pb2.GetClusterRequest())).ready or other.store.watches == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            for number in range(40):
                await scheduled(channel, schedule_request(f"a{number}", support_keys(20), 20 * 8 + 1))
            other.engine.report()
            while len(other.store.keys) < 20:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        stop.set()
        await running
        await server.close()
        for node in nodes:
            await node.close()
