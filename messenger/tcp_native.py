"""The native data plane: both ends of a data lane are threads of the C part, which never wait for Python."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial

from messenger import _native
from messenger.base import Completion, Region, Slice
from messenger.copying import native_batch, native_completion
from messenger.ordering import run_to_rest
from messenger.stream import Stream
from messenger.tcp_options import TcpOptions
from messenger.tcp_plane import DataPlane, LaneKeeper, OpenLane
from messenger.tcp_protocol import Op, ProtocolError, Welcome
from springtide.errors import PeerLost

_COMPLETE = 0


class NativePlane(DataPlane):
    def __init__(
        self,
        peer: str,
        welcome: Welcome,
        region: Region,
        open_lane: OpenLane,
        on_lost: Callable[[PeerLost], None],
        options: TcpOptions,
    ) -> None:
        """Makes `options.lanes` for large batches, and one more for small ones."""
        self._peer = peer
        self._welcome = welcome
        self._region_bytes = region.memory.nbytes
        self._on_lost = on_lost
        self._num_lanes = options.lanes
        self._lost: PeerLost | None = None
        self._keeper = LaneKeeper(open_lane, peer, on_lost)
        self._lanes = _native.Lanes(region.memory, options.peer_timeout_s, options.checksums)
        self._streams: dict[int, tuple[Stream, bool]] = {}
        """What is lent, by file descriptor; whether it is the express lane."""
        self._waiting: dict[_native.Batch, asyncio.Future[None]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._lanes.fileno(), self._reap)

    async def open(self) -> None:
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

    async def move(self, op: Op, batch: Sequence[Slice], timeout_s: float) -> Completion:
        if self._lost is not None:
            raise self._lost
        welcome = self._welcome
        work = native_batch(batch, self._region_bytes, welcome.region_bytes, welcome.granule)
        if work.num_bytes:
            await self._run(work, op, timeout_s)
        return native_completion(work, batch, welcome.granule)

    async def ping(self) -> None:
        with contextlib.suppress(PeerLost):
            await self._run(_native.Batch((), 0, 0, 1), Op.READ, 3600.0)  # silence ends it earlier

    def lose(self, error: PeerLost) -> None:
        if self._lost is None:
            self._lost = error
            self._lanes.lose(error.message)

    async def drain(self) -> None:
        await self._keeper.drain()

    async def close(self) -> None:
        self._lanes.close()
        self._reap()
        self._loop.remove_reader(self._lanes.fileno())
        for stream, _ in self._streams.values():
            self._keeper.lay_to_rest(stream)
        self._streams.clear()
        await self._keeper.close()

    async def _run(self, work: _native.Batch, op: Op, timeout_s: float) -> None:
        if not self._lanes.submit(work, op is Op.WRITE):
            ended = self._waiting[work] = self._loop.create_future()
            verb = "writing" if op is Op.WRITE else "reading"
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

    def _attach(self, stream: Stream, express: bool) -> None:
        """Raises OSError when the machine has no room for another lane."""
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
            _mark(self._waiting.pop(work))


class NativeSession:
    """The owner's end of one data lane."""

    def __init__(self, stream: Stream, region: Region, checksums: bool) -> None:
        """Takes over the stream's socket."""
        self._signal = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sock = stream.detach()
        try:
            fd, signal = self._sock.fileno(), self._signal
            self._session = _native.Session(fd, region.memory, region.generations, region.granule, signal, checksums)
        except BaseException:
            self._sock.close()
            os.close(self._signal)
            raise

    async def run(self) -> None:
        """Until the peer closes or `close`. Raises ProtocolError on garbage, OSError when the peer is lost."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._signal, _mark, ended)
        try:
            await ended
        finally:
            loop.remove_reader(self._signal)
            self._session.abort()
            self._session.join()
            self._sock.close()
            os.close(self._signal)
        if self._session.complaint is not None:
            raise ProtocolError(self._session.complaint)
        if self._session.error:
            raise OSError(self._session.error, os.strerror(self._session.error))

    def close(self) -> None:
        """From now on nothing of the peer lands through this lane."""
        self._session.abort()
        self.settle()

    @staticmethod
    def settle() -> None:
        """Returns when no session of this process writes on the strength of generations that have been changed."""
        _native.settle()


def _mark(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)
