"""A gateway that is told to stop, with time to end what it has: balancers see it, and who is being answered does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import httpx
import pytest
from gateway_cluster import MODEL, Cluster

from gateway.app import GatewayServer
from springtide.process import ProcessArguments
from springtide.rpc import common_pb2, inference_pb2, inference_pb2_grpc
from springtide.rpc.channels import connect

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Say it."}], "stream": True}


@asynccontextmanager
async def patient(arguments: ProcessArguments, cluster: Cluster) -> AsyncIterator[tuple[GatewayServer, asyncio.Event, asyncio.Task[None]]]:
    """A gateway that has time to end what it has, how it is told to stop, and its run."""
    config = arguments.config.model_copy(update={"drain_s": 60.0})
    gateway, stop = GatewayServer(replace(arguments, config=config), cluster.conductor.address), asyncio.Event()
    await gateway.start()
    running = asyncio.create_task(gateway.run(stop))
    try:
        yield gateway, stop, running
    finally:
        running.cancel()
        await gateway.close()


async def told(http: httpx.AsyncClient, stop: asyncio.Event) -> None:
    """Has the gateway told to stop; returns when it shows that."""
    stop.set()
    async with asyncio.timeout(10):
        while (await http.get("/ready")).json().get("error", {}).get("code") != "leaving":  # noqa: ASYNC110 - another task
            await asyncio.sleep(0.02)


async def test_a_gateway_that_leaves_is_ready_no_more_and_ends_its_streams(arguments: ProcessArguments, cluster: Cluster) -> None:
    for node in cluster.nodes.values():
        node.pause_at = 2
    async with patient(arguments, cluster) as (gateway, stop, running):
        async with (
            httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=20) as http,
            http.stream("POST", "/v1/chat/completions", json=CHAT) as response,
        ):
            lines = response.aiter_lines()
            assert "data: " in await anext(lines)
            await told(http, stop)
            assert not running.done()
            for node in cluster.nodes.values():
                node.patience.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        async with asyncio.timeout(20):
            await running


async def test_a_gateway_that_leaves_sends_clients_that_come_again_elsewhere(arguments: ProcessArguments, cluster: Cluster) -> None:
    """A client that keeps its connection would have it answer for ever. It is told with the first answer that begins after that; a
    connection is not ended beneath a client that may be asking."""
    for node in cluster.nodes.values():
        node.pause_at = 2
    async with patient(arguments, cluster) as (gateway, stop, running):
        limits = httpx.Limits(max_connections=1)
        async with (
            httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=20, limits=limits) as http,
            httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=20) as other,
        ):
            async with http.stream("POST", "/v1/chat/completions", json=CHAT) as response:
                await told(other, stop)
                for node in cluster.nodes.values():
                    node.patience.set()
                assert [line async for line in response.aiter_lines() if line][-1] == "data: [DONE]"
            assert "connection" not in response.headers
            answer = await http.post("/v1/chat/completions", json={**CHAT, "stream": False})
            assert answer.status_code == 200 and answer.headers["connection"] == "close"
        async with asyncio.timeout(20):
            await running


async def test_a_gateway_that_leaves_takes_no_more_calls_over_grpc_when_balancers_have_seen_it(
    arguments: ProcessArguments, cluster: Cluster
) -> None:
    for node in cluster.nodes.values():
        node.pause_at = 2
    async with patient(arguments, cluster) as (gateway, stop, running), connect(gateway.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        prompt = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="Say it.")])
        request = inference_pb2.GenerateRequest(model=MODEL, chat=prompt)
        call = stub.Generate(request)
        chunks = aiter(call)
        await anext(chunks)
        stop.set()
        with pytest.raises(grpc.aio.AioRpcError):
            async with asyncio.timeout(20):
                while True:
                    refused = stub.Generate(request, timeout=1)
                    try:
                        await refused.read()
                    except grpc.aio.AioRpcError as error:
                        if error.code() is grpc.StatusCode.UNAVAILABLE:
                            raise
                    await asyncio.sleep(0.05)
        for node in cluster.nodes.values():
            node.patience.set()
        *_, last = [chunk async for chunk in chunks]
        assert last.finish_reason == common_pb2.FINISH_REASON_STOP
        async with asyncio.timeout(20):
            await running
