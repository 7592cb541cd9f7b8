"""The Python SDK, and a gateway that finds its Conductor through membership."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from gateway_cluster import MODEL, Cluster

from gateway.app import GatewayServer
from springtide.client import NO_RETRIES, AsyncClient, Client, Retries, error_of
from springtide.client.calls import Lines
from springtide.errors import InvalidRequest, ModelNotFound, Overloaded, SpringtideError, Unavailable
from springtide.ids import new_incarnation
from springtide.membership import Member, Membership
from springtide.process import ProcessArguments
from springtide.rpc import conductor_pb2
from tests.support.waiting import until

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

    async with AsyncClient(f"http://{gateway.http_address}", retries=NO_RETRIES) as client:
        assert isinstance(await error_of(model="gpt-x"), ModelNotFound)
        invalid = await error_of(temperature=9)
        assert isinstance(invalid, InvalidRequest) and invalid.param == "temperature"
        rejection = conductor_pb2.Rejection(reason=conductor_pb2.REASON_TTFT, message="too busy", retry_after_s=3)
        cluster.conductor.rejections.append(rejection)
        overloaded = await error_of()
        assert isinstance(overloaded, Overloaded) and overloaded.retry_after_s == 3 and overloaded.code == "ttft"
    async with AsyncClient("http://127.0.0.1:1", retries=NO_RETRIES) as client:
        assert not await client.ready()
        assert isinstance(await error_of(model=MODEL), Unavailable)


async def test_a_gateway_by_itself_finds_the_conductor_and_finds_it_again(
    arguments: ProcessArguments, cluster: Cluster, valkey_url: str
) -> None:
    gateway = GatewayServer(arguments)
    await gateway.start()
    async with AsyncClient(f"http://{gateway.http_address}", retries=NO_RETRIES) as client:
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


async def test_what_is_refused_for_load_is_tried_again_when_the_server_says(gateway: GatewayServer, cluster: Cluster) -> None:
    rejection = conductor_pb2.Rejection(reason=conductor_pb2.REASON_TTFT, message="too busy", retry_after_s=0.5)
    async with AsyncClient(f"http://{gateway.http_address}", retries=Retries(times=2, longest_s=2)) as client:
        cluster.conductor.rejections += [rejection, rejection]
        began = asyncio.get_running_loop().time()
        assert "".join([chunk.text async for chunk in client.chat(MESSAGES)]) == TEXT
        assert asyncio.get_running_loop().time() - began >= 2 * 0.5
        cluster.conductor.rejections += [rejection]
        answer = await client.answer(MESSAGES)
        assert (answer.text, answer.finish_reason) == (TEXT, "stop") and answer.usage.completion_tokens > 0
        assert answer.message() == {"role": "assistant", "content": TEXT}
        cluster.conductor.rejections += [rejection] * 3
        with pytest.raises(Overloaded):
            await client.answer(MESSAGES)
        late = conductor_pb2.Rejection(reason=conductor_pb2.REASON_TTFT, message="too busy", retry_after_s=30)
        cluster.conductor.rejections += [late]
        with pytest.raises(Overloaded):
            await client.answer(MESSAGES)
        with pytest.raises(InvalidRequest):
            await client.answer(MESSAGES, temperature=9)
        assert await client.answer(MESSAGES)


def test_what_may_have_been_done_is_not_done_twice() -> None:
    retries = Retries(times=2, first_s=0.5)
    lost, busy = Unavailable("gone", code="connection_failed"), Unavailable("busy", code="no_capacity")
    assert retries.pause_s(1, lost, repeatable=False) is None
    for error, repeatable in ((lost, True), (busy, True), (busy, False)):
        first, second = (retries.pause_s(tried, error, repeatable=repeatable) for tried in (1, 2))
        assert first is not None and second is not None and 0.25 <= first <= 0.5 <= second <= 1.0
        assert retries.pause_s(3, error, repeatable=repeatable) is None
    assert retries.pause_s(1, InvalidRequest("no"), repeatable=True) is None


async def test_a_stream_that_broke_off_is_not_begun_again() -> None:
    asked = 0
    event = b'data: {"choices": [{"index": 0, "delta": {"content": "Hel"}, "finish_reason": null}]}\n\n'

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 1000\r\n\r\n" + event)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, AsyncClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", retries=Retries(first_s=0.01)) as client:
        got = []
        with pytest.raises(Unavailable):
            async for chunk in client.chat(MESSAGES, model=MODEL):
                got.append(chunk.text)
        assert got == ["Hel"] and asked == 1


def test_lines_are_told_apart_by_line_feeds_alone() -> None:
    said = 'data: "p\u2028q\u0085r"\r\n\ndata: ä\n'.encode()
    for step in (1, 2, 3, len(said)):
        lines = Lines()
        got = [line for begin in range(0, len(said), step) for line in lines.push(said[begin : begin + step])]
        assert got == ['data: "p\u2028q\u0085r"', "", "data: ä"]


def test_what_a_proxy_answers_is_no_sign_that_nothing_was_done() -> None:
    def answered(status: int) -> SpringtideError:
        return error_of(httpx.Response(status, text="<html>", request=httpx.Request("POST", "http://x/v1/batches")))

    assert Retries().pause_s(1, answered(504), repeatable=False) is None
    assert Retries().pause_s(1, answered(504), repeatable=True) is not None
    assert Retries().pause_s(1, answered(404), repeatable=True) is None
