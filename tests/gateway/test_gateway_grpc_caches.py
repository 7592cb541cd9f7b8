"""Context caches over gRPC."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc.aio
import pytest
from gateway_cluster import BLOCK_TOKENS, MODEL, Cluster
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.app import GatewayServer
from springtide.rpc import caches_pb2 as pb
from springtide.rpc import caches_pb2_grpc, inference_pb2, inference_pb2_grpc
from springtide.rpc.channels import connect
from tests.support.valkey import new_valkey

LONG = "The sea is wide, and the tide comes in. " * 20
SYSTEM = inference_pb2.ChatMessage(role="system", content=LONG)
ASK = inference_pb2.ChatMessage(role="user", content="Why?")


@pytest.fixture(scope="module")
def valkey_url() -> Iterator[str]:
    """Of this module's own: gateways of other tests must not compute what is left here."""
    with new_valkey() as valkey:
        yield valkey.connection_url


@pytest.fixture
async def channel(gateway: GatewayServer) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(gateway.grpc_address) as channel:
        yield channel


@pytest.fixture
def caches(channel: grpc.aio.Channel) -> caches_pb2_grpc.ContextCachesStub:
    return caches_pb2_grpc.ContextCachesStub(channel)


@pytest.fixture
def tenant() -> str:
    return f"tenant-{secrets.token_hex(4)}"


def draft(tenant: str, **fields: Any) -> pb.CreateCacheRequest:
    return pb.CreateCacheRequest(model=MODEL, chat=inference_pb2.ChatPrompt(messages=[SYSTEM]), tenant=tenant, **fields)


async def test_one_is_created_shown_listed_extended_and_deleted(caches: caches_pb2_grpc.ContextCachesStub, tenant: str) -> None:
    made = await caches.CreateCache(draft(tenant, name="tide", ttl_s=300, metadata={"a": "1"}))
    assert made.status == pb.CACHE_STATUS_PENDING and made.tokens > BLOCK_TOKENS and made.name == "tide" and made.metadata == {"a": "1"}
    assert made.expires_at - made.created_at == pytest.approx(300) and (made.replicas, made.replicas_held) == (1, 0)
    other = await caches.CreateCache(draft(tenant))
    first = await caches.ListCaches(pb.ListCachesRequest(tenant=tenant, limit=1))
    rest = await caches.ListCaches(pb.ListCachesRequest(tenant=tenant, after=other.cache_id))
    assert [cache.cache_id for cache in (*first.caches, *rest.caches)] == [other.cache_id, made.cache_id] and first.more and not rest.more
    longer = await caches.ExtendCache(pb.ExtendCacheRequest(cache_id=made.cache_id, ttl_s=600, tenant=tenant))
    assert longer.expires_at - made.created_at >= 600
    name = pb.CacheName(cache_id=made.cache_id, tenant=tenant)
    assert (await caches.GetCache(name)).expires_at == longer.expires_at
    await caches.DeleteCache(name)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await caches.GetCache(name)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_anothers_looks_like_one_that_there_is_not(caches: caches_pb2_grpc.ContextCachesStub, tenant: str) -> None:
    made = await caches.CreateCache(draft(tenant))
    said = []
    for cache_id in (made.cache_id, "cache-none"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await caches.GetCache(pb.CacheName(cache_id=cache_id, tenant="somebody else"))
        said.append((caught.value.code(), (caught.value.details() or "").replace(cache_id, "ID")))
    assert said[0] == said[1] and said[0][0] is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (pb.CreateCacheRequest(model="other", chat=inference_pb2.ChatPrompt(messages=[SYSTEM])), "'other' does not exist"),
        (pb.CreateCacheRequest(model=MODEL), "chat.messages"),
        (pb.CreateCacheRequest(model=MODEL, chat=inference_pb2.ChatPrompt(messages=[ASK])), "at least 64 are needed"),
        (draft("a", ttl_s=-1), "ttl"),
        (draft("a", replicas=1000), "replicas"),
    ],
)
async def test_what_cannot_be_kept_is_refused(
    caches: caches_pb2_grpc.ContextCachesStub, request_: pb.CreateCacheRequest, words: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=words):
        await caches.CreateCache(request_)


async def test_a_request_begins_with_a_cache(
    channel: grpc.aio.Channel, caches: caches_pb2_grpc.ContextCachesStub, cluster: Cluster, tenant: str
) -> None:
    stub = inference_pb2_grpc.InferenceStub(channel)
    made = await caches.CreateCache(draft(tenant))

    async def prompt_tokens(*messages: inference_pb2.ChatMessage, cache_id: str = "") -> int:
        cache = inference_pb2.CacheUse(cache_id=cache_id)
        chat = inference_pb2.ChatPrompt(messages=messages)
        *_, last = [c async for c in stub.Generate(inference_pb2.GenerateRequest(model=MODEL, chat=chat, cache=cache, tenant=tenant))]
        return last.usage.prompt_tokens

    assert await prompt_tokens(ASK, cache_id=made.cache_id) == await prompt_tokens(SYSTEM, ASK)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await prompt_tokens(ASK, cache_id="cache-none")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_its_health_is_told(channel: grpc.aio.Channel) -> None:
    asked = health_pb2.HealthCheckRequest(service="springtide.v1.ContextCaches")
    reply = await health_pb2_grpc.HealthStub(channel).Check(asked)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
