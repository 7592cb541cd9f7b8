"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway.answer import ApiBackend
from gateway.anthropic.answers import MessagesFormat, error_json
from gateway.anthropic.requests import CountMessageTokensRequest, MessagesRequest
from gateway.bodies import parse_body
from gateway.exchange import Call, Endpoint, Json, Order, exchange, read, takes

VERSION_HEADER = "anthropic-version"
_PATH = "/v1/messages"


def speaks(path: str, headers: Mapping[str, str]) -> bool:
    """Whether it is a client of Anthropic's API that asks."""
    return path.startswith(_PATH) or VERSION_HEADER in headers


def routes(backend: ApiBackend) -> APIRouter:
    router = APIRouter()

    @router.post(MESSAGES.path, openapi_extra=takes(MESSAGES.body))
    async def messages(request: Request) -> Response:
        return await exchange(backend, request, MESSAGES)

    @router.post(f"{_PATH}/count_tokens", openapi_extra=takes(CountMessageTokensRequest))
    async def count_tokens(request: Request) -> Json:
        return await read(backend, request, count)

    def count(raw: bytes) -> Json:
        asked = parse_body(raw, CountMessageTokensRequest, backend.preparer.bounds.max_values).request()
        backend.preparer.check_model(asked.model)
        return {"input_tokens": sum(map(len, backend.preparer.tokens(asked)))}

    return router


def _order(raw: bytes, call: Call, backend: ApiBackend) -> Order:
    body = parse_body(raw, MessagesRequest, backend.preparer.bounds.max_values)
    written = MessagesFormat(call.origin.request_id, backend.preparer.model_name, body.stop_sequences, body.shows_thinking)
    return Order(body.request(), body.stream, written)


MESSAGES = Endpoint(_PATH, "msg", MessagesRequest, _order, error_json, id_header="request-id")
BODIES = (MESSAGES.body, CountMessageTokensRequest)
"""For the API's own description."""
