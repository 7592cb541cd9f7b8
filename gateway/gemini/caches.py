"""`cachedContents`: context caches as Gemini's API has them. Requests name them by `cachedContent`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import AfterValidator, FailFast, Field, StringConstraints

from gateway.answer import ApiBackend
from gateway.bodies import parse_body
from gateway.caching.catalogue import MAX_TTL_S
from gateway.caching.context import ContextCache
from gateway.caching.desk import DEFAULT_TTL_S, MAX_LISTED, Draft
from gateway.described import TEXT, TIME, WHOLE, array, operation, record
from gateway.exchange import Json, read
from gateway.fields import Neutral, Text, default_when_null
from gateway.gemini.conversation import Content, GeminiBody, ToolConfig, ToolParam, conversation
from gateway.gemini.requests import CACHES, MODELS, NAMES, model_name
from gateway.prepare import in_the_clients_words
from gateway.records import NotListed
from springtide.errors import InvalidRequest

_DURATION = re.compile(r"(\d{1,10}(?:\.\d{1,9})?)s")
_CACHE = record(
    {
        **dict.fromkeys(("name", "model", "displayName"), TEXT),
        **dict.fromkeys(("createTime", "updateTime", "expireTime"), TIME),
        "usageMetadata": record({"totalTokenCount": WHOLE}),
    }
)
"""For the API's own description."""
_MASK = {"type": "string", "pattern": "^,*((ttl|expireTime|expire_time)(,+|$))*$"}
_CHANGEABLE = {"ttl", "expireTime", "expire_time"}


def _time(text: str) -> str:
    try:
        datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise ValueError("must be a time such as 2026-01-31T12:00:00Z") from None
    return text


class CacheUpdate(GeminiBody):
    """The body of `PATCH cachedContents/ID`: until when it is kept is all that can be changed."""

    ttl: Annotated[str, StringConstraints(pattern=f"^{_DURATION.pattern}$")] | None = None
    expire_time: Annotated[str, AfterValidator(_time), Field(json_schema_extra={"format": "date-time"})] | None = None

    def ttl_s(self, now: float) -> float | None:
        """None: nothing is said. Raises InvalidRequest."""
        if self.ttl is not None and self.expire_time is not None:
            raise InvalidRequest("ttl and expireTime are two words for one thing; send one of them", param="ttl")
        if self.ttl is not None:
            return float(self.ttl[:-1])
        if self.expire_time is None:
            return None
        ttl_s = datetime.fromisoformat(self.expire_time).timestamp() - now
        if not 0 < ttl_s <= MAX_TTL_S:
            message = f"expireTime must be in the future, within {MAX_TTL_S:.0f} seconds, not {self.expire_time}"
            raise InvalidRequest(message, param="expireTime")
        return ttl_s


class CachedContent(CacheUpdate):
    """The body of `POST cachedContents`."""

    model: Text
    contents: Annotated[list[Content], FailFast(), default_when_null([])] = Field(default_factory=list)
    system_instruction: Content | None = None
    tools: Annotated[list[ToolParam], FailFast(), default_when_null([])] = Field(default_factory=list)
    tool_config: ToolConfig | None = None
    display_name: Text | None = None
    kms_key_name: Neutral = None

    def draft(self, now: float) -> Draft:
        """Raises InvalidRequest, naming the field."""
        if not self.contents and self.system_instruction is None:
            raise InvalidRequest("contents or systemInstruction must be given: there is nothing to keep", param="contents")
        if len(self.display_name or "") > 128:
            raise InvalidRequest("displayName may have at most 128 characters", param="displayName")
        ttl_s = self.ttl_s(now)
        kept = conversation(self.contents, self.system_instruction, self.tools, self.tool_config)
        return Draft(kept, DEFAULT_TTL_S if ttl_s is None else ttl_s, name=self.display_name or "")


BODIES = (CachedContent, CacheUpdate)
"""For the API's own description."""


def add_routes(router: APIRouter, version: str, backend: ApiBackend) -> None:
    desk, preparer = backend.caches, backend.preparer

    def drafted(raw: bytes) -> Draft:
        asked = parse_body(raw, CachedContent, preparer.bounds.max_values)
        preparer.check_model(model_name(asked.model))
        return asked.draft(desk.now)

    def lasting(raw: bytes) -> float | None:
        return parse_body(raw, CacheUpdate, preparer.bounds.max_values).ttl_s(desk.now)

    @router.post(f"{version}/cachedContents", openapi_extra=operation(_CACHE, CachedContent))
    async def create(request: Request) -> Json:
        draft = await read(backend, request, drafted)
        try:
            return _cache_json(await desk.create(request.state.caller, preparer.model_name, draft))
        except InvalidRequest as error:
            raise in_the_clients_words(error, NAMES) from None

    page_query = {"pageSize": {"type": "integer", "minimum": 0, "maximum": 10**9 - 1}, "pageToken": TEXT}

    @router.get(
        f"{version}/cachedContents",
        openapi_extra=operation(record({"cachedContents": array(_CACHE)}, {"nextPageToken": TEXT}), query=page_query),
    )
    async def page(request: Request) -> Json:
        size = request.query_params.get("pageSize", "50")
        if not size.isdecimal() or len(size) > 9:
            raise InvalidRequest(f"pageSize must be a number, not {size[:100]!r}", param="pageSize")
        after, limit = request.query_params.get("pageToken", ""), min(int(size) or 50, MAX_LISTED)
        try:
            caches, more = await desk.page(request.state.caller, after=after, limit=limit)
        except NotListed:
            raise InvalidRequest(f"pageToken: there is no page after {after[:100]!r}, or no more", param="pageToken") from None
        listed: Json = {"cachedContents": [_cache_json(cache) for cache in caches]}
        return {**listed, "nextPageToken": caches[-1].cache_id} if more else listed

    @router.get(f"{version}/cachedContents/{{cache_id}}", openapi_extra=operation(_CACHE))
    async def get(request: Request, cache_id: str) -> Json:
        with _by_its_name():
            return _cache_json(await desk.get(request.state.caller, cache_id))

    @router.patch(f"{version}/cachedContents/{{cache_id}}", openapi_extra=operation(_CACHE, CacheUpdate, query={"updateMask": _MASK}))
    async def update(request: Request, cache_id: str) -> Json:
        mask = {name for name in request.query_params.get("updateMask", "").split(",") if name}
        if not mask <= _CHANGEABLE:
            raise InvalidRequest(f"updateMask may name ttl or expireTime, not {sorted(mask - _CHANGEABLE)[0][:100]!r}", param="updateMask")
        ttl_s = await read(backend, request, lasting)
        with _by_its_name():
            return _cache_json(await desk.update(request.state.caller, cache_id, ttl_s=ttl_s))

    @router.delete(f"{version}/cachedContents/{{cache_id}}", openapi_extra=operation(record({})))
    async def delete(request: Request, cache_id: str) -> dict[str, Any]:
        with _by_its_name():
            await desk.delete(request.state.caller, cache_id)
        return {}


@contextlib.contextmanager
def _by_its_name() -> Iterator[None]:
    """Errors speak of the cache as the path does."""
    try:
        yield
    except InvalidRequest as error:
        raise in_the_clients_words(error, {"cache_id": "name"}) from None


def _cache_json(cache: ContextCache) -> Json:
    return {
        "name": f"{CACHES}{cache.cache_id}",
        "model": f"{MODELS}{cache.model}",
        "displayName": cache.name,
        "createTime": _written(cache.created_at),
        "updateTime": _written(cache.active_since),
        "expireTime": _written(cache.expires_at),
        "usageMetadata": {"totalTokenCount": cache.tokens},
    }


def _written(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
