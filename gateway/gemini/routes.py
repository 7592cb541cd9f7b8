"""The routes of Gemini's API."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway.answer import ApiBackend
from gateway.api_request import ApiRequest
from gateway.bodies import UNKNOWN_BYTES, parse_body
from gateway.described import array, one_of, operation
from gateway.exchange import Call, Endpoint, Json, Order, exchange, read_permitted
from gateway.gemini import caches
from gateway.gemini.answers import ContentFormat, count_json, error_json
from gateway.gemini.described import CONTENT, COUNT
from gateway.gemini.requests import CountTokensRequest, GenerateContentRequest
from springtide.errors import InvalidRequest

VERSIONS = ("/v1beta", "/v1")
"""Google's client asks for the one or the other; what they serve is the same."""
_HEADERS = ("x-goog-api-key", "x-goog-api-client")


def speaks(path: str, headers: Mapping[str, str]) -> bool:
    """Whether it is a client of Gemini's API that asks."""
    method = path.startswith("/v1/models/") and ":" in path.rpartition("/")[2]
    return path.startswith("/v1beta/") or method or any(name in headers for name in _HEADERS)


def routes(backend: ApiBackend) -> APIRouter:
    router = APIRouter()

    async def generate(request: Request) -> Response:
        return await exchange(backend, request, GENERATE)

    async def stream(request: Request) -> Response:
        return await exchange(backend, request, STREAM)

    async def count_tokens(request: Request) -> Json:
        asked, num_tokens = await read_permitted(backend, request, lambda raw: count(raw, request.path_params["model"]))
        if not asked.cache.named:
            return count_json(num_tokens)
        whole, use = await backend.caches.applied(request.state.tenant, asked)
        cached_tokens = 0 if use is None else use.cache.tokens
        return count_json(await backend.side_thread.run(max(UNKNOWN_BYTES, cached_tokens), tokens_of, whole), cached_tokens)

    def count(raw: bytes, model: str) -> tuple[ApiRequest, int]:
        """Of a request that begins with a cache, not before that is there."""
        asked = parse_body(raw, CountTokensRequest, backend.preparer.bounds.max_values).request(model)
        backend.preparer.check_model(asked.model)
        return asked, 0 if asked.cache.named else tokens_of(asked)

    def tokens_of(asked: ApiRequest) -> int:
        return sum(map(len, backend.preparer.tokens(asked)))

    async def other(model: str, method: str) -> Response:
        backend.preparer.check_model(model)
        raise NotServed(f"{method} is not served; {', '.join(METHODS)} are", param="method", code="not_served")

    for version in VERSIONS:
        at = f"{version}/models/{{model:path}}"
        for method, serve, described in (
            ("generateContent", generate, operation(CONTENT, GENERATE.body, {"alt": one_of("json")})),
            ("streamGenerateContent", stream, operation(array(CONTENT), STREAM.body, {"alt": one_of("json", "sse")}, events=True)),
            ("countTokens", count_tokens, operation(COUNT, CountTokensRequest)),
        ):
            router.add_api_route(f"{at}:{method}", serve, methods=["POST"], openapi_extra=described)
        caches.add_routes(router, version, backend)
        router.add_api_route(f"{at}:{{method}}", other, methods=["POST"], include_in_schema=False)
    return router


class NotServed(InvalidRequest):
    """A method of Gemini's that there is not: embeddings, images and so on."""

    http_status = 404


def _order(raw: bytes, call: Call, backend: ApiBackend, stream: bool) -> Order:
    body = parse_body(raw, GenerateContentRequest, backend.preparer.bounds.max_values)
    alt = call.query.get("alt", "json")
    if alt not in ("json", "sse") or (alt == "sse" and not stream):
        raise InvalidRequest(f"alt must be 'json', or for a stream 'sse', not {alt[:100]!r}", param="alt")
    written = ContentFormat(
        call.origin.request_id,
        backend.preparer.model_name,
        backend.tokenizer,
        events=alt == "sse",
        shows_thoughts=body.shows_thoughts,
        wants_logprobs=body.generation_config.response_logprobs,
    )
    return Order(body.request(call.path_params["model"]), stream, written)


def _whole(raw: bytes, call: Call, backend: ApiBackend) -> Order:
    return _order(raw, call, backend, stream=False)


def _streamed(raw: bytes, call: Call, backend: ApiBackend) -> Order:
    return _order(raw, call, backend, stream=True)


METHODS = ("generateContent", "streamGenerateContent", "countTokens")
GENERATE = Endpoint(
    "/v1beta/models/{model}:generateContent", "gen", GenerateContentRequest, _whole, error_json, operation="generate_content"
)
STREAM = Endpoint(
    "/v1beta/models/{model}:streamGenerateContent", "gen", GenerateContentRequest, _streamed, error_json, operation="generate_content"
)
BODIES = (GENERATE.body, CountTokensRequest, *caches.BODIES)
"""For the API's own description."""
