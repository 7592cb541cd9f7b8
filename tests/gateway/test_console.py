"""The console's endpoints at a gateway over HTTP, before a Conductor to whom a cluster is played."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import ssl
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ
from typing import Any

import httpx
import pytest

from gateway.accounts.allowance import ApiKey, digest_of, new_key, new_key_id
from gateway.accounts.register import Register
from gateway.app import GatewayServer
from gateway.console.routes import ASSETS, OPEN, POLICY
from springtide.config import ServerConfig
from springtide.process import ProcessArguments
from springtide.valkey import ValkeyClient
from tests.support.certificates import Authority
from tests.support.played_cluster import PlayedCluster
from tests.support.waiting import until

OPERATORS_KEY, TENANTS_KEY = "key-of-ops", "key-of-acme"
KEYS = {digest_of(OPERATORS_KEY): "ops", digest_of(TENANTS_KEY): "acme"}


@pytest.fixture
async def played() -> AsyncIterator[PlayedCluster]:
    cluster = PlayedCluster(3, 4, rate=8.0)
    cluster.play(30.0)
    async with cluster.going_on():
        yield cluster


@asynccontextmanager
async def serving(played: PlayedCluster, arguments: ProcessArguments, **server: Any) -> AsyncIterator[GatewayServer]:
    settings = ServerConfig(port=0, grpc_port=0, **server)
    async with played.serving() as address:
        gateway = GatewayServer(replace(arguments, config=arguments.config.model_copy(update={"server": settings})), address)
        await gateway.start()
        try:
            yield gateway
        finally:
            await gateway.close()


@pytest.fixture
async def open_gateway(played: PlayedCluster, arguments: ProcessArguments) -> AsyncIterator[GatewayServer]:
    async with serving(played, arguments) as gateway:
        yield gateway


@pytest.fixture
async def keyed_gateway(played: PlayedCluster, arguments: ProcessArguments) -> AsyncIterator[GatewayServer]:
    async with serving(played, arguments, api_keys=KEYS, operators=("ops",)) as gateway:
        yield gateway


def client(gateway: GatewayServer, key: str = "") -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(base_url=f"http://{gateway.http_address}", headers=headers, timeout=20)


async def events(stream: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in stream.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


async def test_the_page_is_open_to_all_and_may_load_nothing_from_elsewhere(keyed_gateway: GatewayServer) -> None:
    async with client(keyed_gateway) as http:
        for path in sorted(OPEN):
            answer = await http.get(path)
            assert (answer.status_code, answer.headers["content-security-policy"]) == (200, POLICY), path
            assert "http://" not in answer.text.replace("http://www.w3.org/", "") and "https://" not in answer.text, path
            unchanged = await http.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (unchanged.status_code, unchanged.content) == (304, b"")
        page = (await http.get("/console/")).text
        assert all(name in OPEN for name in ("/console/main.js", "/console/console.css")) and "/console/main.js" in page
        assert (await http.get("/console/none.js", headers={"authorization": f"Bearer {TENANTS_KEY}"})).status_code == 404


def test_every_module_that_the_page_imports_is_there() -> None:
    for name, asset in ASSETS.items():
        if name.endswith(".js"):
            imported = [line.rsplit('"', 2)[1] for line in asset.content.decode().splitlines() if line.startswith("import ")]
            assert {each.removeprefix("./") for each in imported} <= set(ASSETS), name


@pytest.mark.parametrize("path", ["state", "events", "explain?request=chatcmpl-none", "logs?request=chatcmpl-none"])
async def test_what_it_shows_wants_a_key_where_there_are_keys(keyed_gateway: GatewayServer, path: str) -> None:
    async with client(keyed_gateway) as http:
        assert (await http.get(f"/console/{path}")).status_code == 401
        assert (await http.get(f"/console/{path}", headers={"authorization": "Bearer another"})).status_code == 401


async def test_without_keys_it_is_for_whoever_reaches_the_port(open_gateway: GatewayServer) -> None:
    async with client(open_gateway) as http:
        state = (await http.get("/console/state")).json()
        of_proxy = (await http.get("/console/state", headers={"x-springtide-tenant": "acme"})).json()
    assert state["viewer"] == {"tenant": "", "operator": True}
    assert state["model"] == "played-70b" and len(state["tables"]["instances"]) == 7
    assert {row["tenant"] for row in state["tables"]["decisions"].values()} == {"acme", "globex", "initech"}
    assert of_proxy["viewer"] == {"tenant": "acme", "operator": False}
    assert {row["tenant"] for row in of_proxy["tables"]["decisions"].values()} == {"acme"}


async def test_a_tenants_key_shows_its_own_and_an_operators_all(keyed_gateway: GatewayServer, played: PlayedCluster) -> None:
    decisions = played.runner.history.changed_since(0, 10_000)
    foreign = next(decision.request_id for decision in decisions if decision.tenant == "globex")
    own = next(decision.request_id for decision in decisions if decision.tenant == "acme")
    async with client(keyed_gateway, TENANTS_KEY) as acme, client(keyed_gateway, OPERATORS_KEY) as ops:
        text = (await acme.get("/console/state")).text
        assert "globex" not in text and "initech" not in text and json.loads(text)["viewer"] == {"tenant": "acme", "operator": False}
        assert not any(decision.request_id in text for decision in decisions if decision.tenant != "acme")
        async with acme.stream("GET", "/console/events") as stream:
            told = [event async for _, event in first_of(events(stream), 3)]
        assert not any("globex" in json.dumps(event) for event in told)
        assert (await acme.get("/console/explain", params={"request": own})).status_code == 200
        assert (await acme.get("/console/explain", params={"request": foreign})).status_code == 404
        assert (await acme.get("/console/logs", params={"request": own})).status_code == 403
        assert "globex" in (await ops.get("/console/state")).text
        explained = (await ops.get("/console/explain", params={"request": foreign})).json()
        assert explained["decisions"][0]["decision"]["tenant"] == "globex"


async def first_of(stream: AsyncIterator[Any], count: int) -> AsyncIterator[Any]:
    for _ in range(count):
        yield await anext(stream)


async def test_a_key_that_was_made_as_an_operators_is_one(keyed_gateway: GatewayServer, arguments: ProcessArguments) -> None:
    assert arguments.config.redis_url is not None
    valkey, key = ValkeyClient.from_url(arguments.config.redis_url), new_key()
    await Register(valkey, arguments.config.cluster).add_key(digest_of(key), ApiKey(new_key_id(), "night shift", operator=True))
    await valkey.aclose()
    async with client(keyed_gateway, key) as http:

        async def let_in() -> httpx.Response | None:
            answer = await http.get("/console/state")
            return answer if answer.status_code == 200 else None

        assert (await until(let_in)).json()["viewer"]["operator"]


async def test_the_stream_goes_on_where_the_state_ends_and_ends_with_its_client(open_gateway: GatewayServer) -> None:
    feed = open_gateway._console.feed
    async with client(open_gateway) as http, http.stream("GET", "/console/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        told = [event async for event in first_of(events(stream), 3)]
        assert [name for name, _ in told] == ["state", "delta", "delta"] and feed.num_watchers == 1
    await until(lambda: feed.num_watchers == 0)


async def test_with_a_certificate_that_it_is_given_all_of_it_is_served_over_tls(
    played: PlayedCluster, arguments: ProcessArguments, tmp_path: Path
) -> None:
    authority, certificate, key = Authority(tmp_path), tmp_path / "server.pem", tmp_path / "server.key"
    authority.sign(certificate, key)
    tls = {"tls_certificate": certificate, "tls_key": key}
    async with serving(played, arguments, api_keys=KEYS, operators=("ops",), **tls) as gateway:
        url, operator = f"https://{gateway.http_address}", {"authorization": f"Bearer {OPERATORS_KEY}"}
        trusting = ssl.create_default_context(cafile=authority.path)
        async with httpx.AsyncClient(base_url=url, verify=trusting, timeout=20) as http:
            for path in sorted(OPEN):
                answer = await http.get(path)
                assert (answer.status_code, answer.headers["content-security-policy"]) == (200, POLICY), path
            assert (await http.get("/console/state")).status_code == 401
            assert len((await http.get("/console/state", headers=operator)).json()["tables"]["instances"]) == 7
            async with http.stream("GET", "/console/events", headers=operator) as stream:
                assert [name async for name, _ in first_of(events(stream), 2)] == ["state", "delta"]
        for stranger in (url, url.replace("https", "http")):
            async with httpx.AsyncClient(base_url=stranger, timeout=20) as http:
                with pytest.raises(httpx.TransportError):
                    await http.get("/console/")
        options = ("--once", "--url", url, "--ca", str(authority.path), "--api-key", OPERATORS_KEY)
        command = [sys.executable, "-m", "deploy.cli", "top", *options]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env={**os.environ, "COLUMNS": "120"})
        said = (await process.communicate())[0].decode()
        assert process.returncode == 0 and "played-70b" in said and "decode-3" in said, said


async def test_a_decision_is_explained_with_the_best_alternatives(open_gateway: GatewayServer) -> None:
    async with client(open_gateway) as http:
        decisions = (await http.get("/console/state")).json()["tables"]["decisions"]
        row = next(row for row in reversed(decisions.values()) if row["ended"])
        (told,) = (await http.get("/console/explain", params={"request": row["request"]})).json()["decisions"]
        assert told["decision"] == row
        assert [each["instance_id"] for each in (told["prefills"][0], told["decodes"][0])] == [row["prefill"], row["decode"]]
        assert (told["num_prefills"], told["num_decodes"], told["policy"]) == (3, 4, "kvcache-centric")
        for wanted in ("", "short", "no spaces allowed here", "../../../etc/passwd\n"):
            assert (await http.get("/console/explain", params={"request": wanted})).status_code == 400


async def test_lines_of_the_logs_are_found_by_the_requests_id(open_gateway: GatewayServer, arguments: ProcessArguments) -> None:
    logs = arguments.run_dir / "logs"
    logs.mkdir()
    wanted = "chatcmpl-00ff00ff00ff"
    (logs / "prefill-0.log").write_text(
        f"12:00:02.000 INFO    prefill-0 computed attempt_id={wanted}.1\n12:00:03.000 INFO    prefill-0 other\n"
    )
    line = {"time": "2026-11-29T12:00:01.000Z", "level": "warning", "role": "head", "message": "late", "request_id": wanted}
    (logs / "head.log").write_text(json.dumps(line) + "\n")
    async with client(open_gateway) as http:
        told = (await http.get("/console/logs", params={"request": wanted})).json()
    assert [(line["time"], line["level"], line["process"], line["text"]) for line in told["lines"]] == [
        ("12:00:01.000", "warning", "head", "late"),
        ("12:00:02.000", "info", "prefill-0", f"computed attempt_id={wanted}.1"),
    ]


async def test_a_conductor_that_is_away_is_said_to_be(arguments: ProcessArguments) -> None:
    gateway = GatewayServer(arguments, "127.0.0.1:9")
    await gateway.start()
    async with client(gateway) as http:
        state = (await http.get("/console/state")).json()
    assert "did not answer" in state["problem"] and state["tables"]["instances"] == {}
    await gateway.close()


# ---- in a terminal ----


def top(gateway: GatewayServer, *options: str) -> list[str]:
    return [sys.executable, "-m", "deploy.cli", "top", "--url", f"http://{gateway.http_address}", *options]


async def test_top_prints_once(keyed_gateway: GatewayServer) -> None:
    environment = {**os.environ, "COLUMNS": "120"}
    command = top(keyed_gateway, "--once", "--api-key", OPERATORS_KEY)
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
    said = (await process.communicate())[0].decode()
    assert process.returncode == 0 and "played-70b" in said and "decode-3" in said and "oldest in flight" in said, said
    refused = await asyncio.create_subprocess_exec(*top(keyed_gateway, "--once"), stderr=asyncio.subprocess.PIPE)
    assert "an API key is required" in (await refused.communicate())[1].decode() and refused.returncode == 1


async def test_top_follows_the_terminals_size_and_ends_with_q(open_gateway: GatewayServer) -> None:
    ours, theirs = pty.openpty()
    ioctl(ours, TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")} | {"TERM": "xterm-256color"}
    process = await asyncio.create_subprocess_exec(*top(open_gateway), stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = bytearray()
    asyncio.get_running_loop().add_reader(ours, lambda: seen.extend(os.read(ours, 65536)))
    try:
        await until(lambda: b"decode-0" in seen)
        ioctl(ours, TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
        seen.clear()
        await until(lambda: b"oldest in flight" in seen)
        os.write(ours, b"q")
        async with asyncio.timeout(20):
            assert await process.wait() == 0
    finally:
        asyncio.get_running_loop().remove_reader(ours)
        os.close(ours)
        if process.returncode is None:
            process.kill()
