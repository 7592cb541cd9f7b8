"""The client, blocking."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from springtide.client import calls
from springtide.client.calls import Call, Events, Lines
from springtide.client.retries import DEFAULT_RETRIES, Retries
from springtide.client.words import Answer, Batch, BatchRequest, BatchResult, Cache, Chunk, Message, Prompt
from springtide.errors import SpringtideError, Unavailable

T = TypeVar("T")


class Client:
    """The client, blocking. Iterate a stream to its end, or close its generator: that is what ends the work in the cluster."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        ca: Path | None = None,
        retries: Retries = DEFAULT_RETRIES,
    ) -> None:
        """`api_key`: the environment's `OPENAI_API_KEY` unless given. `timeout_s` bounds each wait for the next piece of an answer. `ca`: a
        PEM file of the authorities that a server at `https://…` is trusted for; the environment's `SSL_CERT_FILE`, or those that all trust,
        unless given. `retries`: of what is refused for load or cannot be reached."""
        timeout = httpx.Timeout(timeout_s, connect=calls.CONNECT_TIMEOUT_S)
        self._http = httpx.Client(base_url=base_url, timeout=timeout, headers=calls.headers(api_key), verify=calls.verification(ca))
        self._retries = retries
        self._model: str | None = None
        self.caches = Caches(self)
        self.batches = Batches(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """The names of the served models."""
        return self.call(calls.models())

    def ready(self) -> bool:
        """Whether the cluster takes requests; False also when nobody answers."""
        try:
            return (self._http.get("/ready")).is_success
        except httpx.HTTPError:
            return False

    def answer(self, messages: Sequence[Message], *, model: str | None = None, **options: Any) -> Answer:
        """The whole answer; `options` are the API's other fields. Without `model`, the server's first."""
        return self.call(calls.answer(self.model(model), messages, options))

    def chat(self, messages: Sequence[Message], *, model: str | None = None, **options: Any) -> Iterator[Chunk]:
        """Streams the answer."""
        yield from self._stream(calls.CHAT, model, {"messages": list(messages), **options})

    def complete(self, prompt: Prompt, *, model: str | None = None, **options: Any) -> Iterator[Chunk]:
        """Streams the continuation of a text or of token ids."""
        yield from self._stream(calls.COMPLETIONS, model, {"prompt": calls.plain(prompt), **options})

    def model(self, name: str | None = None) -> str:
        """`name`, or the server's first model."""
        if name is None:
            name = self._model = self._model or (self.models())[0]
        return name

    def call(self, call: Call[T]) -> T:
        """What comes of it, with as many tries as it takes and may take."""
        tried = 0
        while True:
            tried += 1
            try:
                return call.result(self._http.request(call.method, call.path, **call.options()))
            except httpx.HTTPError as failure:
                error: SpringtideError = calls.connection_failed(self._http.base_url, failure)
            except SpringtideError as refused:
                error = refused
            pause_s = self._retries.pause_s(tried, error, repeatable=call.repeatable)
            if pause_s is None:
                raise error
            time.sleep(pause_s)

    def _stream(self, path: str, model: str | None, fields: dict[str, Any]) -> Iterator[Chunk]:
        """Tried again for as long as nothing of it has come."""
        body = calls.stream_body(self.model(model), fields)
        tried, begun = 0, False
        while True:
            tried += 1
            events = Events()
            try:
                with self._http.stream("POST", path, json=body) as response:
                    if not response.is_success:
                        response.read()
                        raise calls.error_of(response)
                    lines = Lines()
                    for data in response.iter_bytes():
                        for line in lines.push(data):
                            if (chunk := events.read(line)) is not None:
                                begun = True
                                yield chunk
                events.check_complete()
                return
            except httpx.HTTPError as failure:
                error: SpringtideError = calls.connection_failed(self._http.base_url, failure)
            except SpringtideError as refused:
                error = refused
            pause_s = None if begun else self._retries.pause_s(tried, error, repeatable=True)
            if pause_s is None:
                raise error
            time.sleep(pause_s)


class Caches:
    """Contexts that are kept."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def create(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] = (),
        ttl_s: int = 3600,
        name: str = "",
        metadata: Mapping[str, str] | None = None,
        model: str | None = None,
    ) -> Cache:
        """The cache, pending until it is computed (`wait`)."""
        return self._client.call(calls.create_cache(self._client.model(model), messages, tools, ttl_s, name, metadata or {}))

    def get(self, cache_id: str) -> Cache:
        return self._client.call(calls.get_cache(cache_id))

    def list(self, *, limit: int = 20, after: str = "") -> list[Cache]:
        """The newest first."""
        return self._client.call(calls.list_caches(limit, after))

    def extend(self, cache_id: str, ttl_s: int) -> Cache:
        """It is kept for so long from now; one that has expired is computed anew."""
        return self._client.call(calls.extend_cache(cache_id, ttl_s))

    def delete(self, cache_id: str) -> bool:
        return self._client.call(calls.delete_cache(cache_id))

    def tag(self, tag: str, cache_id: str) -> str:
        """`tag` stands for this cache from now on."""
        return self._client.call(calls.tag_cache(tag, cache_id))

    def tagged(self, tag: str) -> Cache:
        return self._client.call(calls.tagged_cache(tag))

    def untag(self, tag: str) -> bool:
        return self._client.call(calls.untag_cache(tag))

    def wait(self, cache_id: str, *, timeout_s: float = 600.0, every_s: float = 0.5) -> Cache:
        """The cache when it is no longer pending. Raises Unavailable when that takes longer."""
        for _ in range(max(1, round(timeout_s / every_s))):
            cache = self.get(cache_id)
            if cache.status != "pending":
                return cache
            time.sleep(every_s)
        raise Unavailable(f"cache {cache_id} is still pending after {timeout_s:.0f} s", code="timeout")


class Batches:
    """Requests that are answered in idle capacity."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def create(
        self,
        requests: Iterable[BatchRequest],
        *,
        endpoint: str = calls.CHAT,
        window: str = "24h",
        metadata: Mapping[str, str] | None = None,
    ) -> Batch:
        """Uploads the requests and begins them."""
        file_id = self._client.call(calls.upload_batch(requests, endpoint))
        return self._client.call(calls.create_batch(file_id, endpoint, window, metadata or {}))

    def get(self, batch_id: str) -> Batch:
        return self._client.call(calls.get_batch(batch_id))

    def list(self, *, limit: int = 20, after: str = "") -> list[Batch]:
        """The newest first."""
        return self._client.call(calls.list_batches(limit, after))

    def cancel(self, batch_id: str) -> Batch:
        return self._client.call(calls.cancel_batch(batch_id))

    def results(self, batch: Batch) -> dict[str, BatchResult]:
        """What has come of its requests, failed ones included, by their `custom_id`."""
        results: dict[str, BatchResult] = {}
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id:
                results |= {result.custom_id: result for result in self._client.call(calls.batch_results(file_id))}
        return results

    def wait(self, batch_id: str, *, timeout_s: float = 86400.0, every_s: float = 1.0) -> Batch:
        """The batch when it is over. Raises Unavailable when that takes longer."""
        for _ in range(max(1, round(timeout_s / every_s))):
            batch = self.get(batch_id)
            if batch.over:
                return batch
            time.sleep(every_s)
        raise Unavailable(f"batch {batch_id} is not over after {timeout_s:.0f} s", code="timeout")
