"""Sends requests over HTTP and writes down all that comes back."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from tests.chaos.history import Exchange, Piece, Token
from tests.chaos.workload import Item, acts

MODEL = "tiny"
RETRY_S = 1.0
"""Before the next request when nobody answered the last one."""
_DATA = "data: "
_IDS = ("x-request-id", "request-id")


class Clients:
    """`urls` are those of the gateways, by name; `clock` tells seconds since the run began."""

    def __init__(self, urls: dict[str, str], clock: Callable[[], float], end_s: float) -> None:
        self._urls = urls
        self._clock = clock
        self._end_s = end_s
        self._numbers = itertools.count(1)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(end_s, connect=10.0), limits=limits, trust_env=False)
        self.exchanges: list[Exchange] = []

    async def close(self) -> None:
        await self._http.aclose()

    async def run(self, name: str, seed: int, number: int, items: tuple[Item, ...], over: asyncio.Event) -> None:
        """One client, until it is over and its last requests have ended."""
        gateways = itertools.cycle(sorted(self._urls)[number % len(self._urls) :] + sorted(self._urls)[: number % len(self._urls)])
        for act in acts(seed, number, items):
            if over.is_set():
                return
            gateway = next(gateways)
            sent = [self.send(name, gateway, item, act.abort_after) for item in act.items]
            ended = await asyncio.gather(*sent)
            unanswered = any(exchange.status is None for exchange in ended)
            await asyncio.sleep(max(act.think_s, RETRY_S if unanswered else 0.0))

    async def send(self, client: str, gateway: str, item: Item, abort_after: int | None = None) -> Exchange:
        """To the end, or until `end_s` have passed: then it is written down as unended."""
        exchange = Exchange(next(self._numbers), client, item, gateway, self._clock(), abort_after if item.stream else None)
        self.exchanges.append(exchange)
        try:
            async with asyncio.timeout(self._end_s):
                await self._send(exchange)
            exchange.ended_s = self._clock()
        except TimeoutError:
            exchange.broken = f"not ended after {self._end_s:g} s"
        except httpx.HTTPError as error:
            exchange.broken = f"{type(error).__name__}: {error}".rstrip(": ")
            exchange.ended_s = self._clock()
        return exchange

    async def _send(self, exchange: Exchange) -> None:
        url = f"{self._urls[exchange.gateway]}/v1/{exchange.item.api}"
        async with self._http.stream("POST", url, json={"model": MODEL, **exchange.item.body}) as response:
            exchange.status = response.status_code
            exchange.retry_after = response.headers.get("retry-after")
            exchange.request_id = next((response.headers[name] for name in _IDS if name in response.headers), None)
            if response.status_code == httpx.codes.OK and exchange.item.stream:
                await self._read_events(exchange, response)
                return
            body = json.loads(await response.aread())
            if "error" in body:
                exchange.errors.append(body["error"])
                exchange.request_id = exchange.request_id or body["error"].get("request_id")
            else:
                self._take(exchange, body)
                exchange.dones += 1

    async def _read_events(self, exchange: Exchange, response: httpx.Response) -> None:
        events = 0
        async for line in response.aiter_lines():
            if not line.startswith(_DATA):
                continue
            if exchange.dones or exchange.errors:
                exchange.after_the_end += 1
            if line == f"{_DATA}[DONE]":
                exchange.dones += 1
                continue
            event = json.loads(line.removeprefix(_DATA))
            if "error" in event:
                exchange.errors.append(event["error"])
            else:
                self._take(exchange, event)
            events += 1
            if exchange.abort_after is not None and events > exchange.abort_after:
                exchange.aborted = True
                return

    def _take(self, exchange: Exchange, event: dict[str, Any]) -> None:
        now = self._clock()
        exchange.request_id = exchange.request_id or event.get("id")
        if event.get("usage"):
            exchange.completion_tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            part = choice.get("delta") or choice.get("message") or choice
            text = part.get("text", part.get("content")) or ""
            exchange.pieces.append(Piece(now, choice["index"], text, tuple(_tokens(choice.get("logprobs"))), choice["finish_reason"]))


def _tokens(logprobs: dict[str, Any] | None) -> Iterator[Token]:
    """Of either API's shape."""
    if not logprobs:
        return
    if "content" in logprobs:
        for entry in logprobs["content"] or ():
            yield entry["token"], entry["logprob"]
    else:
        yield from zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
