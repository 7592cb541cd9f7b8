"""Calls between the processes of a cluster, and calls of strangers, over real sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from springtide.config import load_config
from springtide.credentials import OPEN, Credentials, credentials_of
from springtide.errors import ConfigError
from springtide.rpc import authentication
from springtide.rpc.channels import connect, new_server
from springtide.rpc.health import add_health_and_reflection
from springtide.telemetry import FewWarnings

OURS = Credentials(b"the secret of this cluster", "springtide")
STRANGERS = {
    "no credentials": OPEN,
    "another secret": Credentials(b"the secret of another one", "springtide"),
    "another cluster with the same secret": Credentials(b"the secret of this cluster", "other"),
}
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Service:
    """Echoes in each of the four kinds of call, and keeps what it was sent."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []

    async def unary(self, request: bytes, context: Any) -> bytes:
        self.heard.append(request)
        return request

    async def unary_stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.heard.append(request)
        yield request

    async def stream_unary(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([request async for request in self.stream(requests, context)])

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            self.heard.append(request)
            yield request


@pytest.fixture
async def served() -> AsyncIterator[tuple[Service, str]]:
    service, server = Service(), new_server(OURS)
    handlers = {
        "unary_unary": grpc.unary_unary_rpc_method_handler(service.unary),
        "unary_stream": grpc.unary_stream_rpc_method_handler(service.unary_stream),
        "stream_unary": grpc.stream_unary_rpc_method_handler(service.stream_unary),
        "stream_stream": grpc.stream_stream_rpc_method_handler(service.stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
    await add_health_and_reflection(server, "test.Echo")
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield service, address
    await server.stop(None)


async def call(channel: grpc.aio.Channel, kind: str) -> bytes:
    """Says "hello" and returns what is answered."""

    async def one() -> AsyncIterator[bytes]:
        yield b"hello"

    method = getattr(channel, kind)(f"/test.Echo/{kind}")
    started = method(one() if kind.startswith("stream") else b"hello", timeout=10)
    if kind.endswith("unary"):
        return bytes(await started)
    return b"".join([answer async for answer in started])


@pytest.mark.parametrize("kind", KINDS)
async def test_who_has_the_secret_is_served(served: tuple[Service, str], kind: str) -> None:
    service, address = served
    async with connect(address, OURS) as channel:
        assert await call(channel, kind) == b"hello"
    assert service.heard == [b"hello"]


@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_stranger_is_refused_and_nothing_is_done(served: tuple[Service, str], kind: str, stranger: str) -> None:
    service, address = served
    async with connect(address, STRANGERS[stranger]) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="cluster_secret") as refused:
            await call(channel, kind)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert service.heard == []


async def test_a_stranger_who_sends_nothing_is_refused_at_once(served: tuple[Service, str]) -> None:
    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async with connect(served[1]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.stream_unary("/test.Echo/stream_unary")(nothing(), timeout=10)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_is_for_everybody_and_reflection_is_not(served: tuple[Service, str]) -> None:
    async with connect(served[1]) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        reflect = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await reflect().read()
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_strangers_who_come_again_and_again_do_not_fill_the_log(
    served: tuple[Service, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with connect(served[1]) as channel:
        for _ in range(5 * FewWarnings.MOST):
            with pytest.raises(grpc.aio.AioRpcError):
                await call(channel, "unary_unary")
    said = [record.getMessage() for record in caplog.records if record.name == authentication.__name__]
    assert len(said) == FewWarnings.MOST
    assert "/test.Echo/unary_unary by a stranger at ipv4:127.0.0.1" in said[0]


def test_how_many_warnings_were_left_out_is_said_later(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    warnings = FewWarnings(logging.getLogger("test"), clock=lambda: now)
    for number in range(FewWarnings.MOST + 3):
        warnings.warn("number %d", number)
    now = FewWarnings.PERIOD_S
    warnings.warn("later")
    assert [record.getMessage() for record in caplog.records[FewWarnings.MOST :]] == [
        "3 more warnings like the last ones were left out",
        "later",
    ]


def test_neither_token_nor_signature_gives_the_secret_away_and_they_differ() -> None:
    assert OURS.token is not None
    said = b"springtide/call/springtide"
    assert len({OURS.token, OURS.signature(b""), OURS.signature(said)}) == 3
    assert "secret" not in repr(OURS)


def test_a_process_without_a_secret_does_not_start_unless_somebody_has_decided_so() -> None:
    with pytest.raises(ConfigError, match="SPRINGTIDE_CLUSTER_SECRET"):
        credentials_of(load_config(environ={}))
    assert credentials_of(load_config(overrides={"kv.open_to_strangers": True}, environ={})).token is None
