"""One stream with a node, as the gateway holds it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from gateway_cluster import until

from gateway import events as ev
from gateway.sessions import NodeSession
from springtide.ids import AttemptId, InstanceId, NodeId
from springtide.protocol.instances import InstanceRef, Role
from springtide.rpc import node_pb2, node_pb2_grpc
from springtide.rpc.channels import new_server


class FailingNode(node_pb2_grpc.DecodeNodeServicer):
    """Breaks a session off at its first command."""

    async def NodeSession(self, commands: AsyncIterator[node_pb2.DecodeCommand], context: Any) -> AsyncIterator[node_pb2.DecodeUpdate]:
        async for _ in commands:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it has failed")
        yield node_pb2.DecodeUpdate()


async def test_nothing_is_left_of_a_session_that_its_node_broke_off() -> None:
    server = new_server()
    node_pb2_grpc.add_DecodeNodeServicer_to_server(FailingNode(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    before, posted = asyncio.all_tasks(), list[ev.Event]()
    session = NodeSession(
        Role.DECODE, InstanceRef(InstanceId("decode-0"), Role.DECODE, address, NodeId("decode-0"), ""), posted.append, lambda ended: None
    )
    session.attempts.add(AttemptId("a.1"))
    session.send(node_pb2.DecodeCommand(abort=node_pb2.AbortAttempt(attempt_id="a.1")))

    await until(lambda: posted)

    assert posted == [ev.SessionLost("decode", InstanceId("decode-0"), (AttemptId("a.1"),), True)]
    await server.stop(None)
    await until(lambda: asyncio.all_tasks() <= before)
