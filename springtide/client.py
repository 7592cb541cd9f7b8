"""A small client of the gateway's HTTP API, for Python programs: streaming chat and completions with the time of every chunk.

    with Client("http://127.0.0.1:8000") as client:
        for chunk in client.chat([{"role": "user", "content": "Hello"}], max_tokens=50):
            print(chunk.text, end="", flush=True)

Errors are those of springtide.errors: InvalidRequest, Unauthenticated, ModelNotFound, Overloaded (with `retry_after_s`), DeadlineExceeded,
Unavailable.
"""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

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

CONNECT_TIMEOUT_S = 5.0
Message = Mapping[str, Any]
Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """An event of a stream. `finish_reason` comes with the last of a choice, `usage` alone at the very end."""

    received_at: float
    """Seconds on time.monotonic's clock."""
    text: str
    index: int = 0
    finish_reason: str | None = None
    usage: Usage | None = None


class Client:
    """The client, blocking. Iterate a stream to its end, or close its generator: that is what ends the work in the cluster."""

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout_s: float = 600.0, ca: Path | None = None) -> None:
        """`api_key`: the environment's `OPENAI_API_KEY` unless given. `timeout_s` bounds each wait for the next piece of an answer. `ca`: a
        PEM file of the authorities that a server at `https://…` is trusted for; the environment's `SSL_CERT_FILE`, or those that all trust,
        unless given."""
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        self._http = httpx.Client(base_url=base_url, timeout=timeout, headers=_headers(api_key), verify=_verification(ca))
        self._model: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """The names of the served models."""
        try:
            response = self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise _connection_failed(self._http.base_url, error) from None
        return _model_names(response)

    def ready(self) -> bool:
        """Whether the cluster takes requests; False also when nobody answers."""
        try:
            return self._http.get("/ready").is_success
        except httpx.HTTPError:
            return False

    def chat(self, messages: Sequence[Message], *, model: str | None = None, **options: Any) -> Iterator[Chunk]:
        """Streams the answer; `options` are the API's other fields. Without `model`, the server's first."""
        yield from self._stream("/v1/chat/completions", model, {"messages": list(messages), **options})

    def complete(self, prompt: Prompt, *, model: str | None = None, **options: Any) -> Iterator[Chunk]:
        """Streams the continuation of a text or of token ids."""
        yield from self._stream("/v1/completions", model, {"prompt": _plain(prompt), **options})

    def _stream(self, path: str, model: str | None, fields: dict[str, Any]) -> Iterator[Chunk]:
        if model is None:
            model = self._model = self._model or self.models()[0]
        events = _Events()
        try:
            with self._http.stream("POST", path, json=_body(model, fields)) as response:
                if not response.is_success:
                    response.read()
                    raise error_of(response)
                for line in response.iter_lines():
                    if (chunk := events.read(line)) is not None:
                        yield chunk
        except httpx.HTTPError as error:
            raise _connection_failed(self._http.base_url, error) from None
        events.check_complete()


class AsyncClient:
    """The same as `Client`, for asyncio."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        max_connections: int | None = None,
        ca: Path | None = None,
    ) -> None:
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        self._http = httpx.AsyncClient(
            base_url=base_url, timeout=timeout, limits=limits, headers=_headers(api_key), verify=_verification(ca)
        )
        self._model: str | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        try:
            response = await self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise _connection_failed(self._http.base_url, error) from None
        return _model_names(response)

    async def ready(self) -> bool:
        try:
            return (await self._http.get("/ready")).is_success
        except httpx.HTTPError:
            return False

    async def chat(self, messages: Sequence[Message], *, model: str | None = None, **options: Any) -> AsyncIterator[Chunk]:
        async for chunk in self._stream("/v1/chat/completions", model, {"messages": list(messages), **options}):
            yield chunk

    async def complete(self, prompt: Prompt, *, model: str | None = None, **options: Any) -> AsyncIterator[Chunk]:
        async for chunk in self._stream("/v1/completions", model, {"prompt": _plain(prompt), **options}):
            yield chunk

    async def _stream(self, path: str, model: str | None, fields: dict[str, Any]) -> AsyncIterator[Chunk]:
        if model is None:
            model = self._model = self._model or (await self.models())[0]
        events = _Events()
        try:
            async with self._http.stream("POST", path, json=_body(model, fields)) as response:
                if not response.is_success:
                    await response.aread()
                    raise error_of(response)
                async for line in response.aiter_lines():
                    if (chunk := events.read(line)) is not None:
                        yield chunk
        except httpx.HTTPError as error:
            raise _connection_failed(self._http.base_url, error) from None
        events.check_complete()


class _Events:
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
        text = choice["text"] if "text" in choice else choice["delta"].get("content")
        return Chunk(received_at, text or "", choice["index"], choice["finish_reason"], usage)

    def check_complete(self) -> None:
        if not self._complete:
            raise Unavailable("the stream ended before it was complete", code="cut_off")


def error_of(response: httpx.Response) -> SpringtideError:
    """The error that a response with a status of 400 or more stands for."""
    try:
        return _typed_error(response.status_code, response.json()["error"], response.headers.get("retry-after"))
    except (ValueError, KeyError, TypeError):
        return Unavailable(f"{response.url} answered {response.status_code}: {response.text[:500]}", code=str(response.status_code))


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


def _headers(api_key: str | None) -> dict[str, str]:
    key = api_key or os.environ.get("OPENAI_API_KEY")
    return {"authorization": f"Bearer {key}"} if key else {}


def _verification(ca: Path | None) -> ssl.SSLContext | bool:
    """How the server's certificate is verified."""
    if ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ConfigError(f"{ca} is no PEM file of certificate authorities: {error}") from None


def _connection_failed(base_url: httpx.URL, error: httpx.HTTPError) -> Unavailable:
    return Unavailable(f"the connection to {base_url} failed: {str(error) or type(error).__name__}", code="connection_failed")


def _model_names(response: httpx.Response) -> list[str]:
    if not response.is_success:
        raise error_of(response)
    return [model["id"] for model in response.json()["data"]]


def _body(model: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, **fields, "stream": True, "stream_options": {"include_usage": True}}


def _plain(prompt: Prompt) -> str | list[int]:
    return prompt if isinstance(prompt, str) else list(prompt)


def _usage(usage: Mapping[str, Any] | None) -> Usage | None:
    if usage is None:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens") or 0)
