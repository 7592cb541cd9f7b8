"""One stream with a node, as the gateway holds it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from gateway import events as ev
from gateway.sessions import NodeSession
from springtide.ids import AttemptId, InstanceId, NodeId
from springtide.protocol import wire
from springtide.protocol.instances import InstanceRef, Role
from springtide.protocol.starts import AbortAttempt, DecodeCommand
from springtide.rpc import node_pb2, node_pb2_grpc
from springtide.rpc.channels import new_server
from tests.support.waiting import until


class FailingNode(node_pb2_grpc.DecodeNodeServicer):
    """Breaks a session off at its first command."""

    def __init__(self) -> None:
        self.seen: list[DecodeCommand] = []

    async def Session(self, commands: AsyncIterator[node_pb2.DecodeCommand], context: Any) -> AsyncIterator[node_pb2.DecodeUpdate]:
        async for command in commands:
            self.seen.append(wire.DECODE_COMMAND.decode(command))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it has failed")
        yield node_pb2.DecodeUpdate()


async def test_nothing_is_left_of_a_session_that_its_node_broke_off() -> None:
    server, node = new_server(), FailingNode()
    node_pb2_grpc.add_DecodeNodeServicer_to_server(node, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    before, posted = asyncio.all_tasks(), list[ev.Event]()
    session = NodeSession(
        Role.DECODE, InstanceRef(InstanceId("decode-0"), Role.DECODE, address, NodeId("decode-0"), ""), posted.append, lambda ended: None
    )
    session.attempts.add(AttemptId("a.1"))
    session.send(AbortAttempt(AttemptId("a.1")))
    try:
        await until(lambda: posted)
    finally:
        await server.stop(None)

    assert node.seen == [AbortAttempt(AttemptId("a.1"))]
    assert posted == [ev.SessionLost("decode", InstanceId("decode-0"), (AttemptId("a.1"),), True)]
    await until(lambda: asyncio.all_tasks() <= before)


async def test_who_is_cancelled_while_it_waits_for_a_sessions_end_ends_as_cancelled() -> None:
    nowhere = InstanceRef(InstanceId("decode-0"), Role.DECODE, "127.0.0.1:1", NodeId("decode-0"), "")
    session = NodeSession(Role.DECODE, nowhere, lambda event: None, lambda ended: None)
    await asyncio.sleep(0)
    session.end()
    closing = asyncio.create_task(session.wait_closed())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await session.wait_closed()
