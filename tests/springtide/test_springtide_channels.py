"""The options of every channel: what they find out that no stream of ours would."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from springtide.rpc.channels import KEEPALIVE_MS, PING_TIMEOUT_MS, connect, new_server
from springtide.rpc.health import add_health
from tests.support.netns import Namespace

SERVER = """
import asyncio, sys
from springtide.rpc import channels
from springtide.rpc.health import add_health

async def main():
    server = channels.new_server()
    add_health(server)
    print(server.add_insecure_port(sys.argv[1] + ":0"), flush=True)
    await server.start()
    await asyncio.Event().wait()

asyncio.run(main())
"""
SLACK_S = 5.0


@asynccontextmanager
async def quiet_stream(host: str, prefix: Sequence[str] = ()) -> AsyncIterator[tuple[asyncio.Task[object], int]]:
    """A read that waits for a server in another process, which has said nothing for three pings' time; and its process id."""
    process = await asyncio.create_subprocess_exec(*prefix, sys.executable, "-c", SERVER, host, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        async with connect(f"{host}:{port}") as channel:
            stream = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            await stream.read()
            reading = asyncio.ensure_future(stream.read())
            assert not (await asyncio.wait({reading}, timeout=3 * KEEPALIVE_MS / 1000))[0], "whoever is only quiet is not lost"
            yield reading, process.pid
    finally:
        process.kill()
        await process.wait()


async def is_lost(reading: asyncio.Task[object]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        async with asyncio.timeout((KEEPALIVE_MS + PING_TIMEOUT_MS) / 1000 + SLACK_S):
            await reading
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_stream_to_a_process_that_is_stopped_fails_soon() -> None:
    async with quiet_stream("127.0.0.1") as (reading, pid):
        os.kill(pid, signal.SIGSTOP)
        await is_lost(reading)


async def test_a_stream_outlives_seconds_in_which_a_ping_is_on_its_way() -> None:
    """As where the machine of both sides stands still: a ping that is sent a second after this stop is answered after five more."""
    async with quiet_stream("127.0.0.1") as (reading, pid):
        assert not (await asyncio.wait({reading}, timeout=KEEPALIVE_MS / 2000))[0]
        os.kill(pid, signal.SIGSTOP)
        assert not (await asyncio.wait({reading}, timeout=KEEPALIVE_MS / 2000 + 5))[0]
        os.kill(pid, signal.SIGCONT)
        assert not (await asyncio.wait({reading}, timeout=KEEPALIVE_MS / 1000))[0]


async def test_a_stream_over_a_network_that_is_cut_fails_soon(namespace: Namespace) -> None:
    async with quiet_stream(namespace.there, namespace.prefix) as (reading, _):
        namespace.cut()
        await is_lost(reading)


async def test_no_proxy_is_asked_for_what_is_within_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    server = new_server()
    add_health(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SLACK_S)
    await server.stop(None)
