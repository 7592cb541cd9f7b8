"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway.answer import ApiBackend
from gateway.anthropic.answers import MessagesFormat, error_json
from gateway.anthropic.requests import CountMessageTokensRequest, MessagesRequest
from gateway.bodies import parse_body
from gateway.described import ANY_OBJECT, TEXT, TIME, WHOLE, array, nullable, one_of, operation, record
from gateway.exchange import Call, Endpoint, Json, Order, exchange, read_permitted

VERSION_HEADER = "anthropic-version"
_PATH = "/v1/messages"
ERROR = record(
    {
        "type": one_of("error"),
        "error": record({"type": TEXT, "message": TEXT}, {"details": record({"error_code": TEXT})}),
        "request_id": nullable(TEXT),
    }
)
"""For the API's own description, as what follows."""
MODEL = record(
    {
        "type": one_of("model"),
        "id": TEXT,
        "display_name": TEXT,
        "created_at": TIME,
        "lifecycle": one_of("active"),
        "max_input_tokens": WHOLE,
        "max_tokens": WHOLE,
    }
)
_BLOCK = {
    "anyOf": [
        record({"type": one_of("text"), "text": TEXT}),
        record({"type": one_of("thinking"), "thinking": TEXT, "signature": TEXT}),
        record({"type": one_of("tool_use"), "id": TEXT, "name": TEXT, "input": ANY_OBJECT}),
    ]
}
_MESSAGE = record(
    {
        "id": TEXT,
        "type": one_of("message"),
        "role": one_of("assistant"),
        "model": TEXT,
        "content": array(_BLOCK),
        "stop_reason": one_of("max_tokens", "stop_sequence", "tool_use", "end_turn"),
        "stop_sequence": nullable(TEXT),
        "usage": record(
            {
                "input_tokens": WHOLE,
                "cache_creation_input_tokens": WHOLE,
                "cache_creation": record({"ephemeral_5m_input_tokens": WHOLE, "ephemeral_1h_input_tokens": WHOLE}),
                "cache_read_input_tokens": WHOLE,
                "output_tokens": WHOLE,
                "output_tokens_details": record({"thinking_tokens": WHOLE}),
            }
        ),
    }
)


def speaks(path: str, headers: Mapping[str, str]) -> bool:
    """Whether it is a client of Anthropic's API that asks."""
    return path.startswith(_PATH) or VERSION_HEADER in headers


def routes(backend: ApiBackend) -> APIRouter:
    router = APIRouter()

    @router.post(MESSAGES.path, openapi_extra=operation(_MESSAGE, MESSAGES.body, events=True))
    async def messages(request: Request) -> Response:
        return await exchange(backend, request, MESSAGES)

    @router.post(f"{_PATH}/count_tokens", openapi_extra=operation(record({"input_tokens": WHOLE}), CountMessageTokensRequest))
    async def count_tokens(request: Request) -> Json:
        return await read_permitted(backend, request, count)

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
