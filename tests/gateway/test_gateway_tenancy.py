"""Whose request it is: over HTTP and gRPC, by API key where there are keys, else by what the client says."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import httpx
import openai
import pytest
from gateway_cluster import MODEL, Cluster

from gateway.app import GatewayServer
from springtide.blocks import namespace_root
from springtide.client import AsyncClient
from springtide.config import load_config
from springtide.errors import ConfigError, Unauthenticated
from springtide.process import ProcessArguments
from springtide.rpc import inference_pb2, inference_pb2_grpc
from springtide.rpc.channels import connect

KEYS = {"key-of-acme": "acme", "another-of-acme": "acme", "key-of-zeta": "zeta"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Say it."}]}
PLAIN = {"model": MODEL, "prompt": "Say it."}


def digest(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
async def guarded(arguments: ProcessArguments, cluster: Cluster) -> AsyncIterator[GatewayServer]:
    """A gateway that wants keys."""
    server = arguments.config.server.model_copy(update={"api_keys": {digest(key): tenant for key, tenant in KEYS.items()}})
    config = arguments.config.model_copy(update={"server": server})
    gateway = GatewayServer(replace(arguments, config=config), cluster.conductor.address)
    await gateway.start()
    yield gateway
    await gateway.close()


@pytest.fixture
async def guarded_http(guarded: GatewayServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{guarded.http_address}", timeout=20) as client:
        yield client


def tenants(cluster: Cluster) -> set[str]:
    """As the Conductor and the nodes were told."""
    return {request.tenant for request in cluster.conductor.requests} | {start.request.tenant for _, start in cluster.started}


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", PLAIN)])
async def test_a_header_says_whose_request_it_is_where_there_are_no_keys(
    http: httpx.AsyncClient, cluster: Cluster, arguments: ProcessArguments, path: str, body: dict[str, Any]
) -> None:
    assert (await http.post(path, json=body, headers={"X-Springtide-Tenant": "acme", **bearer("none")})).status_code == 200
    assert tenants(cluster) == {"acme"}
    config = arguments.config
    root = namespace_root(arguments.model_info.fingerprint, config.dtype, config.kv.block_tokens, "acme")
    assert {start.request.namespace for _, start in cluster.started} == {root}, "its blocks are its own"


async def test_without_the_header_it_is_nobodys(http: httpx.AsyncClient, cluster: Cluster) -> None:
    assert (await http.post("/v1/completions", json=PLAIN)).status_code == 200
    assert tenants(cluster) == {""}


@pytest.mark.parametrize(("key", "tenant"), KEYS.items())
async def test_a_key_is_its_tenants(guarded: GatewayServer, cluster: Cluster, key: str, tenant: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"http://{guarded.http_address}/v1", api_key=key, max_retries=0, timeout=20) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        await client.completions.create(model=MODEL, prompt="Say it.")
    assert tenants(cluster) == {tenant}


@pytest.mark.parametrize(
    "headers",
    [{}, bearer("no-such-key"), {"authorization": "Bearer"}, {"authorization": "Basic key-of-acme"}, bearer(digest("key-of-acme"))],
    ids=["no key", "unknown", "empty", "another scheme", "the digest is no key"],
)
async def test_without_a_known_key_nothing_is_done_or_told(
    guarded_http: httpx.AsyncClient, cluster: Cluster, headers: dict[str, str]
) -> None:
    for response in (
        await guarded_http.post("/v1/chat/completions", json=CHAT, headers=headers),
        await guarded_http.post("/v1/completions", content=b"{", headers=headers),
        await guarded_http.get("/v1/models", headers=headers),
    ):
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert "no-such-key" not in error["message"]
        assert response.headers["x-request-id"].startswith("req-")
    theirs = await guarded_http.post("/v1/completions", json=PLAIN, headers={**headers, "x-request-id": "mine-9"})
    assert (theirs.status_code, theirs.headers["x-request-id"]) == (401, "mine-9")
    assert cluster.conductor.requests == []


async def test_a_tenant_that_is_not_the_keys_is_refused(guarded_http: httpx.AsyncClient, cluster: Cluster) -> None:
    same = await guarded_http.post("/v1/completions", json=PLAIN, headers={**bearer("key-of-acme"), "x-springtide-tenant": "acme"})
    other = await guarded_http.post("/v1/completions", json=PLAIN, headers={**bearer("key-of-acme"), "x-springtide-tenant": "zeta"})
    assert (same.status_code, other.status_code) == (200, 400)
    assert other.json()["error"]["param"] == "tenant"
    assert tenants(cluster) == {"acme"}


async def test_health_readiness_and_metrics_want_no_key(guarded_http: httpx.AsyncClient) -> None:
    answers = [await guarded_http.get(path) for path in ("/health", "/ready", "/metrics")]
    assert [answer.status_code for answer in answers] == [200, 200, 200]


async def test_over_grpc_the_same_keys_are_wanted(guarded: GatewayServer, cluster: Cluster) -> None:
    request = inference_pb2.GenerateRequest(model=MODEL, text="Say it.")
    async with connect(guarded.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for metadata in ((), (("authorization", "Bearer no-such-key"),)):
            for call in (stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata), stub.Generate(request, metadata=metadata)):
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await (call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else call)
                assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        known = (("authorization", "Bearer key-of-zeta"),)
        assert (await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=known)).models[0].id == MODEL
        assert [chunk async for chunk in stub.Generate(request, metadata=known)]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Generate(inference_pb2.GenerateRequest(model=MODEL, text="Say it.", tenant="acme"), metadata=known).read()
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert tenants(cluster) == {"zeta"}


async def test_our_own_client_sends_a_key(guarded: GatewayServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://{guarded.http_address}"
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    async with AsyncClient(url) as client:
        with pytest.raises(Unauthenticated):
            await client.models()
    async with AsyncClient(url, api_key="key-of-acme") as client:
        assert [chunk async for chunk in client.complete("Say it.")]
    monkeypatch.setenv("OPENAI_API_KEY", "key-of-zeta")
    async with AsyncClient(url) as client:
        assert [chunk async for chunk in client.complete("Say it.")]
    assert tenants(cluster) == {"acme", "zeta"}


@pytest.mark.parametrize("value", ["{very-secret: acme}", "very-secret", "{sha256:very-secret: acme}", "[very-secret]"])
def test_a_key_that_is_no_digest_is_refused_and_not_shown(value: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.api_keys .*sha256") as raised:
        load_config(environ={"SPRINGTIDE_SERVER__API_KEYS": value})
    assert "very-secret" not in raised.value.message


def test_a_key_without_a_tenant_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"server\.api_keys .*tenant"):
        load_config(environ={"SPRINGTIDE_SERVER__API_KEYS": f"{{{digest('key')}: ''}}"})
