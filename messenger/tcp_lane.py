"""The caller's end of a tcp lane: requests go out one after the other, a task takes in the answers in the same order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from messenger.base import Identity
from messenger.stream import Stream, Vector
from messenger.tcp_protocol import HEADER_BYTES, WELCOME_BYTES, Header, Hello, Op, ProtocolError, Verdict, Welcome
from springtide.errors import PeerLost


@dataclass(frozen=True, slots=True)
class _Pending:
    header: Header
    into: Sequence[memoryview]
    """READ: where the slices go."""
    answer: asyncio.Future[np.ndarray]
    """Which slices were refused, bool [count]."""


class Lane:
    """One TCP connection to a peer. When it breaks, `on_lost` is called once and every request on it raises PeerLost."""

    def __init__(self, stream: Stream, peer: str, on_lost: Callable[[PeerLost], None]) -> None:
        self._stream = stream
        self._peer = peer
        self._on_lost = on_lost
        self._lost: PeerLost | None = None
        self._pending: deque[_Pending] = deque()
        self._sending = asyncio.Lock()
        self._answers = asyncio.create_task(self._take_answers(), name=f"answers of {peer}")

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    async def request(self, op: Op, table: np.ndarray, data: Sequence[memoryview] = (), into: Sequence[memoryview] = ()) -> np.ndarray:
        """Sends a request with `data` behind it; the answer's bytes go to `into`. Returns which slices were refused, bool [count]."""
        header = Header(op, len(table), sum(map(len, data)))
        answer: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(_mark_retrieved)
        try:
            async with self._sending:
                if self._lost is not None:
                    raise self._lost
                self._pending.append(_Pending(header, into, answer))
                await self._stream.send(Vector([memoryview(header.pack() + table.tobytes()), *data]))
        except OSError as error:
            self.fail(PeerLost(f"lost {self._peer}: {error}"))
        return await answer

    def fail(self, error: PeerLost) -> None:
        """Stops all traffic at once, so that the memory of every request is at rest when its answer raises; the peer is told by the end
        of the stream."""
        if self._lost is not None:
            return
        self._lost = error
        self._answers.cancel()
        self._stream.finish_sending()
        for pending in self._pending:
            if not pending.answer.done():
                pending.answer.set_exception(error)
        self._on_lost(error)

    async def close(self, grace_s: float) -> None:
        """After `fail`: waits until the peer has taken what was sent and closed its end, `grace_s` at most."""
        await asyncio.wait((self._answers,))
        try:
            async with asyncio.timeout(grace_s):
                await self._stream.drain()
        except TimeoutError:
            self._stream.discard_unsent()
        self._stream.close()

    async def _take_answers(self) -> None:
        try:
            while True:
                await self._take_answer()
        except (OSError, ProtocolError) as error:
            self.fail(PeerLost(f"lost {self._peer}: {error}"))

    async def _take_answer(self) -> None:
        header = Header.unpack(await self._stream.receive(HEADER_BYTES))
        if not self._pending:
            raise ProtocolError(f"an answer to {header.op.name} that nobody asked for")
        pending = self._pending[0]
        if (header.op, header.count) != (pending.header.op, pending.header.count):
            raise ProtocolError(f"an answer to {header.op.name} of {header.count} slices, not {pending.header}")
        refused = await self._verdicts(header.count)
        if header.op is Op.READ:
            into = [view for view, no in zip(pending.into, refused.tolist(), strict=True) if not no]
            if sum(map(len, into)) != header.payload_bytes:
                raise ProtocolError(f"an answer of {header.payload_bytes} bytes instead of {sum(map(len, into))}")
            await self._stream.receive_into(Vector(into))
            refused |= await self._verdicts(header.count)
        self._pending.popleft()
        if not pending.answer.done():
            pending.answer.set_result(refused)

    async def _verdicts(self, count: int) -> np.ndarray:
        return np.frombuffer(await self._stream.receive(count), np.uint8).astype(np.bool_)


def _mark_retrieved(answer: asyncio.Future[np.ndarray]) -> None:
    # A request that fails while it is sent never awaits its answer: asyncio would log that as an error of ours.
    if not answer.cancelled():
        answer.exception()


async def shake_hands(stream: Stream, expected_incarnation: int, identity: Identity) -> Welcome:
    """Raises PeerLost when the peer is another incarnation, speaks another version, or no Messenger at all."""
    await stream.send(Vector([memoryview(Hello.pack(expected_incarnation, identity))]))
    try:
        welcome = Welcome.unpack(await stream.receive(WELCOME_BYTES))
    except ProtocolError as error:
        raise PeerLost(f"no Messenger answers there: {error}") from error
    if welcome.verdict is Verdict.OTHER_INCARNATION:
        raise PeerLost(f"the peer has restarted: it is incarnation {welcome.incarnation}, not {expected_incarnation}")
    if welcome.verdict is Verdict.OTHER_VERSION:
        raise PeerLost(f"the peer speaks version {welcome.version} of the protocol")
    return welcome
