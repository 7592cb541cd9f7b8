"""The console's routes: the page, which is open to everybody, and what it shows, which is not."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from gateway.accounts.allowance import Caller
from gateway.caching.context import ContextCache
from gateway.conductor_link import ConductorLink
from gateway.console.feed import Feed
from gateway.console.logs import lines_about
from gateway.console.picture import Viewer, estimate_row
from gateway.exchange import EVENT_STREAM
from springtide.errors import InvalidRequest
from springtide.protocol.observation import Explain, ExplainedDecision

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
_ID = re.compile(r"[\w./:-]{8,256}", re.ASCII)


class OperatorsOnly(InvalidRequest):
    """It is not this caller's to see."""

    http_status = 403


class UnknownRequest(InvalidRequest):
    http_status = 404


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the page."""

    content: bytes
    media_type: str
    etag: str


def assets() -> dict[str, Asset]:
    """The page's files by their names, as they are in this package."""
    found = {}
    for file in files("gateway.console").joinpath("assets").iterdir():
        content = file.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
        found[file.name] = Asset(content, MEDIA_TYPES[file.name.rpartition(".")[2]], etag)
    return found


ASSETS = assets()
OPEN = frozenset(("/console", *(f"/console/{name}" for name in ASSETS)))
"""Paths that anybody may ask for: they hold no data."""


class Console:
    """All that its routes need."""

    def __init__(
        self,
        conductor: ConductorLink,
        caches: Callable[[int, int], Awaitable[Sequence[ContextCache]]],
        logs: Path,
    ) -> None:
        self.feed = Feed(conductor.observe, caches)
        self._conductor = conductor
        self._logs = logs
        self._reading = asyncio.Lock()

    async def explained(self, viewer: Viewer, wanted: str) -> dict[str, Any]:
        """The decisions about a request. Raises UnknownRequest."""
        explanation = await self._conductor.explain(Explain(wanted))
        found = [entry for entry in explanation.decisions if viewer.sees(entry.decision.tenant)]
        if not found:
            raise UnknownRequest(
                f"no decision about {wanted!r} is remembered: there are the latest thousand, since the Conductor that leads has led",
                param="request",
                code="not_found",
            )
        return {"request": wanted, "decisions": list(map(self._explained, found))}

    async def logged(self, viewer: Viewer, wanted: str) -> dict[str, Any]:
        """Lines about a request. Raises OperatorsOnly."""
        if not viewer.operator:
            raise OperatorsOnly("logs are for operators: they may name what is others'", code="operators_only")
        async with self._reading:
            lines = await asyncio.to_thread(lines_about, self._logs, wanted)
        return {"request": wanted, "directory": str(self._logs), "found": self._logs.is_dir(), "lines": list(map(asdict, lines))}

    def _explained(self, entry: ExplainedDecision) -> dict[str, Any]:
        return {
            "attempt": entry.decision.attempt_id,
            "decision": self.feed.picture.decision(entry.decision),
            "ttft_slo_ms": entry.ttft_slo_ms,
            "tbt_slo_ms": entry.tbt_slo_ms,
            "policy": entry.policy,
            "admission": entry.admission,
            "num_prefills": entry.num_prefills,
            "num_decodes": entry.num_decodes,
            "prefills": list(map(estimate_row, entry.prefills)),
            "decodes": list(map(estimate_row, entry.decodes)),
            "inlines": list(map(estimate_row, entry.inlines)),
        }


def routes(console: Console) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/console/state")
    async def state(request: Request) -> Response:
        return Response(await console.feed.state(_viewer(request)), media_type="application/json", headers=HEADERS)

    @router.get("/console/events")
    async def events(request: Request) -> Response:
        stream = console.feed.events(_viewer(request))
        first = await anext(stream)  # a refusal is an answer of its own
        headers = {**HEADERS, "x-accel-buffering": "no"}
        return StreamingResponse(_after(first, stream), media_type=EVENT_STREAM, headers=headers)

    @router.get("/console/explain")
    async def explain(request: Request) -> Response:
        return JSONResponse(await console.explained(_viewer(request), _wanted(request)), headers=HEADERS)

    @router.get("/console/logs")
    async def logs(request: Request) -> Response:
        return JSONResponse(await console.logged(_viewer(request), _wanted(request)), headers=HEADERS)

    @router.get("/console")
    async def page(request: Request) -> Response:
        return _sent(ASSETS["index.html"], request)

    @router.get("/console/{name}")
    async def asset(name: str, request: Request) -> Response:
        if name not in ASSETS:
            raise UnknownRequest(f"there is no {request.url.path}", code="not_found")
        return _sent(ASSETS[name], request)

    return router


def _viewer(request: Request) -> Viewer:
    caller: Caller = request.state.caller
    return Viewer(caller.tenant, caller.operator)


def _wanted(request: Request) -> str:
    wanted = request.query_params.get("request", "")
    if not _ID.fullmatch(wanted):
        raise InvalidRequest(f"request: {wanted!r} is no request's id", param="request")
    return wanted


def _sent(asset: Asset, request: Request) -> Response:
    headers = {**HEADERS, "etag": asset.etag}
    if request.headers.get("if-none-match") == asset.etag:
        return Response(status_code=304, headers=headers)
    return Response(asset.content, media_type=asset.media_type, headers=headers)


async def _after(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with aclosing(rest):
        yield first
        async for event in rest:
            yield event
