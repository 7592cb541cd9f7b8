"""The data plane in pure Python: the owner's end of a data lane serves its region to one peer, request by request."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from messenger.base import Region
from messenger.plan import SliceVerdict
from messenger.stream import PeerClosed, Stream, Vector
from messenger.tcp_lane import sums_of
from messenger.tcp_protocol import CHECKSUM, HEADER_BYTES, TABLE, Header, Op, ProtocolError, check_table

_ANSWERED_AT_ONCE = 1 << 16
"""Bytes of a read that are copied first and sent in one system call."""


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
        self.refused = np.zeros(len(table), np.bool_)
        memory = region.memory.data
        self.views = [memory[offset : offset + length] for offset, length in table[["offset", "length"]].tolist()]
        self.num_bytes = int(table["length"].sum())

    def refuse_stale(self, vector: Vector) -> Callable[[], None]:
        """For a `vector` of all the views, in their order."""

        def check() -> None:
            stale = self._generations[self._granules] != self._wanted
            for position in np.flatnonzero(stale & ~self.refused):
                vector.divert(int(position))
            self.refused |= stale

        return check

    def verdicts(self, corrupt: np.ndarray | None = None) -> bytes:
        verdicts = np.where(self.refused, SliceVerdict.STALE, SliceVerdict.DONE)
        if corrupt is not None:
            verdicts[corrupt & ~self.refused] = SliceVerdict.CORRUPT
        return verdicts.astype(np.uint8).tobytes()


class PythonSession:
    """The owner's end of one data lane."""

    def __init__(self, stream: Stream, region: Region, checksums: bool) -> None:
        self._stream = stream
        self._region = region
        self._checksums = checksums

    async def run(self) -> None:
        """Until the peer closes or `close`. Raises ProtocolError on garbage, OSError when the peer is lost."""
        try:
            while True:
                await self._serve_one()
        except PeerClosed:
            return

    def close(self) -> None:
        """From now on nothing of the peer lands through this lane."""
        self._stream.close()

    async def _serve_one(self) -> None:
        header = Header.unpack(await self._stream.receive(HEADER_BYTES))
        table = np.frombuffer(await self._stream.receive(header.count * TABLE.itemsize), TABLE)
        slices = ServedSlices(table, self._region)
        if header.op is Op.READ:
            await self._read(slices)
        elif slices.num_bytes != header.payload_bytes:
            raise ProtocolError(f"a write of {slices.num_bytes} bytes announces {header.payload_bytes}")
        else:
            await self._write(slices)

    async def _read(self, slices: ServedSlices) -> None:
        data = Vector(slices.views)
        check = slices.refuse_stale(data)
        head = Header(Op.READ, len(slices.views), slices.num_bytes).pack()
        if slices.num_bytes <= _ANSWERED_AT_ONCE:
            # Copied in the step that checks them: one system call, and nothing can turn stale on the way.
            check()
            sums = sums_of(slices.views).tobytes() if self._checksums else b""
            await self._stream.send(Vector([memoryview(b"".join((head, *data.rest(), sums, slices.verdicts())))]))
            return
        await self._stream.send(Vector([memoryview(head)]))
        await self._stream.send(data, check)
        sums = sums_of(slices.views).tobytes() if self._checksums else b""
        check()
        await self._stream.send(Vector([memoryview(sums + slices.verdicts())]))

    async def _write(self, slices: ServedSlices) -> None:
        vector = Vector(slices.views)
        check = slices.refuse_stale(vector)
        await self._stream.receive_into(vector, check)
        corrupt = None
        if self._checksums:
            announced = await self._stream.receive(len(slices.views) * CHECKSUM.itemsize)
            corrupt = np.frombuffer(announced, CHECKSUM) != sums_of(slices.views)
        check()
        answer = Header(Op.WRITE, len(slices.views), 0).pack() + slices.verdicts(corrupt)
        await self._stream.send(Vector([memoryview(answer)]))
