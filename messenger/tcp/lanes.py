"""The caller's data lanes to one peer. Their threads are the C part's (messenger/native/lanes.h); what is asynchronous about them is here:
opening lanes, waiting for batches, and replacing lanes that broke off in the middle of an exchange."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from messenger import _native
from messenger.base import Completion, Region, Slice, Traffic
from messenger.batch import completion_of, native_batch
from messenger.options import TcpOptions
from messenger.ordering import run_to_rest
from messenger.stream import SocketStream
from messenger.tcp.handshake import Welcome
from messenger.tcp.traffic import traffic_of
from springtide.errors import PeerLost
from springtide.supervision import end

CLOSE_GRACE_S = 1.0
"""A peer has so long to take what was sent on a lane that is closed."""
ASK_AFTER_S = 0.4
"""A peer of which nothing comes through for so long, while batches are under way, is asked on another lane: one by itself may stand still
for seconds, on a network that loses much."""
OpenLane = Callable[[], Awaitable[SocketStream]]

_COMPLETE = 0


class DataLanes:
    """Lanes on each of which one exchange of request and answer is in flight at a time: a batch that is given up costs no more than the
    lanes that are busy with it, and those are replaced."""

    def __init__(
        self,
        peer: str,
        welcome: Welcome,
        region: Region,
        open_lane: OpenLane,
        on_lost: Callable[[PeerLost], None],
        options: TcpOptions,
    ) -> None:
        """Makes `options.lanes` for large batches, and one more for small ones. `on_lost` is called when one breaks."""
        self._peer = peer
        self._welcome = welcome
        self._region_bytes = region.memory.nbytes
        self._on_lost = on_lost
        self._num_lanes = options.lanes
        self._lost: PeerLost | None = None
        self._keeper = LaneKeeper(open_lane, peer, on_lost)
        self._lanes = _native.Lanes(region.memory, options.peer_timeout_s, options.checksums)
        self._streams: dict[int, tuple[SocketStream, bool]] = {}
        """Streams that are lent, by file descriptor; whether each is the express lane."""
        self._waiting: dict[_native.SliceBatch, asyncio.Future[None]] = {}
        self._asking: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._lanes.fileno(), self._reap)

    async def open(self) -> None:
        """Opens the lanes. Raises PeerLost, OSError, ValueError."""
        streams = await self._keeper.open(self._num_lanes + 1)
        try:
            for index, stream in enumerate(streams):
                self._attach(stream, express=index == 0)
        finally:
            for stream in streams:
                if stream.fileno() not in self._streams:
                    stream.close()
        if self._lost is not None:
            raise self._lost

    async def read(self, batch: Sequence[Slice], timeout_s: float) -> Completion:
        """Does what `Connection.read` does."""
        return await self._move(batch, timeout_s, write=False)

    async def write(self, batch: Sequence[Slice], timeout_s: float) -> Completion:
        """Does what `Connection.write` does without a notification."""
        return await self._move(batch, timeout_s, write=True)

    async def ping(self) -> None:
        """Returns when the peer's end of a lane has answered, or all is lost because it did not."""
        with contextlib.suppress(PeerLost):
            await self._run(_native.SliceBatch((), 0, 0, 1), 3600.0, write=False)  # silence ends it earlier

    def traffic(self) -> Traffic:
        """That of the lanes there are."""
        return sum((traffic_of(stream.sock) for stream, _ in self._streams.values()), Traffic())

    def lose(self, error: PeerLost) -> None:
        """Makes every batch raise `error`, soon; no lane is opened any more. Idempotent."""
        if self._lost is None:
            self._lost = error
            self._lanes.lose(error.message)

    async def drain(self) -> None:
        """Does what `Connection.drain` does while the connection is open."""
        await self._keeper.drain()

    async def close(self) -> None:
        """Returns, after `lose`, when all is at rest."""
        self._lanes.close()
        self._reap()
        self._loop.remove_reader(self._lanes.fileno())
        for stream, _ in self._streams.values():
            self._keeper.lay_to_rest(stream)
        self._streams.clear()
        await end(self._asking)
        await self._keeper.close()

    async def _move(self, batch: Sequence[Slice], timeout_s: float, *, write: bool) -> Completion:
        if self._lost is not None:
            raise self._lost
        welcome = self._welcome
        work = native_batch(batch, self._region_bytes, welcome.region_bytes, welcome.granule)
        if work.num_bytes:
            await self._run(work, timeout_s, write=write)
        return completion_of(work, batch, welcome.granule)

    async def _ask_while_silent(self) -> None:
        """While batches are under way."""
        moved = self.traffic().num_bytes
        while self._waiting and self._lost is None:
            await asyncio.sleep(ASK_AFTER_S)
            before, moved = moved, self.traffic().num_bytes
            if moved <= before and self._waiting:
                await self.ping()
                moved = self.traffic().num_bytes

    async def _run(self, work: _native.SliceBatch, timeout_s: float, *, write: bool) -> None:
        if not self._lanes.submit(work, write):
            ended = self._waiting[work] = self._loop.create_future()
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask_while_silent(), name=f"ask {self._peer} while it is silent")
            verb = "writing" if write else "reading"
            await run_to_rest(
                ended,
                timeout_s,
                partial(self._lanes.interrupt, work),
                f"{verb} {work.num_bytes} bytes of {self._peer}",
                partial(self._lanes.stop, work),
            )
        if work.outcome != _COMPLETE:
            self._reap()
            raise self._lost or PeerLost(f"the lanes to {self._peer} are closed")

    def _attach(self, stream: SocketStream, express: bool) -> None:
        """Lends a lane to the C part. Raises OSError when the machine has no room for another."""
        try:
            self._lanes.attach(stream.fileno(), express)
        except OSError:
            stream.close()
            self._reap()
            if self._lost is None:
                raise
        else:
            self._streams[stream.fileno()] = (stream, express)

    def _reap(self) -> None:
        ended, files, reason = self._lanes.reap()
        if reason is not None and self._lost is None:
            self._on_lost(PeerLost(f"lost {self._peer}: {reason}"))
        for fd in files:
            stream, express = self._streams.pop(fd)
            self._keeper.lay_to_rest(stream)
            if self._lost is None:
                self._keeper.replace(partial(self._attach, express=express))
        for work in ended:
            future = self._waiting.pop(work)
            if not future.done():
                future.set_result(None)


class LaneKeeper:
    """Opens lanes, lays to rest those that broke off in the middle of an exchange, and opens others in their place."""

    def __init__(self, open_lane: OpenLane, peer: str, on_lost: Callable[[PeerLost], None]) -> None:
        """`on_lost` is told when a lane cannot be replaced."""
        self._open_lane = open_lane
        self._peer = peer
        self._on_lost = on_lost
        self._closing: set[asyncio.Task[None]] = set()
        self._opening: set[asyncio.Task[None]] = set()

    async def open(self, count: int) -> list[SocketStream]:
        """Opens `count` lanes, all or none. Raises PeerLost, OSError, ValueError."""
        opening = [asyncio.ensure_future(self._open_lane()) for _ in range(count)]
        try:
            return list(await asyncio.gather(*opening))
        except BaseException:
            for task in opening:
                task.cancel()
            for result in await asyncio.gather(*opening, return_exceptions=True):
                if isinstance(result, SocketStream):
                    result.close()
            raise

    def lay_to_rest(self, stream: SocketStream) -> None:
        """Tells the peer by the end of the stream, and gives it a moment to take what was sent and to close."""
        self._track(self._closing, _close(stream), "close a lane")

    def replace(self, attach: Callable[[SocketStream], None]) -> None:
        """Opens a lane in the background, for `attach`."""
        self._track(self._opening, self._replace(attach), "replace a lane")

    async def drain(self) -> None:
        """Returns when every lane that was laid to rest by now is closed."""
        if self._closing:
            await asyncio.wait(set(self._closing))  # a drain that is cancelled cancels none of them

    async def close(self) -> None:
        """Opens no more lanes, and returns when all that were laid to rest are closed."""
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, *self._closing, return_exceptions=True)

    async def _replace(self, attach: Callable[[SocketStream], None]) -> None:
        try:
            attach(await self._open_lane())
        except (PeerLost, OSError) as error:
            self._on_lost(PeerLost(f"lost {self._peer}: {error}"))

    def _track(self, tasks: set[asyncio.Task[None]], work: Awaitable[None], name: str) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        task.set_name(f"{name} to {self._peer}")
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _close(stream: SocketStream) -> None:
    """Closes a lane. However this ends, what the peer has not taken by then is not delivered later."""
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
