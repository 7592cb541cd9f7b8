"""`/v1/caching`: context caches as Kimi's API has them, with tags. What is ours beside it: `pin`, `replicas`, `replicas_held`, `meter`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, BeforeValidator, Field

from gateway.accounts.allowance import Caller
from gateway.answer import ApiBackend
from gateway.api_request import ApiRequest, Conversation, Speaker
from gateway.bodies import parse_body, validated
from gateway.caching.catalogue import MAX_TTL_S, Tag
from gateway.caching.context import ContextCache, Meter, Status, Strength, message_json, plain
from gateway.caching.desk import DEFAULT_TTL_S, MAX_LISTED, MAX_REPLICAS, Draft
from gateway.conversation import MAX_TOOLS
from gateway.described import ANY_OBJECT, NUMBER, TEXT, WHOLE, array, one_of, operation, record
from gateway.exchange import Json, read, read_permitted
from gateway.fields import Body, Text
from gateway.openai.messages import ChatMessage, ChatTool
from gateway.openai.requests import ChatCompletionRequest
from springtide.errors import InvalidRequest

_TAG = re.compile(r"[A-Za-z][A-Za-z0-9_.\-]{0,127}")
_METADATA = re.compile(r"metadata\[(.*)\]")
BodyT = TypeVar("BodyT", bound=BaseModel)
_TAGS = "/v1/caching/refs/tags"
_METER = ("creation_tokens", "calls", "saved_tokens")
_CACHE = record(
    {
        **dict.fromkeys(("id", "model", "name", "description"), TEXT),
        **dict.fromkeys(("created_at", "expired_at", "tokens", "replicas", "replicas_held"), WHOLE),
        "status": one_of(*(status.value for status in Status)),
        "object": one_of("context-cache"),
        "metadata": {"type": "object", "additionalProperties": TEXT},
        "pin": one_of(*(strength.value for strength in Strength)),
        "meter": record({**dict.fromkeys(_METER, WHOLE), "storage_token_minutes": NUMBER}),
    },
    {"error": record({"type": TEXT, "message": TEXT}), "messages": array(ANY_OBJECT), "tools": array(ANY_OBJECT)},
)
"""For the API's own description, as what follows."""
_TAGGED = record({"tag": TEXT, "cache_id": TEXT, "object": one_of("cache_object.tag"), "owned_by": TEXT, "created_at": WHOLE})
_LIMIT: Json = {"type": "integer", "minimum": 1, "maximum": MAX_LISTED}
_PAGE: Json = {"order": one_of("asc", "desc"), "limit": _LIMIT, "after": TEXT, "before": TEXT}


def _list(entry: Json) -> Json:
    return record({"object": one_of("list"), "data": array(entry)})


def _deleted(kind: str, name: str) -> Json:
    return record({"deleted": one_of(True), "object": one_of(kind), name: TEXT})


class _Lasting(Body):
    metadata: dict[Text, Text] | None = None
    expired_at: Annotated[int, Field(ge=0)] | None = None
    """Unix seconds; 0: in an hour."""
    ttl: Annotated[int, Field(ge=0, le=int(MAX_TTL_S))] | None = None
    """In seconds, in place of `expired_at`."""

    def ttl_s(self, now: float) -> float | None:
        """None: nothing is said. Raises InvalidRequest."""
        if self.ttl and self.expired_at:
            raise InvalidRequest("ttl and expired_at must not be given both", param="ttl")
        if self.ttl:
            return float(self.ttl)
        if self.expired_at and not now < self.expired_at <= now + MAX_TTL_S:
            message = f"expired_at must be in the future, within {MAX_TTL_S:.0f} seconds, not {self.expired_at}"
            raise InvalidRequest(message, param="expired_at")
        return self.expired_at - now if self.expired_at else None


def _as_it_is(value: Any) -> Any:
    return value


class TokenCountRequest(Body):
    model: str
    messages: Annotated[list[Annotated[Any, BeforeValidator(_as_it_is, json_schema_input_type=ChatMessage)]], Field(min_length=1)]
    """As in a chat completion, which reads them."""
    tools: Annotated[
        list[Annotated[Any, BeforeValidator(_as_it_is, json_schema_input_type=ChatTool)]] | None, Field(max_length=MAX_TOOLS)
    ] = None

    def api_request(self) -> ApiRequest:
        """That of the chat completion. Raises InvalidRequest, naming the field."""
        said: Json = {"model": self.model, "messages": self.messages, **({"tools": self.tools} if self.tools else {})}
        return validated(said, ChatCompletionRequest).api_request()


class CachingRequest(TokenCountRequest, _Lasting):
    name: Text | None = None
    description: Text | None = None
    pin: Literal["soft", "hard"] = "hard"
    """Ours: how strongly it is kept."""
    replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 1
    """Ours: in how many stores."""

    def conversation(self) -> Conversation:
        """Raises InvalidRequest, naming the field."""
        request = self.api_request()
        if request.cache.named:
            raise InvalidRequest("messages must not name another cache", param="messages")
        assert isinstance(request.prompt, Conversation), "a chat is a conversation"
        return request.prompt


class CachingUpdate(_Lasting):
    pass


class TagRequest(Body):
    tag: Annotated[str, Field(json_schema_extra={"pattern": f"^{_TAG.pattern}$"})]
    cache_id: str


def routes(backend: ApiBackend) -> APIRouter:
    router, api = APIRouter(), _CachingApi(backend)
    _route_caches(router, api)
    _route_tags(router, api)
    return router


def _route_caches(router: APIRouter, api: _CachingApi) -> None:
    desk = api.desk

    @router.post(
        "/v1/tokenizers/estimate-token-count", openapi_extra=operation(record({"data": record({"total_tokens": WHOLE})}), TokenCountRequest)
    )
    async def count(request: Request) -> Json:
        return {"data": {"total_tokens": await read_permitted(api.backend, request, api.counted)}}

    @router.post("/v1/caching", openapi_extra=operation(_CACHE, CachingRequest))
    async def create(request: Request) -> Json:
        asked, draft = await read(api.backend, request, api.drafted)
        return await api.shown(await desk.create(_caller(request), asked.model, draft), draft.conversation)

    @router.get("/v1/caching", openapi_extra=operation(_list(_CACHE), query=_PAGE))
    async def page(request: Request) -> Json:
        order, after, before, limit = _asked_page(request)
        metadata = {match[1]: value for name, value in request.query_params.items() if (match := _METADATA.fullmatch(name))}
        found, _ = await desk.page(_caller(request), order=order, after=after, before=before, limit=limit, metadata=metadata)
        return {"object": "list", "data": [await api.shown(cache) for cache in found]}

    @router.get("/v1/caching/{cache_id}", openapi_extra=operation(_CACHE))
    async def get(request: Request, cache_id: str) -> Json:
        return await api.whole(request, cache_id)

    @router.put("/v1/caching/{cache_id}", openapi_extra=operation(_CACHE, CachingUpdate))
    async def update(request: Request, cache_id: str) -> Json:
        asked = await api.body(request, CachingUpdate)
        return await api.shown(await desk.update(_caller(request), cache_id, ttl_s=asked.ttl_s(desk.now), metadata=asked.metadata))

    @router.delete("/v1/caching/{cache_id}", openapi_extra=operation(_deleted("context_cache_object.deleted", "id")))
    async def delete(request: Request, cache_id: str) -> Json:
        await desk.delete(_caller(request), cache_id)
        return {"deleted": True, "id": cache_id, "object": "context_cache_object.deleted"}


def _route_tags(router: APIRouter, api: _CachingApi) -> None:
    desk = api.desk

    @router.post(_TAGS, openapi_extra=operation(_TAGGED, TagRequest))
    async def tag(request: Request) -> Json:
        asked = await api.body(request, TagRequest)
        if not _TAG.fullmatch(asked.tag):
            raise InvalidRequest("tag must have 1 to 128 letters, digits, _, - and ., the first of them a letter", param="tag")
        return _tag_json(await desk.tag(_caller(request), asked.tag, asked.cache_id), _tenant(request))

    @router.get(_TAGS, openapi_extra=operation(_list(_TAGGED), query=_PAGE))
    async def tags(request: Request) -> Json:
        order, after, before, limit = _asked_page(request)
        found, _ = await desk.tags(_tenant(request), order=order, after=after, before=before, limit=limit)
        return {"object": "list", "data": [_tag_json(tag, _tenant(request)) for tag in found]}

    @router.get(f"{_TAGS}/{{tag}}", openapi_extra=operation(_TAGGED))
    async def tagged(request: Request, tag: str) -> Json:
        return _tag_json(await desk.tagged(_tenant(request), tag), _tenant(request))

    @router.get(f"{_TAGS}/{{tag}}/content", openapi_extra=operation(_CACHE))
    async def content_of_tag(request: Request, tag: str) -> Json:
        return await api.whole(request, (await desk.tagged(_tenant(request), tag)).cache_id)

    @router.delete(f"{_TAGS}/{{tag}}", openapi_extra=operation(_deleted("cache_object.tag.deleted", "tag")))
    async def untag(request: Request, tag: str) -> Json:
        await desk.untag(_tenant(request), tag)
        return {"deleted": True, "object": "cache_object.tag.deleted", "tag": tag}


class _CachingApi:
    """What is behind the routes."""

    def __init__(self, backend: ApiBackend) -> None:
        self.backend = backend
        self.desk = backend.caches
        self._preparer = backend.preparer

    async def body(self, request: Request, model: type[BodyT]) -> BodyT:
        return await read(self.backend, request, lambda raw: self._parsed(raw, model))

    def drafted(self, raw: bytes) -> tuple[CachingRequest, Draft]:
        asked = self._parsed(raw, CachingRequest)
        self._preparer.check_model(asked.model)
        return asked, _draft(asked, self.desk.now)

    def counted(self, raw: bytes) -> int:
        asked = self._parsed(raw, TokenCountRequest)
        self._preparer.check_model(asked.model)
        return sum(map(len, self._preparer.tokens(asked.api_request())))

    async def shown(self, cache: ContextCache, conversation: Conversation | None = None) -> Json:
        return _cache_json(cache, self.desk.now, await self.desk.meter(cache), conversation)

    async def whole(self, request: Request, cache_id: str) -> Json:
        cache, content = await self.desk.with_content(_caller(request), cache_id)
        return await self.shown(cache, content.conversation)

    def _parsed(self, raw: bytes, model: type[BodyT]) -> BodyT:
        return parse_body(raw, model, self._preparer.bounds.max_values)


BODIES = (CachingRequest, CachingUpdate, TagRequest, TokenCountRequest)
"""For the API's own description."""


def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


def _tenant(request: Request) -> str:
    return str(request.state.tenant)


def _draft(asked: CachingRequest, now: float) -> Draft:
    ttl_s = asked.ttl_s(now)
    return Draft(
        asked.conversation(),
        DEFAULT_TTL_S if ttl_s is None else ttl_s,
        Strength(asked.pin),
        asked.replicas,
        asked.name or "",
        asked.description or "",
        asked.metadata or {},
    )


def _asked_page(request: Request) -> tuple[Literal["asc", "desc"], str, str, int]:
    said = request.query_params
    order, limit = said.get("order", "desc"), said.get("limit", "20")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be asc or desc, not {order[:100]!r}", param="order")
    if not limit.isdecimal() or len(limit) > 3 or not 1 <= int(limit) <= MAX_LISTED:
        raise InvalidRequest(f"limit must be between 1 and {MAX_LISTED}, not {limit[:100]!r}", param="limit")
    return ("asc" if order == "asc" else "desc"), said.get("after", ""), said.get("before", ""), int(limit)


def _cache_json(cache: ContextCache, now: float, meter: Meter, conversation: Conversation | None) -> Json:
    status = cache.status(now)
    said: Json = {
        "id": cache.cache_id,
        "status": status.value,
        "object": "context-cache",
        "created_at": int(cache.created_at),
        "expired_at": int(cache.expires_at),
        "tokens": cache.tokens,
        "model": cache.model,
        "name": cache.name,
        "description": cache.description,
        "metadata": dict(cache.metadata),
        "pin": cache.strength.value,
        "replicas": cache.replicas,
        "replicas_held": len(cache.kept.held) if status is Status.READY else 0,
        "meter": {
            "creation_tokens": meter.creation_tokens,
            "calls": meter.calls,
            "saved_tokens": meter.saved_tokens,
            "storage_token_minutes": cache.token_minutes(now),
        },
    }
    if cache.kept.error:
        said["error"] = {"type": "not_computed", "message": cache.kept.error}
    if conversation is not None:
        said |= {"messages": [_message(message_json(message)) for message in conversation.messages], "tools": _tools(conversation)}
    return said


def _message(said: Mapping[str, Any]) -> Json:
    """A message as a chat completion has it."""
    written: Json = {"role": said["speaker"], "content": said["content"]}
    if said.get("name"):
        written["name"] = said["name"]
    if said["speaker"] == Speaker.TOOL.value:
        written["tool_call_id"] = said.get("tool_call_id", "")
    if said.get("tool_calls"):
        written["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in said["tool_calls"]
        ]
    return written


def _tools(conversation: Conversation) -> list[Json]:
    return [
        {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": plain(tool.parameters)}}
        for tool in conversation.tools
    ]


def _tag_json(tag: Tag, tenant: str) -> Json:
    return {
        "tag": tag.tag,
        "cache_id": tag.cache_id,
        "object": "cache_object.tag",
        "owned_by": tenant,
        "created_at": int(tag.created_at),
    }
