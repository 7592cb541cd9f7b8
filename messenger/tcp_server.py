"""The owner's end of a tcp lane: serves its region to one peer, request by request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import numpy as np

from messenger.base import Identity, NotifyHandler, Region
from messenger.ordering import deliver
from messenger.stream import PeerClosed, Stream, Vector
from messenger.tcp_protocol import (
    HEADER_BYTES,
    HELLO_BYTES,
    TABLE,
    VERSION,
    Header,
    Hello,
    Op,
    ProtocolError,
    Verdict,
    Welcome,
    check_table,
)

logger = logging.getLogger(__name__)

_SMALL_BYTES = 1 << 16
_HANDSHAKE_TIMEOUT_S = 5.0


class ServedSlices:
    """The slices of one request, and which of them have been refused so far. A refused one stays refused.

    `refuse_stale` runs in one step with every system call that touches the region: what the owner has given away since is diverted to
    scratch memory, so no byte of another block is sent and none is overwritten.
    """

    def __init__(self, table: np.ndarray, region: Region) -> None:
        check_table(table, region)
        self._generations = region.generations
        self._granules = (table["offset"] // np.uint64(region.granule)).astype(np.int64)
        self._wanted = table["generation"]
        self.refused = self._generations[self._granules] != self._wanted
        memory = region.memory.data
        self.views = [memory[offset : offset + length] for offset, length in table[["offset", "length"]].tolist()]

    def refuse_stale(self, vector: Vector, indices: np.ndarray, first_buffer: int = 0) -> Callable[[], None]:
        """For a `vector` that holds the views of the slices `indices`, in that order, from `first_buffer` on."""

        def check() -> None:
            stale = self._generations[self._granules[indices]] != self._wanted[indices]
            for position in np.flatnonzero(stale & ~self.refused[indices]):
                vector.divert(first_buffer + int(position))
            self.refused[indices] |= stale

        return check


class TcpSession:
    """One lane, from its handshake to its end."""

    def __init__(self, stream: Stream, region: Region, incarnation: int, on_notify: NotifyHandler) -> None:
        self._stream = stream
        self._region = region
        self._incarnation = incarnation
        self._on_notify = on_notify
        self.peer: Identity | None = None
        """Known once the handshake is done."""

    async def run(self) -> None:
        """Returns when the peer closes. Raises OSError when it is lost; garbage is logged and ends only this lane."""
        try:
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                welcome = await self._handshake()
            if welcome:
                while True:
                    await self._serve_one()
        except PeerClosed:
            return
        except ProtocolError as error:
            logger.error("closing a connection%s: %s", f" of {self.peer.name}" if self.peer else "", error)

    def close(self) -> None:
        """From now on nothing of the peer lands through this lane."""
        self._stream.close()

    async def _handshake(self) -> bool:
        hello = Hello.unpack(await self._stream.receive(HELLO_BYTES))
        try:
            name = (await self._stream.receive(hello.name_bytes)).decode()
        except UnicodeDecodeError as error:
            raise ProtocolError(f"a name that is not UTF-8: {error}") from error
        verdict = Verdict.WELCOME
        if hello.version != VERSION:
            verdict = Verdict.OTHER_VERSION
        elif hello.expected_incarnation != self._incarnation:
            verdict = Verdict.OTHER_INCARNATION
        self.peer = Identity(name, hello.incarnation)
        await self._stream.send(Vector([memoryview(Welcome.pack(verdict, self._incarnation, self._region))]))
        return verdict is Verdict.WELCOME

    async def _serve_one(self) -> None:
        header = Header.unpack(await self._stream.receive(HEADER_BYTES))
        if header.op is Op.NOTIFY:
            await self._notify(header)
            return
        table = np.frombuffer(await self._stream.receive(header.count * TABLE.itemsize), TABLE)
        slices = ServedSlices(table, self._region)
        num_bytes = int(table["length"].sum())
        if header.op is Op.READ:
            await self._read(slices)
        elif num_bytes != header.payload_bytes:
            raise ProtocolError(f"a write of {num_bytes} bytes announces {header.payload_bytes}")
        else:
            await self._write(slices)

    async def _read(self, slices: ServedSlices) -> None:
        good = np.flatnonzero(~slices.refused)
        num_bytes = sum(len(slices.views[index]) for index in good)
        verdicts = slices.refused.tobytes()
        head = Header(Op.READ, len(verdicts), num_bytes).pack() + verdicts
        views = [slices.views[index] for index in good]
        if num_bytes <= _SMALL_BYTES:
            # Copied in the step that checked them: one system call, and nothing can turn stale on the way.
            await self._stream.send(Vector([memoryview(b"".join((head, *views, verdicts)))]))
            return
        data = Vector([memoryview(head), *views])
        check = slices.refuse_stale(data, good, first_buffer=1)
        await self._stream.send(data, check)
        check()
        await self._stream.send(Vector([memoryview(slices.refused.tobytes())]))

    async def _write(self, slices: ServedSlices) -> None:
        vector = Vector(slices.views)
        for index in np.flatnonzero(slices.refused):
            vector.divert(int(index))
        everything = np.arange(len(slices.refused))
        check = slices.refuse_stale(vector, everything)
        await self._stream.receive_into(vector, check)
        check()
        answer = Header(Op.WRITE, len(slices.refused), 0).pack() + slices.refused.tobytes()
        await self._stream.send(Vector([memoryview(answer)]))

    async def _notify(self, header: Header) -> None:
        payload = await self._stream.receive(header.payload_bytes)
        assert self.peer is not None
        deliver(self._on_notify, self.peer.name, bytes(payload))
        await self._stream.send(Vector([memoryview(Header(Op.NOTIFY, 0, 0).pack())]))
