"""Reading OpenAI-compatible streams: what comes, how it ends, and how it fails. The server's side is canned HTTP."""

import json
from typing import Any

import httpx
import pytest

from deploy.streaming import ApiError, Chunk, Usage, stream

DONE = "data: [DONE]\n\n"


def event(payload: dict[str, Any]) -> str:
    return f"data: {json.dumps(payload)}\n\n"


async def read(body: str, status: int = 200) -> list[Chunk]:
    def answer(request: httpx.Request) -> httpx.Response:
        assert json.loads(request.content)["stream_options"] == {"include_usage": True}
        return httpx.Response(status, text=body)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://cluster") as client:
        return [chunk async for chunk in stream(client, "/v1/completions", {"prompt": [1]})]


async def test_text_comes_in_order_and_the_usage_last() -> None:
    usage = {"prompt_tokens": 70, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 64}}
    chunks = await read(
        event({"choices": [{"text": "Hel", "finish_reason": None}]})
        + event({"choices": [{"delta": {"content": "lo"}, "finish_reason": "stop"}]})
        + event({"choices": [], "usage": usage})
        + DONE
    )
    assert "".join(chunk.text for chunk in chunks) == "Hello"
    assert chunks[1].finish_reason == "stop"
    assert chunks[2].usage == Usage(prompt_tokens=70, completion_tokens=2, cached_tokens=64)
    assert chunks[0].at_s <= chunks[1].at_s


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (
            json.dumps({"error": {"message": "too long", "type": "invalid_request_error", "code": "context_length"}}),
            400,
            "400 context_length",
        ),
        (json.dumps({"error": {"message": "busy", "type": "rate_limit_error", "code": None}}), 429, "429 rate_limit_error"),
        ("Bad gateway", 502, "502"),
        (event({"error": {"message": "nodes were lost", "type": "service_unavailable"}}), 200, "service_unavailable"),
        (event({"choices": [{"text": "Hel", "finish_reason": None}]}), 200, "cut off"),
    ],
)
async def test_a_failure_has_a_kind(body: str, status: int, kind: str) -> None:
    with pytest.raises(ApiError) as error:
        await read(body, status)
    assert error.value.kind == kind


async def test_a_connection_that_breaks_is_an_error_of_its_own() -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("reset by peer")

    async with httpx.AsyncClient(transport=httpx.MockTransport(broken), base_url="http://cluster") as client:
        with pytest.raises(ApiError, match="reset by peer") as error:
            [chunk async for chunk in stream(client, "/v1/completions", {})]
    assert error.value.kind == "connection lost"
