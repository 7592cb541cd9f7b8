"""The shm transport: the peer's memory is mapped here and copied by this side; the peer's code only hears of notifications.

After the memory has been handed out (messenger.arena_memory) the Unix socket carries messages of the peer that attached: first its identity
as JSON, then notifications (messenger.notices; docs/wire.md). When the socket ends, the process behind it is gone or has unmapped the
memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from messenger._native import SliceBatch
from messenger.arena_memory import FdServer, SharedMemory, attach_session, attached
from messenger.base import Completion, Connection, Endpoint, Identity, NotifyHandler, Region, Slice, Transport
from messenger.batch import completion_of, native_batch
from messenger.notices import NoticeSender, introduction, receive_identity, serve_notices
from messenger.options import ShmOptions
from messenger.ordering import run_to_rest
from messenger.stream import PeerClosed, SocketStream
from springtide.errors import NoMemory, PeerLost

_WAKES_WITHIN_S = 0.25
"""Where a machine stood still, its processes go on one after the other."""
_SHARE_BYTES = 4 << 20
"""Bytes copied at a time, in some 200 us: small batches are copied at once by the thread of the event loop, for less than waking another
would take."""


Copy = Callable[[int, int], None]
"""Copies bytes [begin, end) of a batch, all its slices being one row; several threads may copy different ones at once."""


class ShmConnection(Connection):
    def __init__(
        self, peer: str, memory: SharedMemory, stream: SocketStream, region: Region, pool: ThreadPoolExecutor, options: ShmOptions
    ) -> None:
        """Takes over `memory` and `stream`; `pool` stays the transport's."""
        self._peer = peer
        self._memory = memory
        self._stream = stream
        self._region = region
        self._pool = pool
        self._options = options
        self._lost: PeerLost | None = None
        self._closing: asyncio.Task[None] | None = None
        self._copies: dict[SliceBatch, asyncio.Future[Any]] = {}
        self._notices = NoticeSender(stream, peer, self._fail, self._check_peer)

    @property
    def is_open(self) -> bool:
        return self._lost is None

    async def read(self, batch: Sequence[Slice], timeout_s: float) -> Completion:
        return await self._copy(batch, timeout_s, outward=False)

    async def write(self, batch: Sequence[Slice], timeout_s: float, notify: bytes | None = None) -> Completion:
        if notify is None:
            return await self._copy(batch, timeout_s, outward=True)
        self._raise_if_lost()
        return await self._notices.after(partial(self._copy, batch, outward=True), notify, timeout_s, f"a write to {self._peer}")

    async def close(self) -> None:
        self._fail(PeerLost(f"the connection to {self._peer} was closed here"))
        assert self._closing is not None
        await asyncio.shield(self._closing)

    async def _copy(self, batch: Sequence[Slice], timeout_s: float, outward: bool) -> Completion:
        self._raise_if_lost()
        local, remote = self._region.memory, self._memory.region
        work = native_batch(batch, local.nbytes, remote.memory.nbytes, remote.granule)
        copy: Copy = partial(work.copy, local, remote.memory, remote.generations, outward)
        if work.num_bytes <= _SHARE_BYTES:
            copy(0, work.num_bytes)
        else:
            copying = self._copies[work] = asyncio.ensure_future(self._copy_in_shares(copy, work.num_bytes))
            verb = "writing to" if outward else "reading from"
            try:
                await run_to_rest(copying, timeout_s, work.stop, f"{verb} {self._peer} {work.num_bytes} bytes", work.stop)
            finally:
                del self._copies[work]
        if self._lost is None and self._stream.at_end():
            self._fail(PeerLost(f"lost {self._peer}: it closed while a batch was in flight"))
        self._raise_if_lost()
        return completion_of(work, batch, remote.granule)

    async def _copy_in_shares(self, copy: Copy, num_bytes: int) -> None:
        """Copies in turns with whatever else the loop does. Helpers take shares from the same row, once they have woken up."""
        loop = asyncio.get_running_loop()
        shares = iter([(begin, min(begin + _SHARE_BYTES, num_bytes)) for begin in range(0, num_bytes, _SHARE_BYTES)])
        helpers = [loop.run_in_executor(self._pool, _copy_each, copy, shares) for _ in range(self._options.helpers)]
        for begin, end in shares:
            copy(begin, end)
            await asyncio.sleep(0)
        await asyncio.gather(*helpers)

    async def _check_peer(self) -> None:
        """Fails when the peer's process is stopped, and not about to go on: it answers no notification. One that is busy may still."""
        pid = self._stream.peer_pid()
        if not _is_stopped(pid):
            return
        await asyncio.sleep(_WAKES_WITHIN_S)
        if _is_stopped(pid):
            self._fail(PeerLost(f"lost {self._peer}: its process is stopped"))

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _fail(self, error: PeerLost) -> None:
        if self._lost is not None:
            return
        self._lost = error
        for work in self._copies:
            work.stop()
        self._closing = asyncio.create_task(self._release(error), name=f"unmap {self._peer}")

    async def _release(self, error: PeerLost) -> None:
        """Ends the socket, only after the last copy: that tells the peer that its memory is out of reach."""
        if self._copies:
            await asyncio.wait(self._copies.values())
        self._notices.fail(error)
        self._memory.close()
        await self._notices.close()


class _AttachedPeer:
    """A process that has this side's memory mapped: the owner's end of its connection."""

    def __init__(self, stream: SocketStream, on_notify: NotifyHandler) -> None:
        self._stream = stream
        self.identity: Identity | None = None
        """Once it has said who it is."""
        self._on_notify = on_notify

    async def run(self) -> None:
        """Returns when the peer closes. Raises ConnectionError when it breaks off or sends what it must not."""
        try:
            self.identity = await receive_identity(self._stream)
            await serve_notices(self._stream, self.identity.name, self._on_notify)
        except PeerClosed:
            return


class ShmTransport(Transport):
    name = "shm"
    one_host_only = True

    def __init__(self, memory: SharedMemory, socket_path: Path, options: ShmOptions | None = None) -> None:
        """`memory` is what `listen` serves, at `socket_path`; it stays the caller's."""
        self._memory = memory
        self._path = socket_path
        self._options = options or ShmOptions()
        self._pool = ThreadPoolExecutor(max(1, self._options.helpers), thread_name_prefix="messenger-copy")
        self._attachers = ThreadPoolExecutor(thread_name_prefix="messenger-attach")
        """Threads that attach to peers: one may have to wait for a peer that hangs, and copies are not to wait for it."""
        self._server: FdServer | None = None
        self._attached: set[_AttachedPeer] = set()
        self._connections: list[ShmConnection] = []

    async def listen(self, region: Region, identity: Identity, on_notify: NotifyHandler) -> str:
        """Serves the memory. Raises ValueError when `region` or `identity` is not that of the memory that the transport was made with."""
        if not np.shares_memory(region.memory, self._memory.region.memory):
            raise ValueError("shm can only serve the region of its SharedMemory, not another")
        if identity.incarnation != self._memory.header.incarnation:
            raise ValueError(f"the memory is of incarnation {self._memory.header.incarnation}, not {identity.incarnation}")

        async def serve(stream: SocketStream) -> None:
            peer = _AttachedPeer(stream, on_notify)
            self._attached.add(peer)
            try:
                await peer.run()
            finally:
                self._attached.remove(peer)

        self._server = FdServer(self._memory, self._path, serve)
        await self._server.start()
        return str(self._path)

    async def connect(self, endpoint: Endpoint, region: Region, identity: Identity) -> Connection:
        path = Path(endpoint.addresses[self.name])
        options = self._options
        attach = partial(attach_session, path, options.populate, options.connect_timeout_s)
        attaching = asyncio.get_running_loop().run_in_executor(self._attachers, attach)
        try:
            memory, sock = await attached(attaching)
        except NoMemory as error:  # another transport can do without
            raise PeerLost(f"the memory at {path} cannot be mapped: {error.message}") from error
        stream = SocketStream(sock)
        try:
            if memory.header.incarnation != endpoint.incarnation:
                raise PeerLost(f"the peer has restarted: it is incarnation {memory.header.incarnation}, not {endpoint.incarnation}")
            await stream.send(introduction(identity))
        except BaseException as error:
            stream.close()
            memory.close()
            if isinstance(error, OSError):
                raise PeerLost(f"lost the peer at {path}: {error}") from error
            raise
        connection = ShmConnection(str(path), memory, stream, region, self._pool, self._options)
        self._connections = [other for other in self._connections if other.is_open] + [connection]
        return connection

    async def fence(self, peer: Identity) -> bool:
        """A process that has the memory mapped can be asked to let go only by itself: True once none of its attachments is left, and none
        of which it is not known yet whose it is."""
        return not any(attached.identity in (None, peer) for attached in self._attached)

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self._connections))
        self._connections.clear()
        if self._server is not None:
            await self._server.close()
        for pool in (self._attachers, self._pool):
            await asyncio.to_thread(pool.shutdown)


def _copy_each(copy: Copy, shares: Iterator[tuple[int, int]]) -> None:
    """One share after another; several threads may do so with the same iterator (of a list: it is drawn from under the GIL)."""
    for begin, end in shares:
        copy(begin, end)


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped; False, too, when it cannot be seen from here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False
