"""The seam of the tcp transport's data plane: what moves bytes over the data lanes to one peer, natively or in Python."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

from messenger.base import Completion, Slice
from messenger.stream import Stream
from messenger.tcp_protocol import Op
from springtide.errors import PeerLost

CLOSE_GRACE_S = 1.0
OpenLane = Callable[[], Awaitable[Stream]]


class DataPlane(ABC):
    """The caller's data lanes. One exchange of request and answer is under way on a lane at a time: a batch that is given up costs no more
    than the lanes that are busy with it, and those are replaced."""

    @abstractmethod
    async def open(self) -> None:
        """Opens the lanes. Raises PeerLost, OSError, ValueError."""

    @abstractmethod
    async def move(self, op: Op, batch: Sequence[Slice], timeout_s: float) -> Completion:
        """As Connection.read and write."""

    @abstractmethod
    async def ping(self) -> None:
        """Returns when the peer's end of a lane has answered, or all is lost because it did not."""

    @abstractmethod
    def lose(self, error: PeerLost) -> None:
        """Every batch raises `error`, soon, and no lane is opened any more. Idempotent."""

    @abstractmethod
    async def drain(self) -> None:
        """As Connection.drain."""

    @abstractmethod
    async def close(self) -> None:
        """After `lose`: returns when all is at rest."""


class LaneKeeper:
    """Opens lanes, lays to rest those that broke off in the middle of an exchange, and opens others in their place."""

    def __init__(self, open_lane: OpenLane, peer: str, on_lost: Callable[[PeerLost], None]) -> None:
        """`on_lost` is told when a lane cannot be replaced."""
        self._open_lane = open_lane
        self._peer = peer
        self._on_lost = on_lost
        self._closing: set[asyncio.Task[None]] = set()
        self._opening: set[asyncio.Task[None]] = set()

    async def open(self, count: int) -> list[Stream]:
        """All or none."""
        opening = [asyncio.ensure_future(self._open_lane()) for _ in range(count)]
        try:
            return list(await asyncio.gather(*opening))
        except BaseException:
            for task in opening:
                task.cancel()
            for result in await asyncio.gather(*opening, return_exceptions=True):
                if isinstance(result, Stream):
                    result.close()
            raise

    def lay_to_rest(self, stream: Stream) -> None:
        """The peer is told by the end of the stream, and given a moment to take what was sent and to close."""
        self._track(self._closing, _close(stream), "close a lane")

    def replace(self, attach: Callable[[Stream], None]) -> None:
        """Opens a lane in the background, for `attach`."""
        self._track(self._opening, self._replace(attach), "replace a lane")

    async def drain(self) -> None:
        if self._closing:
            await asyncio.wait(set(self._closing))  # a drain that is cancelled cancels none of them

    async def close(self) -> None:
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, *self._closing, return_exceptions=True)

    async def _replace(self, attach: Callable[[Stream], None]) -> None:
        try:
            attach(await self._open_lane())
        except (PeerLost, OSError) as error:
            self._on_lost(PeerLost(f"lost {self._peer}: {error}"))

    def _track(self, tasks: set[asyncio.Task[None]], work: Awaitable[None], name: str) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        task.set_name(f"{name} to {self._peer}")
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _close(stream: Stream) -> None:
    """However it ends: what the peer has not taken by then is not delivered later."""
    stream.finish_sending()
    taken = False
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_GRACE_S):
                taken = await stream.drain()
    finally:
        if not taken:
            stream.discard_unsent()
        with contextlib.suppress(OSError):
            stream.close()
