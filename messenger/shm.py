"""The shm transport: the peer's memory is mapped here and copied by this side; the peer's code only hears of notifications.

After the memory has been handed out (messenger.arena_memory) the Unix socket carries messages of the peer that attached, each a length
(u32) and as many bytes: first its identity as JSON, then notifications, each answered by one byte. When the socket ends, the process
behind it is gone or has unmapped the memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from messenger.arena_memory import FdServer, SharedMemory, attach_session
from messenger.base import Completion, Connection, Endpoint, Identity, InvalidSlice, NotifyHandler, Region, Slice, Transport
from messenger.copying import CopyJob
from messenger.ordering import Turns, deliver, run_to_rest
from messenger.plan import Plan, make_plan
from messenger.stream import PeerClosed, Stream, Vector
from springtide.errors import PeerLost

MAX_NOTIFY_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")
_ACK = b"\x06"
_PIECE_BYTES = 4 << 20
"""Copied between two looks at the fence and at whether to go on."""
_INLINE_BYTES = 64 << 10
_INLINE_PIECES = 32
"""Up to here a copy is shorter than handing it to a thread."""
_THREAD_BYTES = 8 << 20
"""What makes one more thread worth while."""


class ShmConnection(Connection):
    def __init__(self, peer: str, memory: SharedMemory, stream: Stream, region: Region, pool: ThreadPoolExecutor, threads: int) -> None:
        """Takes over `memory` and `stream`; `pool` stays the transport's."""
        self._peer = peer
        self._memory = memory
        self._stream = stream
        self._region = region
        self._pool = pool
        self._threads = threads
        self._lost: PeerLost | None = None
        self._closing: asyncio.Task[None] | None = None
        self._copies: dict[CopyJob, asyncio.Future[Any]] = {}
        self._turns = Turns()
        self._acks: deque[asyncio.Future[None]] = deque()
        self._watching = asyncio.create_task(self._watch(), name=f"acknowledgements of {peer}")

    @property
    def is_open(self) -> bool:
        return self._lost is None

    async def read(self, batch: Sequence[Slice], timeout_s: float) -> Completion:
        plan = self._plan(batch)
        return await self._run(self._copy(plan, inward=True), timeout_s, f"reading {plan.num_bytes} bytes of {self._peer}")

    async def write(self, batch: Sequence[Slice], timeout_s: float, notify: bytes | None = None) -> Completion:
        plan = self._plan(batch)
        if notify is not None and len(notify) > MAX_NOTIFY_BYTES:
            raise InvalidSlice(f"a notification of {len(notify)} bytes, more than {MAX_NOTIFY_BYTES}")
        work = self._copy(plan, inward=False) if notify is None else self._write_and_notify(plan, notify)
        return await self._run(work, timeout_s, f"writing {plan.num_bytes} bytes to {self._peer}")

    async def close(self) -> None:
        self._fail(PeerLost(f"the connection to {self._peer} was closed here"))
        assert self._closing is not None
        await asyncio.shield(self._closing)

    def _plan(self, batch: Sequence[Slice]) -> Plan:
        if self._lost is not None:
            raise self._lost
        remote = self._memory.region
        return make_plan(batch, self._region.memory.nbytes, remote.memory.nbytes, remote.granule, _PIECE_BYTES)

    async def _run(self, work: Coroutine[Any, Any, Completion], timeout_s: float, what: str) -> Completion:
        def expire() -> None:
            self._fail(PeerLost(f"the connection to {self._peer} was closed when a batch missed its deadline"))

        return await run_to_rest(work, timeout_s, expire, what)

    async def _copy(self, plan: Plan, inward: bool) -> Completion:
        if self._lost is not None:
            raise self._lost
        job = CopyJob(plan, self._region.memory, self._memory.region, inward)
        if plan.num_bytes <= _INLINE_BYTES and plan.num_pieces <= _INLINE_PIECES:
            job.run(slice(0, plan.num_pieces))
        else:
            await self._copy_in_threads(job, plan)
        if self._lost is None and self._stream.at_end():
            self._fail(PeerLost(f"lost {self._peer}: it closed while a batch was under way"))
        if self._lost is not None:
            raise self._lost
        return plan.completion(job.stale)

    async def _copy_in_threads(self, job: CopyJob, plan: Plan) -> None:
        loop = asyncio.get_running_loop()
        share = max(_THREAD_BYTES, -(-plan.num_bytes // self._threads))
        parts = [loop.run_in_executor(self._pool, job.run, part) for part in plan.stripes(share, plan.num_pieces)]
        self._copies[job] = asyncio.gather(*parts, return_exceptions=True)
        try:
            for result in await asyncio.shield(self._copies[job]):
                if isinstance(result, BaseException):
                    raise result
        finally:
            del self._copies[job]

    async def _write_and_notify(self, plan: Plan, notify: bytes) -> Completion:
        async with self._turns.take() as come:
            completion = await self._copy(plan, inward=False)
            await come()
            if not completion.failed:
                await self._notify(notify)
            return completion

    async def _notify(self, payload: bytes) -> None:
        if self._lost is not None:
            raise self._lost
        ack: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._acks.append(ack)
        try:
            await self._stream.send(Vector([memoryview(_LENGTH.pack(len(payload)) + payload)]))
        except OSError as error:
            self._fail(PeerLost(f"lost {self._peer}: {error}"))
        await ack

    async def _watch(self) -> None:
        """Takes in acknowledgements, and notices the peer's end."""
        try:
            while True:
                await self._stream.receive(len(_ACK))
                if not self._acks:
                    raise ConnectionError("it acknowledged a notification that was not sent")
                ack = self._acks.popleft()
                if not ack.done():
                    ack.set_result(None)
        except OSError as error:
            self._fail(PeerLost(f"lost {self._peer}: {error}"))

    def _fail(self, error: PeerLost) -> None:
        if self._lost is not None:
            return
        self._lost = error
        for job in self._copies:
            job.stop()
        for ack in self._acks:
            if not ack.done():
                ack.set_exception(error)
        self._closing = asyncio.create_task(self._release(), name=f"unmap {self._peer}")

    async def _release(self) -> None:
        """The socket ends only after the last copy: that tells the peer that its memory is out of reach."""
        if self._copies:
            await asyncio.wait(self._copies.values())
        self._stream.close()
        self._memory.close()
        await asyncio.wait((self._watching,))


class _Session:
    """The owner's end: one attached peer."""

    def __init__(self, stream: Stream, on_notify: NotifyHandler) -> None:
        self.stream = stream
        self.peer: Identity | None = None
        self._on_notify = on_notify

    async def run(self) -> None:
        """Until the peer closes. Raises ConnectionError when it breaks off or sends what it must not."""
        try:
            try:
                self.peer = Identity(**json.loads(await self._message()))
            except (ValueError, TypeError) as error:
                raise ConnectionError(f"not an identity: {error}") from error
            while True:
                payload = await self._message()
                deliver(self._on_notify, self.peer.name, payload)
                await self.stream.send(Vector([memoryview(_ACK)]))
        except PeerClosed:
            return

    async def _message(self) -> bytes:
        (length,) = _LENGTH.unpack(await self.stream.receive(_LENGTH.size))
        if length > MAX_NOTIFY_BYTES:
            raise ConnectionError(f"a message of {length} bytes, more than {MAX_NOTIFY_BYTES}")
        return bytes(await self.stream.receive(length))


class ShmTransport(Transport):
    name = "shm"

    def __init__(
        self,
        memory: SharedMemory,
        socket_path: Path,
        threads: int | None = None,
        connect_timeout_s: float = 2.0,
        populate: bool = True,
    ) -> None:
        """`memory` is what `listen` serves, at `socket_path`; it stays the caller's. `threads` copy large batches, by default up to 4.

        `populate` gets all pages of a peer's memory when it is mapped: copies are faster from the first on, but a large arena that was not
        touched yet takes a second or two, in which this process does nothing else (Python holds its lock in madvise).
        """
        self._memory = memory
        self._path = socket_path
        self._connect_timeout_s = connect_timeout_s
        self._populate = populate
        self._threads = threads or min(4, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="messenger-copy")
        self._server: FdServer | None = None
        self._sessions: set[_Session] = set()
        self._connections: list[ShmConnection] = []

    async def listen(self, region: Region, identity: Identity, on_notify: NotifyHandler) -> str:
        """Raises ValueError when `region` or `identity` is not that of the memory that the transport was made with."""
        if not np.shares_memory(region.memory, self._memory.region.memory):
            raise ValueError("shm can only serve the region of its SharedMemory, not another")
        if identity.incarnation != self._memory.header.incarnation:
            raise ValueError(f"the memory is of incarnation {self._memory.header.incarnation}, not {identity.incarnation}")

        async def serve(stream: Stream) -> None:
            session = _Session(stream, on_notify)
            self._sessions.add(session)
            try:
                await session.run()
            finally:
                self._sessions.remove(session)

        self._server = FdServer(self._memory, self._path, serve)
        await self._server.start()
        return str(self._path)

    async def connect(self, endpoint: Endpoint, region: Region, identity: Identity) -> Connection:
        path = Path(endpoint.addresses[self.name])
        hello = json.dumps(asdict(identity)).encode()
        attaching = asyncio.get_running_loop().run_in_executor(self._pool, attach_session, path, self._populate, self._connect_timeout_s)
        try:
            memory, sock = await asyncio.shield(attaching)
        except asyncio.CancelledError:
            attaching.add_done_callback(_discard)
            raise
        stream = Stream(sock)
        try:
            if memory.header.incarnation != endpoint.incarnation:
                raise PeerLost(f"the peer has restarted: it is incarnation {memory.header.incarnation}, not {endpoint.incarnation}")
            await stream.send(Vector([memoryview(_LENGTH.pack(len(hello)) + hello)]))
        except BaseException as error:
            stream.close()
            memory.close()
            if isinstance(error, OSError):
                raise PeerLost(f"lost the peer at {path}: {error}") from error
            raise
        connection = ShmConnection(str(path), memory, stream, region, self._pool, self._threads)
        self._connections = [other for other in self._connections if other.is_open] + [connection]
        return connection

    async def fence(self, peer: Identity) -> bool:
        """A process that has the memory mapped can be asked to let go only by itself: True once every session of it has ended."""
        return not any(session.peer == peer for session in self._sessions)

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self._connections))
        self._connections.clear()
        if self._server is not None:
            await self._server.close()
        await asyncio.to_thread(self._pool.shutdown)


def _discard(attaching: asyncio.Future[Any]) -> None:
    if not attaching.cancelled() and attaching.exception() is None:
        memory, sock = attaching.result()
        sock.close()
        memory.close()
