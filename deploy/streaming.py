"""Reads an OpenAI-compatible stream with the time at which each chunk came."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

from springtide.errors import SpringtideError

TIMEOUT = httpx.Timeout(600.0, connect=5.0)


class ApiError(SpringtideError):
    """The server refused, failed, or went away. `kind` is short and the same for all errors of one kind: `429 ttft`, `connection lost`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a stream and when it came, on time.monotonic's clock. Not all have text; the last has the usage."""

    at_s: float
    text: str
    finish_reason: str | None
    usage: Usage | None


async def served_model(client: httpx.AsyncClient) -> str:
    """The name of the model that the server has. Raises ApiError."""
    try:
        response = await client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ApiError("connection failed", f"nothing answers at {client.base_url}: {error or type(error).__name__}") from None
    _raise_for(response.status_code, response.content)
    return str(response.json()["data"][0]["id"])


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncIterator[Chunk]:
    """The chunks of a completion or chat completion. Raises ApiError."""
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", path, json=request) as response:
            if response.status_code != httpx.codes.OK:
                _raise_for(response.status_code, await response.aread())
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    yield _chunk(json.loads(line.removeprefix("data: ")))
    except httpx.HTTPError as error:
        raise ApiError("connection lost", f"the connection to {client.base_url} failed: {error or type(error).__name__}") from None
    raise ApiError("cut off", "the stream ended before it was complete")


def _chunk(event: dict[str, Any]) -> Chunk:
    at_s = time.monotonic()
    if "error" in event:
        raise ApiError(_kind(event["error"]), str(event["error"].get("message")))
    text, reason = "", None
    for choice in event["choices"]:
        text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        reason = choice.get("finish_reason") or reason
    return Chunk(at_s, text, reason, _usage(event.get("usage")))


def _usage(usage: dict[str, Any] | None) -> Usage | None:
    if usage is None:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens") or 0)


def _raise_for(status: int, content: bytes) -> None:
    if status == httpx.codes.OK:
        return
    try:
        error = json.loads(content)["error"]
        raise ApiError(f"{status} {_kind(error)}".rstrip(), str(error["message"]))
    except (ValueError, KeyError, TypeError):
        raise ApiError(str(status), content.decode(errors="replace")[:500]) from None


def _kind(error: dict[str, Any]) -> str:
    return str(error.get("code") or error.get("type") or "")
