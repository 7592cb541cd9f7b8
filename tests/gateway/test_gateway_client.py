"""The Python SDK, and a gateway that finds its Conductor through membership."""

from __future__ import annotations

import asyncio

import pytest
from gateway_cluster import MODEL, Cluster, until

from gateway.app import GatewayServer
from springtide.client import AsyncClient, Client
from springtide.errors import InvalidRequest, ModelNotFound, Overloaded, SpringtideError, Unavailable
from springtide.ids import new_incarnation
from springtide.membership import Member, Membership
from springtide.process import ProcessArguments
from springtide.rpc import conductor_pb2

TEXT = "Hello, wörld! One two three four."
MESSAGES = [{"role": "user", "content": "Say it."}]


async def test_the_sdk_streams_text_times_and_usage(gateway: GatewayServer, cluster: Cluster) -> None:
    cluster.cached_tokens = 4
    async with AsyncClient(f"http://{gateway.http_address}") as client:
        assert await client.models() == [MODEL] and await client.ready()
        for stream in (client.chat(MESSAGES), client.complete("Say it."), client.complete([500, 501], model=MODEL)):
            chunks = [chunk async for chunk in stream]
            assert "".join(chunk.text for chunk in chunks) == TEXT
            assert [chunk.received_at for chunk in chunks] == sorted(chunk.received_at for chunk in chunks)
            assert "stop" in [chunk.finish_reason for chunk in chunks]
            assert chunks[-1].usage is not None and chunks[-1].usage.cached_tokens == 4


async def test_the_blocking_sdk_does_the_same(gateway: GatewayServer) -> None:
    def use() -> None:
        with Client(f"http://{gateway.http_address}") as client:
            assert client.models() == [MODEL] and client.ready()
            assert "".join(chunk.text for chunk in client.chat(MESSAGES)) == TEXT
            assert "".join(chunk.text for chunk in client.complete("Say it.")) == TEXT
            with pytest.raises(ModelNotFound):
                list(client.chat(MESSAGES, model="gpt-x"))

    await asyncio.to_thread(use)


async def test_the_sdks_errors_are_springtides_own(gateway: GatewayServer, cluster: Cluster) -> None:
    async def error_of(**options: object) -> SpringtideError:
        with pytest.raises(SpringtideError) as caught:
            [_ async for _ in client.chat(MESSAGES, **options)]
        return caught.value

    async with AsyncClient(f"http://{gateway.http_address}") as client:
        assert isinstance(await error_of(model="gpt-x"), ModelNotFound)
        invalid = await error_of(temperature=9)
        assert isinstance(invalid, InvalidRequest) and invalid.param == "temperature"
        rejection = conductor_pb2.Rejection(reason=conductor_pb2.REASON_TTFT, message="too busy", retry_after_s=3)
        cluster.conductor.rejections.append(rejection)
        overloaded = await error_of()
        assert isinstance(overloaded, Overloaded) and overloaded.retry_after_s == 3 and overloaded.code == "ttft"
    async with AsyncClient("http://127.0.0.1:1") as client:
        assert not await client.ready()
        assert isinstance(await error_of(model=MODEL), Unavailable)


async def test_a_gateway_by_itself_finds_the_conductor_and_finds_it_again(
    arguments: ProcessArguments, cluster: Cluster, valkey_url: str
) -> None:
    gateway = GatewayServer(arguments)
    await gateway.start()
    async with AsyncClient(f"http://{gateway.http_address}") as client:
        assert not await client.ready()
        for _ in range(2):
            membership = Membership(valkey_url, arguments.config.cluster, 5.0)
            await membership.announce(Member("conductor", "conductor-0", new_incarnation(), cluster.conductor.address))
            assert "".join([chunk.text async for chunk in client.chat(MESSAGES)]) == TEXT
            members = await membership.members()
            assert members is not None
            (own,) = (member for member in members if member.role == "gateway")
            assert own.details["http"] == gateway.http_address and own.metrics_address
            await cluster.conductor.stop()
            await membership.close()
            waiting = asyncio.create_task(client.ready())
            assert not await waiting
            await cluster.conductor.start()
    await gateway.close()
    await until(lambda: cluster.idle)
