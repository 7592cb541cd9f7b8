"""Notifications over a stream, in their order: each a length (u32) and so many bytes, answered by one byte once the handler has had it
(docs/wire.md)."""

from __future__ import annotations

import asyncio
import json
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from typing import Any

from messenger.base import Completion, Identity, InvalidSlice, NotifyHandler, TransferTimeout
from messenger.ordering import TicketLock, deliver
from messenger.stream import SocketStream
from springtide.errors import PeerLost

MAX_NOTIFY_BYTES = 1 << 20
ASK_AFTER_S = 0.4
"""The sender asks whether anybody is there when an answer takes longer."""
_LENGTH = struct.Struct("<I")
_ACKNOWLEDGED = b"\x06"


def frame(payload: bytes) -> bytes:
    """The payload as it goes over a stream."""
    return _LENGTH.pack(len(payload)) + payload


def introduction(identity: Identity) -> bytes:
    """The first message of a process that attaches to an arena."""
    return frame(json.dumps(asdict(identity)).encode())


async def receive_identity(stream: SocketStream) -> Identity:
    """The identity in an introduction. Raises as receive_frame, and ConnectionError for what is no introduction."""
    try:
        return Identity(**json.loads(await receive_frame(stream)))
    except (ValueError, TypeError) as error:
        raise ConnectionError(f"not an identity: {error}") from error


async def receive_frame(stream: SocketStream) -> bytes:
    """The payload of the next frame. Raises PeerClosed between two frames, ConnectionError within one and when it is too long."""
    (length,) = _LENGTH.unpack(await stream.receive(_LENGTH.size))
    if length > MAX_NOTIFY_BYTES:
        raise ConnectionError(f"a message of {length} bytes, more than {MAX_NOTIFY_BYTES}")
    return await stream.receive(length)


async def serve_notices(stream: SocketStream, peer: str, on_notify: NotifyHandler) -> None:
    """Receives and acknowledges notifications, for ever. Raises PeerClosed when the peer ends the stream, ConnectionError when it breaks
    off."""
    while True:
        payload = await receive_frame(stream)
        deliver(on_notify, peer, payload)
        await stream.send(_ACKNOWLEDGED)


class NoticeSender:
    """The sending side of one connection. It owns its stream, and notices when the peer goes."""

    def __init__(
        self, stream: SocketStream, peer: str, on_lost: Callable[[PeerLost], None], check: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """`on_lost` is called when the stream breaks. `check` is run while the peer is silent, one at a time; it calls `fail` if that is
        lost, and ends soon after `fail`."""
        self._stream = stream
        self._peer = peer
        self._on_lost = on_lost
        self._check = check
        self._lost: PeerLost | None = None
        self._unsent: deque[bytes] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._answers: deque[asyncio.Future[None]] = deque()
        self._turns = TicketLock()
        self._watching = asyncio.create_task(self._watch(), name=f"answers of {peer}")

    async def after(self, write: Callable[[float], Awaitable[Completion]], payload: bytes, timeout_s: float, what: str) -> Completion:
        """Does `write` (given its timeout), then sends `payload` if no slice failed, in the order in which this was called. Raises what
        `write` raises, InvalidSlice, PeerLost, TransferTimeout."""
        check_length(payload)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        async with self._turns.take() as come:
            completion = await write(timeout_s)
            try:
                async with asyncio.timeout_at(deadline):
                    await come()
                    if not completion.failed:
                        await self._send(payload)
            except TimeoutError as error:
                raise TransferTimeout(f"{what} took longer than {timeout_s:g} s to be acknowledged") from error
            return completion

    def fail(self, error: PeerLost) -> None:
        """Gives the error to everybody who waits for an answer. Idempotent."""
        if self._lost is not None:
            return
        self._lost = error
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # whoever waited may be gone
        self._stream.close()

    async def close(self) -> None:
        """Waits, after `fail`, for the tasks of this sender."""
        tasks = (self._watching, self._sending, self._checking)
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)

    async def _send(self, payload: bytes) -> None:
        """Sends one notification, and returns when the peer's handler has had it. A cancelled one may still be delivered."""
        if self._lost is not None:
            raise self._lost
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        self._unsent.append(frame(payload))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_unsent(), name=f"notifications to {self._peer}")
        while not answer.done():
            await asyncio.wait((answer,), timeout=ASK_AFTER_S)
            if not answer.done():
                await asyncio.wait((answer, self._ask()), return_when=asyncio.FIRST_COMPLETED)
        answer.result()

    def _ask(self) -> asyncio.Task[None]:
        """The check that is in flight. It outlives those who wait for it: what they have a deadline for is the answer."""
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check(), name=f"is {self._peer} there")
        return self._checking

    async def _send_unsent(self) -> None:
        """Sends what is queued, in a task of its own: whoever asked may be cancelled, and a frame is sent whole."""
        try:
            while self._unsent:
                await self._stream.send(self._unsent.popleft())
        except OSError as error:
            self._on_lost(PeerLost(f"lost {self._peer}: {error}"))

    async def _watch(self) -> None:
        try:
            while True:
                await self._stream.receive(len(_ACKNOWLEDGED))
                if not self._answers:
                    raise ConnectionError("it acknowledged a notification that was not sent")
                answer = self._answers.popleft()
                if not answer.done():
                    answer.set_result(None)
        except OSError as error:
            self._on_lost(PeerLost(f"lost {self._peer}: {error}"))


def check_length(payload: bytes) -> None:
    """Raises InvalidSlice for a notification that is too long."""
    if len(payload) > MAX_NOTIFY_BYTES:
        raise InvalidSlice(f"a notification of {len(payload)} bytes, more than {MAX_NOTIFY_BYTES}")
