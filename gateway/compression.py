"""Whole answers over HTTP, compressed for clients that accept it. Streams go out as they come."""

from __future__ import annotations

import functools
import gzip

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.bodies import SideThread

MIN_BYTES = 4096
_LEVEL = 1
"""Fast; JSON of token ids and log-probabilities still becomes a fifth."""


class Gzip:
    """ASGI middleware. It compresses what is sent in one piece, beside the event loop; of a stream it touches nothing."""

    def __init__(self, app: ASGIApp, side_thread: SideThread) -> None:
        self._app = app
        self._side_thread = side_thread

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and accepts_gzip(Headers(scope=scope).get("accept-encoding", "")):
            await self._app(scope, receive, _Sender(send, self._side_thread).send)
        else:
            await self._app(scope, receive, send)


class _Sender:
    """Holds an answer's head back until it is known whether its body is one piece."""

    def __init__(self, send: Send, side_thread: SideThread) -> None:
        self._send = send
        self._side_thread = side_thread
        self._head: Message | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and "content-length" in Headers(raw=message["headers"]):
            self._head = message
            return
        if self._head is not None:
            head, self._head = self._head, None
            body = message.get("body", b"")
            headers = MutableHeaders(raw=head["headers"])
            if not message.get("more_body") and len(body) >= MIN_BYTES and "content-encoding" not in headers:
                body = await self._side_thread.run(len(body), functools.partial(gzip.compress, compresslevel=_LEVEL), body)
                headers["content-encoding"] = "gzip"
                headers["content-length"] = str(len(body))
                headers.add_vary_header("Accept-Encoding")
                message = {**message, "body": body}
            await self._send(head)
        await self._send(message)


def accepts_gzip(accepted: str) -> bool:
    """Whether an `Accept-Encoding` header names gzip, and not as refused."""
    for part in accepted.split(","):
        name, _, weight = part.partition(";")
        if name.strip().lower() == "gzip":
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
