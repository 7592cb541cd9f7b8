"""Sends requests over HTTP and writes down all that comes back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable

import httpx

from tests.chaos.apis import DIALECTS, DONE, Dialect, Told
from tests.chaos.history import Exchange
from tests.chaos.workload import Item, acts

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
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)  # the others are not in a gateway's files when it is calm
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
            await self._look_up(exchange)
        except TimeoutError:
            exchange.broken = f"not ended after {self._end_s:g} s"
        except httpx.HTTPError as error:
            exchange.broken = f"{type(error).__name__}: {error}".rstrip(": ")
            exchange.ended_s = self._clock()
        return exchange

    async def _look_up(self, exchange: Exchange) -> None:
        """What was stored, through another gateway if there is one."""
        if exchange.stored_as is None:
            return
        gateway = max(self._urls, key=lambda name: name != exchange.gateway)
        dialect = DIALECTS[exchange.item.api]
        with contextlib.suppress(httpx.HTTPError):
            response = await self._http.get(f"{self._urls[gateway]}{dialect.path}/{exchange.stored_as}")
            exchange.looked_up_s = self._clock()
            if response.status_code == httpx.codes.NOT_FOUND:
                exchange.not_kept = "nothing"
            elif response.status_code == httpx.codes.OK:
                said, kept = (
                    "".join(piece.text for piece in pieces)
                    for pieces in (exchange.pieces, dialect.whole(response.json(), exchange.looked_up_s).pieces)
                )
                exchange.not_kept = None if kept == said else repr(kept)

    async def _send(self, exchange: Exchange) -> None:
        dialect = DIALECTS[exchange.item.api]
        url = f"{self._urls[exchange.gateway]}{dialect.path}"
        async with self._http.stream("POST", url, json=dialect.body(exchange.item)) as response:
            exchange.status = response.status_code
            exchange.retry_after = response.headers.get("retry-after")
            exchange.request_id = next((response.headers[name] for name in _IDS if name in response.headers), None)
            if response.status_code == httpx.codes.OK and exchange.item.stream:
                await self._read_events(exchange, dialect, response)
                return
            body = json.loads(await response.aread())
            if body.get("error"):
                exchange.errors.append(dialect.error(body["error"]))
                exchange.request_id = exchange.request_id or body["error"].get("request_id")
            else:
                _take(exchange, dialect.whole(body, self._clock()))

    async def _read_events(self, exchange: Exchange, dialect: Dialect, response: httpx.Response) -> None:
        events = 0
        async for line in _lines(response):
            if not line.startswith(_DATA):
                continue
            if exchange.dones or exchange.errors:
                exchange.after_the_end += 1
            if line == f"{_DATA}{DONE}":
                exchange.dones += 1
                continue
            event = json.loads(line.removeprefix(_DATA))
            _take(exchange, Told(error=dialect.error(event["error"])) if "error" in event else dialect.event(event, self._clock()))
            events += 1
            if exchange.abort_after is not None and events > exchange.abort_after:
                exchange.aborted = True
                return
        if dialect.ends_by_closing and not exchange.errors:
            exchange.dones += 1


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Of a stream of events. httpx would end them at U+0085 and U+2028 too, which may be in what is said."""
    begun = b""
    async for received in response.aiter_bytes():
        *whole, begun = (begun + received).split(b"\n")
        for line in whole:
            yield line.decode().removesuffix("\r")


def _take(exchange: Exchange, told: Told) -> None:
    exchange.pieces += told.pieces
    exchange.dones += told.end
    exchange.stored_as = exchange.stored_as or told.stored_as
    if told.completion_tokens is not None:
        exchange.completion_tokens = told.completion_tokens
    if told.error is not None:
        exchange.errors.append(told.error)
