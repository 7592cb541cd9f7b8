"""What is sent for each call of the client, and what is made of the answer; the two clients differ only in how they wait."""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx

from springtide.client.words import Answer, Batch, BatchRequest, BatchResult, Cache, Chunk, Message, Prompt, ToolCalled, ToolCallPiece
from springtide.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    SpringtideError,
    Unauthenticated,
    Unavailable,
)
from springtide.protocol.usage import Usage

T = TypeVar("T")
Json = dict[str, Any]

CONNECT_TIMEOUT_S = 5.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request, and how its answer is read."""

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    json: Any = None
    params: Mapping[str, Any] | None = None
    files: Mapping[str, Any] | None = None
    form: Mapping[str, str] | None = None
    repeatable: bool = True
    """Twice is as good as once."""

    def options(self) -> Json:
        """For httpx."""
        given = {"json": self.json, "params": self.params, "files": self.files, "data": self.form}
        return {name: value for name, value in given.items() if value is not None}

    def result(self, response: httpx.Response) -> T:
        """Raises what the answer stands for."""
        if not response.is_success:
            raise error_of(response)
        return self.read(response)


# ---- models and answers ----


def models() -> Call[list[str]]:
    return Call("GET", "/v1/models", lambda response: [model["id"] for model in response.json()["data"]])


def answer(model: str, messages: Sequence[Message], options: Mapping[str, Any]) -> Call[Answer]:
    return Call("POST", CHAT, lambda response: _answer(response.json()), json={"model": model, "messages": list(messages), **options})


def stream_body(model: str, fields: Mapping[str, Any]) -> Json:
    return {"model": model, **fields, "stream": True, "stream_options": {"include_usage": True}}


def plain(prompt: Prompt) -> str | list[int]:
    return prompt if isinstance(prompt, str) else list(prompt)


def _answer(answer: Mapping[str, Any]) -> Answer:
    choice = answer["choices"][0]
    message = choice["message"]
    calls = tuple(
        ToolCalled(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()
    )
    usage = _usage(answer["usage"])
    assert usage is not None
    return Answer(message.get("content") or "", choice["finish_reason"], usage, message.get("reasoning_content") or "", calls)


# ---- caches ----


def create_cache(
    model: str, messages: Sequence[Message], tools: Sequence[Any], ttl_s: int, name: str, metadata: Mapping[str, str]
) -> Call[Cache]:
    body: Json = {"model": model, "messages": list(messages), "ttl": ttl_s}
    body |= {key: value for key, value in (("tools", list(tools)), ("name", name), ("metadata", dict(metadata))) if value}
    return Call("POST", "/v1/caching", _read_cache, json=body, repeatable=False)


def get_cache(cache_id: str) -> Call[Cache]:
    return Call("GET", f"/v1/caching/{cache_id}", _read_cache)


def list_caches(limit: int, after: str) -> Call[list[Cache]]:
    params = {"limit": limit, **({"after": after} if after else {})}
    return Call("GET", "/v1/caching", lambda response: [_cache(entry) for entry in response.json()["data"]], params=params)


def extend_cache(cache_id: str, ttl_s: int) -> Call[Cache]:
    return Call("PUT", f"/v1/caching/{cache_id}", _read_cache, json={"ttl": ttl_s})


def delete_cache(cache_id: str) -> Call[bool]:
    return Call("DELETE", f"/v1/caching/{cache_id}", lambda response: bool(response.json()["deleted"]))


def tag_cache(tag: str, cache_id: str) -> Call[str]:
    return Call("POST", "/v1/caching/refs/tags", lambda response: str(response.json()["tag"]), json={"tag": tag, "cache_id": cache_id})


def tagged_cache(tag: str) -> Call[Cache]:
    return Call("GET", f"/v1/caching/refs/tags/{tag}/content", _read_cache)


def untag_cache(tag: str) -> Call[bool]:
    return Call("DELETE", f"/v1/caching/refs/tags/{tag}", lambda response: bool(response.json()["deleted"]))


def _read_cache(response: httpx.Response) -> Cache:
    return _cache(response.json())


def _cache(cache: Mapping[str, Any]) -> Cache:
    error = cache.get("error") or {}
    return Cache(
        cache_id=cache["id"],
        status=cache["status"],
        tokens=cache.get("tokens") or 0,
        expires_at=cache.get("expired_at") or 0,
        name=cache.get("name") or "",
        metadata=cache.get("metadata") or {},
        error=str(error.get("message", "")),
    )


# ---- batches ----


def upload_batch(requests: Iterable[BatchRequest], endpoint: str) -> Call[str]:
    """The id of the file."""
    lines = (
        json.dumps({"custom_id": request.custom_id, "method": "POST", "url": endpoint, "body": dict(request.body)}) for request in requests
    )
    content = "\n".join(lines).encode()
    files = {"file": ("batch.jsonl", content, "application/jsonl")}
    return Call("POST", "/v1/files", lambda response: str(response.json()["id"]), files=files, form={"purpose": "batch"}, repeatable=False)


def create_batch(file_id: str, endpoint: str, window: str, metadata: Mapping[str, str]) -> Call[Batch]:
    body: Json = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
    if metadata:
        body["metadata"] = dict(metadata)
    return Call("POST", "/v1/batches", _read_batch, json=body, repeatable=False)


def get_batch(batch_id: str) -> Call[Batch]:
    return Call("GET", f"/v1/batches/{batch_id}", _read_batch)


def list_batches(limit: int, after: str) -> Call[list[Batch]]:
    params = {"limit": limit, **({"after": after} if after else {})}
    return Call("GET", "/v1/batches", lambda response: [_batch(entry) for entry in response.json()["data"]], params=params)


def cancel_batch(batch_id: str) -> Call[Batch]:
    return Call("POST", f"/v1/batches/{batch_id}/cancel", _read_batch)


def batch_results(file_id: str) -> Call[list[BatchResult]]:
    return Call(
        "GET", f"/v1/files/{file_id}/content", lambda response: [_result(line) for line in response.text.split("\n") if line.strip()]
    )


def _read_batch(response: httpx.Response) -> Batch:
    return _batch(response.json())


def _batch(batch: Mapping[str, Any]) -> Batch:
    counts = batch.get("request_counts") or {}
    errors = (batch.get("errors") or {}).get("data") or ()
    return Batch(
        batch_id=batch["id"],
        status=batch["status"],
        total=counts.get("total", 0),
        completed=counts.get("completed", 0),
        failed=counts.get("failed", 0),
        output_file_id=batch.get("output_file_id"),
        error_file_id=batch.get("error_file_id"),
        errors=tuple(str(error.get("message")) for error in errors),
    )


def _result(line: str) -> BatchResult:
    entry = json.loads(line)
    response = entry.get("response")
    if response is None:
        return BatchResult(entry["custom_id"], 0, {"error": entry.get("error")})
    return BatchResult(entry["custom_id"], response["status_code"], response["body"])


# ---- streams ----


class Lines:
    """The lines of a stream of bytes, which are told apart by line feeds alone: texts hold other separators of lines."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> list[str]:
        """Those that have ended."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode().rstrip("\r") for line in lines]


class Events:
    """Reads the lines of one stream of server-sent events."""

    def __init__(self) -> None:
        self._complete = False

    def read(self, line: str) -> Chunk | None:
        received_at = time.monotonic()
        if not line.startswith("data: "):
            return None
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self._complete = True
            return None
        event = json.loads(data)
        if "error" in event:
            raise _typed_error(None, event["error"], None)
        usage = _usage(event.get("usage"))
        if not event["choices"]:
            return Chunk(received_at, "", usage=usage)
        choice = event["choices"][0]
        delta = choice.get("delta") or {}
        text = choice["text"] if "text" in choice else delta.get("content")
        return Chunk(
            received_at,
            text or "",
            choice["index"],
            choice["finish_reason"],
            usage,
            delta.get("reasoning_content") or "",
            tuple(map(_piece, delta.get("tool_calls") or ())),
        )

    def check_complete(self) -> None:
        if not self._complete:
            raise Unavailable("the stream ended before it was complete", code="cut_off")


def _piece(call: Mapping[str, Any]) -> ToolCallPiece:
    function = call.get("function") or {}
    return ToolCallPiece(call["index"], call.get("id") or "", function.get("name") or "", function.get("arguments") or "")


# ---- errors ----


def error_of(response: httpx.Response) -> SpringtideError:
    """The error that a response with a status of 400 or more stands for."""
    try:
        return _typed_error(response.status_code, response.json()["error"], response.headers.get("retry-after"))
    except (ValueError, KeyError, TypeError):
        kind = Unavailable if response.status_code >= 500 else SpringtideError
        return kind(f"{response.url} answered {response.status_code}: {response.text[:500]}", code=str(response.status_code))


_TYPES: dict[str, type[SpringtideError]] = {
    kind.openai_type: kind for kind in (InvalidRequest, Unauthenticated, DeadlineExceeded, Unavailable)
}


def _typed_error(status: int | None, error: Mapping[str, Any], retry_after: str | None) -> SpringtideError:
    message, param, code = str(error["message"]), error.get("param"), error.get("code")
    if error.get("type") == Overloaded.openai_type:
        return Overloaded(message, retry_after_s=float(retry_after or 1), reason=str(code))
    if status == ModelNotFound.http_status and code == "model_not_found":
        return ModelNotFound(message, param=param, code=code)
    return _TYPES.get(str(error.get("type")), SpringtideError)(message, param=param, code=code)


# ---- connections ----


def headers(api_key: str | None) -> dict[str, str]:
    key = api_key or os.environ.get("OPENAI_API_KEY")
    return {"authorization": f"Bearer {key}"} if key else {}


def verification(ca: Path | None) -> ssl.SSLContext | bool:
    """How the server's certificate is verified."""
    if ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ConfigError(f"{ca} is no PEM file of certificate authorities: {error}") from None


def connection_failed(base_url: httpx.URL, error: httpx.HTTPError) -> Unavailable:
    return Unavailable(f"the connection to {base_url} failed: {str(error) or type(error).__name__}", code="connection_failed")


def _usage(usage: Mapping[str, Any] | None) -> Usage | None:
    if usage is None:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens") or 0)
