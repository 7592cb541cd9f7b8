"""Both ends of tcp's data lanes in plain Python, after docs/wire.md: what the C part has to agree with, byte for byte."""

from __future__ import annotations

import asyncio
import socket
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from messenger.base import Endpoint, Identity, Region
from messenger.batch import SliceVerdict
from messenger.listener import Listener
from messenger.notices import serve_notices
from messenger.router import host_id
from messenger.stream import PeerClosed, SocketStream
from messenger.tcp.handshake import LaneRole, answer

TABLE = np.dtype([("offset", "<u8"), ("length", "<u8"), ("generation", "<u8")])
MOST_SLICES, MOST_BYTES = 512, 2 << 20
"""Of one request, as our lanes make them."""
_HEADER = struct.Struct("<B3xIQ")
HEADER_BYTES = _HEADER.size


class Op(IntEnum):
    READ = 1
    WRITE = 2


def header(op: int, count: int, payload_bytes: int) -> bytes:
    return _HEADER.pack(op, count, payload_bytes)


def request(op: int, entries: Sequence[tuple[int, int, int]], payload_bytes: int = 0) -> bytes:
    """`entries`: offset, length and generation of each slice."""
    return header(op, len(entries), payload_bytes) + np.array(entries, TABLE).tobytes()


def checksums(slices: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", zlib.crc32(piece)) for piece in slices)


@dataclass(frozen=True)
class Answered:
    slices: list[bytes]
    """What was read."""
    verdicts: list[int]


class PlainCaller:
    """The caller's end of one data lane, once it has been welcomed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, with_checksums: bool) -> None:
        self._reader = reader
        self._writer = writer
        self._with_checksums = with_checksums

    async def read(self, entries: Sequence[tuple[int, int, int]]) -> Answered:
        self._writer.write(request(Op.READ, entries))
        total = sum(length for _, length, _ in entries)
        assert await self._reader.readexactly(HEADER_BYTES) == header(Op.READ, len(entries), total)
        slices = [await self._reader.readexactly(length) for _, length, _ in entries]
        sums = np.frombuffer(await self._reader.readexactly(4 * len(entries) if self._with_checksums else 0), "<u4")
        verdicts = list(await self._reader.readexactly(len(entries)))
        for piece, verdict, announced in zip(slices, verdicts, sums, strict=False):
            assert announced == zlib.crc32(piece) or (verdict == SliceVerdict.STALE and announced == 0)
        return Answered(slices, verdicts)

    async def write(self, entries: Sequence[tuple[int, int, int]], slices: Sequence[bytes]) -> Answered:
        sums = checksums(slices) if self._with_checksums else b""
        self._writer.write(request(Op.WRITE, entries, sum(map(len, slices))) + b"".join(slices) + sums)
        await self._writer.drain()
        assert await self._reader.readexactly(HEADER_BYTES) == header(Op.WRITE, len(entries), 0)
        return Answered([], list(await self._reader.readexactly(len(entries))))

    def close(self) -> None:
        self._writer.close()


class PlainOwner:
    """The owner's end of every lane that is opened to it."""

    def __init__(self, region: Region, identity: Identity) -> None:
        self.notes: list[bytes] = []
        self.num_requests = 0
        self._region = region
        self._incarnation = identity.incarnation
        listening = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint(host_id(), identity.incarnation, {"tcp": f"127.0.0.1:{listening.getsockname()[1]}"})
        self._listener = Listener(listening, self._serve, "a plain owner")

    async def close(self) -> None:
        await self._listener.close()

    async def _serve(self, stream: SocketStream) -> None:
        caller = await answer(stream, self._region, self._incarnation, None)
        assert caller is not None
        try:
            if caller.role is LaneRole.CONTROL:
                await serve_notices(stream, caller.identity.name, lambda _, payload: self.notes.append(payload))
            while True:
                await self._serve_one(stream, caller.checksums)
        except PeerClosed:
            return

    async def _serve_one(self, stream: SocketStream, with_checksums: bool) -> None:
        op, count, payload_bytes = _HEADER.unpack(await stream.receive(HEADER_BYTES))
        table = np.frombuffer(await stream.receive(count * TABLE.itemsize), TABLE)
        self.num_requests += 1
        total = int(table["length"].sum())
        assert op in (Op.READ, Op.WRITE) and payload_bytes == (total if op == Op.WRITE else 0)
        assert count <= MOST_SLICES and total <= MOST_BYTES
        verdicts = bytearray(SliceVerdict.STALE if self._is_stale(*entry) else SliceVerdict.DONE for entry in table.tolist())
        if op == Op.READ:
            slices = [self._bytes(offset, length) for offset, length, _ in table.tolist()]
            slices = [bytes(len(piece)) if verdict else piece for piece, verdict in zip(slices, verdicts, strict=True)]
            await stream.send(header(op, count, total) + b"".join(slices) + (checksums(slices) if with_checksums else b"") + verdicts)
            return
        slices = [await stream.receive(length) for length in table["length"].tolist()]
        announced = await stream.receive(4 * count) if with_checksums else b""
        assert announced == (checksums(slices) if with_checksums else b"")
        for (offset, length, _), piece, verdict in zip(table.tolist(), slices, verdicts, strict=True):
            if not verdict:
                self._region.memory[offset : offset + length] = np.frombuffer(piece, np.uint8)
        await stream.send(header(op, count, 0) + verdicts)

    def _is_stale(self, offset: int, length: int, generation: int) -> bool:
        granule = offset // self._region.granule
        assert length >= 1 and (offset + length - 1) // self._region.granule == granule
        return int(self._region.generations[granule]) != generation

    def _bytes(self, offset: int, length: int) -> bytes:
        return self._region.memory[offset : offset + length].tobytes()
