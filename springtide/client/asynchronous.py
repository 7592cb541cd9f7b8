"""The client, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
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
        retries: Retries = DEFAULT_RETRIES,
    ) -> None:
        """`api_key`: the environment's `OPENAI_API_KEY` unless given. `timeout_s` bounds each wait for the next piece of an answer. `ca`: a
        PEM file of the authorities that a server at `https://…` is trusted for; the environment's `SSL_CERT_FILE`, or those that all trust,
        unless given. `retries`: of what is refused for load or cannot be reached."""
        timeout = httpx.Timeout(timeout_s, connect=calls.CONNECT_TIMEOUT_S)
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        self._http = httpx.AsyncClient(
            base_url=base_url, timeout=timeout, limits=limits, headers=calls.headers(api_key), verify=calls.verification(ca)
        )
        self._retries = retries
        self._model: str | None = None
        self.caches = AsyncCaches(self)
        self.batches = AsyncBatches(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        """The names of the served models."""
        return await self.call(calls.models())

    async def ready(self) -> bool:
        """Whether the cluster takes requests; False also when nobody answers."""
        try:
            return (await self._http.get("/ready")).is_success
        except httpx.HTTPError:
            return False

    async def answer(self, messages: Sequence[Message], *, model: str | None = None, **options: Any) -> Answer:
        """The whole answer; `options` are the API's other fields. Without `model`, the server's first."""
        return await self.call(calls.answer(await self.model(model), messages, options))

    async def chat(self, messages: Sequence[Message], *, model: str | None = None, **options: Any) -> AsyncIterator[Chunk]:
        """Streams the answer."""
        async for chunk in self._stream(calls.CHAT, model, {"messages": list(messages), **options}):
            yield chunk

    async def complete(self, prompt: Prompt, *, model: str | None = None, **options: Any) -> AsyncIterator[Chunk]:
        """Streams the continuation of a text or of token ids."""
        async for chunk in self._stream(calls.COMPLETIONS, model, {"prompt": calls.plain(prompt), **options}):
            yield chunk

    async def model(self, name: str | None = None) -> str:
        """`name`, or the server's first model."""
        if name is None:
            name = self._model = self._model or (await self.models())[0]
        return name

    async def call(self, call: Call[T]) -> T:
        """What comes of it, with as many tries as it takes and may take."""
        tried = 0
        while True:
            tried += 1
            try:
                return call.result(await self._http.request(call.method, call.path, **call.options()))
            except httpx.HTTPError as failure:
                error: SpringtideError = calls.connection_failed(self._http.base_url, failure)
            except SpringtideError as refused:
                error = refused
            pause_s = self._retries.pause_s(tried, error, repeatable=call.repeatable)
            if pause_s is None:
                raise error
            await asyncio.sleep(pause_s)

    async def _stream(self, path: str, model: str | None, fields: dict[str, Any]) -> AsyncIterator[Chunk]:
        """Tried again for as long as nothing of it has come."""
        body = calls.stream_body(await self.model(model), fields)
        tried, begun = 0, False
        while True:
            tried += 1
            events = Events()
            try:
                async with self._http.stream("POST", path, json=body) as response:
                    if not response.is_success:
                        await response.aread()
                        raise calls.error_of(response)
                    lines = Lines()
                    async for data in response.aiter_bytes():
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
            await asyncio.sleep(pause_s)


class AsyncCaches:
    """Contexts that are kept."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def create(
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
        return await self._client.call(calls.create_cache(await self._client.model(model), messages, tools, ttl_s, name, metadata or {}))

    async def get(self, cache_id: str) -> Cache:
        return await self._client.call(calls.get_cache(cache_id))

    async def list(self, *, limit: int = 20, after: str = "") -> list[Cache]:
        """The newest first."""
        return await self._client.call(calls.list_caches(limit, after))

    async def extend(self, cache_id: str, ttl_s: int) -> Cache:
        """It is kept for so long from now; one that has expired is computed anew."""
        return await self._client.call(calls.extend_cache(cache_id, ttl_s))

    async def delete(self, cache_id: str) -> bool:
        return await self._client.call(calls.delete_cache(cache_id))

    async def tag(self, tag: str, cache_id: str) -> str:
        """`tag` stands for this cache from now on."""
        return await self._client.call(calls.tag_cache(tag, cache_id))

    async def tagged(self, tag: str) -> Cache:
        return await self._client.call(calls.tagged_cache(tag))

    async def untag(self, tag: str) -> bool:
        return await self._client.call(calls.untag_cache(tag))

    async def wait(self, cache_id: str, *, timeout_s: float = 600.0, every_s: float = 0.5) -> Cache:
        """The cache when it is no longer pending. Raises Unavailable when that takes longer."""
        for _ in range(max(1, round(timeout_s / every_s))):
            cache = await self.get(cache_id)
            if cache.status != "pending":
                return cache
            await asyncio.sleep(every_s)
        raise Unavailable(f"cache {cache_id} is still pending after {timeout_s:.0f} s", code="timeout")


class AsyncBatches:
    """Requests that are answered in idle capacity."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def create(
        self,
        requests: Iterable[BatchRequest],
        *,
        endpoint: str = calls.CHAT,
        window: str = "24h",
        metadata: Mapping[str, str] | None = None,
    ) -> Batch:
        """Uploads the requests and begins them."""
        file_id = await self._client.call(calls.upload_batch(requests, endpoint))
        return await self._client.call(calls.create_batch(file_id, endpoint, window, metadata or {}))

    async def get(self, batch_id: str) -> Batch:
        return await self._client.call(calls.get_batch(batch_id))

    async def list(self, *, limit: int = 20, after: str = "") -> list[Batch]:
        """The newest first."""
        return await self._client.call(calls.list_batches(limit, after))

    async def cancel(self, batch_id: str) -> Batch:
        return await self._client.call(calls.cancel_batch(batch_id))

    async def results(self, batch: Batch) -> dict[str, BatchResult]:
        """What has come of its requests, failed ones included, by their `custom_id`."""
        results: dict[str, BatchResult] = {}
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id:
                results |= {result.custom_id: result for result in await self._client.call(calls.batch_results(file_id))}
        return results

    async def wait(self, batch_id: str, *, timeout_s: float = 86400.0, every_s: float = 1.0) -> Batch:
        """The batch when it is over. Raises Unavailable when that takes longer."""
        for _ in range(max(1, round(timeout_s / every_s))):
            batch = await self.get(batch_id)
            if batch.over:
                return batch
            await asyncio.sleep(every_s)
        raise Unavailable(f"batch {batch_id} is not over after {timeout_s:.0f} s", code="timeout")
