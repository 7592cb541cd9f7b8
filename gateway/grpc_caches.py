"""`springtide.v1.ContextCaches`: context caches over gRPC."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from gateway.accounts.allowance import Caller
from gateway.answer import ApiBackend
from gateway.caching.context import ContextCache, Status
from gateway.caching.desk import DEFAULT_TTL_S, Draft
from gateway.grpc_messages import Context, Messages, abort, authorization_of, no_message, parse_request
from gateway.grpc_requests import conversation
from springtide.errors import InvalidRequest
from springtide.rpc import caches_pb2

_LISTED = 20
_STATUSES = {
    Status.PENDING: caches_pb2.CACHE_STATUS_PENDING,
    Status.READY: caches_pb2.CACHE_STATUS_READY,
    Status.ERROR: caches_pb2.CACHE_STATUS_ERROR,
    Status.INACTIVE: caches_pb2.CACHE_STATUS_INACTIVE,
}


class _OfTenant(Protocol):
    tenant: str


RequestT = TypeVar("RequestT", bound=_OfTenant)
ReplyT = TypeVar("ReplyT")


class CachesService:
    """The methods of `springtide.v1.ContextCaches`."""

    def __init__(self, backend: ApiBackend, messages: Messages) -> None:
        self._backend = backend
        self._desk = backend.caches
        self._messages = messages

    def methods(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Handlers by the methods' names."""
        cache = caches_pb2.ContextCache.SerializeToString
        return {
            "CreateCache": grpc.stream_unary_rpc_method_handler(self._create, None, cache),
            "GetCache": self._small(caches_pb2.CacheName, self._get, cache),
            "ListCaches": self._small(caches_pb2.ListCachesRequest, self._page, caches_pb2.ListCachesReply.SerializeToString),
            "ExtendCache": self._small(caches_pb2.ExtendCacheRequest, self._extend, cache),
            "DeleteCache": self._small(caches_pb2.CacheName, self._delete, caches_pb2.DeleteCacheReply.SerializeToString),
        }

    def _small(
        self, kind: Any, answer: Callable[[Caller, Any], Awaitable[Any]], serialize: Callable[[Any], bytes]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Of a method whose requests are small: `answer` is given who asks, and the request."""

        async def call(request: Any, context: Context) -> Any:
            try:
                return await answer(self._caller(context, request), request)
            except Exception as error:
                await abort(context, error)

        return grpc.unary_unary_rpc_method_handler(call, kind.FromString, serialize)

    def _caller(self, context: Context, request: _OfTenant) -> Caller:
        return self._backend.accounts.caller(authorization_of(context), request.tenant)

    async def _create(self, _: Any, context: Context) -> caches_pb2.ContextCache:
        try:
            # Nothing of a stranger's message is read.
            self._backend.accounts.caller(authorization_of(context))
            async with self._messages.received(context) as raw:
                if raw is None:
                    raise no_message()
                request, draft = await self._backend.side_thread.run(len(raw), self._drafted, raw)
            return await self._shown(await self._desk.create(self._caller(context, request), request.model, draft))
        except Exception as error:
            await abort(context, error)

    def _drafted(self, raw: bytes) -> tuple[caches_pb2.CreateCacheRequest, Draft]:
        preparer = self._backend.preparer
        request = parse_request(raw, caches_pb2.CreateCacheRequest, preparer.bounds.max_values)
        preparer.check_model(request.model)
        preparer.check_count(len(request.chat.messages), "messages")
        if not request.chat.messages:
            raise InvalidRequest("chat.messages must hold at least one message", param="chat.messages")
        return request, Draft(
            conversation(request.chat),
            ttl_s=request.ttl_s or DEFAULT_TTL_S,
            replicas=request.replicas or 1,
            name=request.name,
            metadata=dict(request.metadata),
        )

    async def _get(self, caller: Caller, request: caches_pb2.CacheName) -> caches_pb2.ContextCache:
        return await self._shown(await self._desk.get(caller, request.cache_id))

    async def _page(self, caller: Caller, request: caches_pb2.ListCachesRequest) -> caches_pb2.ListCachesReply:
        caches, more = await self._desk.page(caller, after=request.after, limit=request.limit or _LISTED)
        return caches_pb2.ListCachesReply(caches=[await self._shown(cache) for cache in caches], more=more)

    async def _extend(self, caller: Caller, request: caches_pb2.ExtendCacheRequest) -> caches_pb2.ContextCache:
        return await self._shown(await self._desk.update(caller, request.cache_id, ttl_s=request.ttl_s))

    async def _delete(self, caller: Caller, request: caches_pb2.CacheName) -> caches_pb2.DeleteCacheReply:
        await self._desk.delete(caller, request.cache_id)
        return caches_pb2.DeleteCacheReply()

    async def _shown(self, cache: ContextCache) -> caches_pb2.ContextCache:
        meter = await self._desk.meter(cache)
        return caches_pb2.ContextCache(
            cache_id=cache.cache_id,
            status=_STATUSES[cache.status(self._desk.now)],
            error=cache.kept.error,
            tokens=cache.tokens,
            created_at=cache.created_at,
            expires_at=cache.expires_at,
            name=cache.name,
            metadata=dict(cache.metadata),
            replicas=cache.replicas,
            replicas_held=len(cache.kept.held),
            calls=meter.calls,
            saved_tokens=meter.saved_tokens,
        )
