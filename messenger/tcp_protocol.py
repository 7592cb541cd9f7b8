"""The bytes of the tcp transport. Little-endian; one connection is a lane, requests are answered in their order.

Handshake: Hello with the caller's name, answered by Welcome. Then requests, each a header and `count` table entries (offset, length,
generation), and
- READ: nothing more. Answer: header, refused u8 [count], the bytes of the slices not refused, refused u8 [count] again (a slice may
  turn stale while it is sent; its bytes are then not to be used).
- WRITE: the bytes of all slices. Answer: header, refused u8 [count].
- NOTIFY: the payload. Answer: header.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from messenger.base import Identity, Region
from springtide.errors import SpringtideError

MAGIC = b"SPMG"
VERSION = 1
MAX_SLICES = 1024
MAX_NOTIFY_BYTES = 1 << 20
MAX_NAME_BYTES = 256

TABLE = np.dtype([("offset", "<u8"), ("length", "<u8"), ("generation", "<u8")])

_HELLO = struct.Struct("<4sHHQQ")
_WELCOME = struct.Struct("<4sHHQQQ")
_HEADER = struct.Struct("<B3xIQ")
HELLO_BYTES, WELCOME_BYTES, HEADER_BYTES = _HELLO.size, _WELCOME.size, _HEADER.size


class ProtocolError(SpringtideError):
    """The peer sent what it must not. Its connection is closed."""


class Op(IntEnum):
    READ = 1
    WRITE = 2
    NOTIFY = 3


class Verdict(IntEnum):
    """Of a handshake."""

    WELCOME = 0
    OTHER_INCARNATION = 1
    OTHER_VERSION = 2


@dataclass(frozen=True, slots=True)
class Hello:
    version: int
    expected_incarnation: int
    incarnation: int
    name_bytes: int

    @staticmethod
    def pack(expected_incarnation: int, identity: Identity) -> bytes:
        name = identity.name.encode()
        if len(name) > MAX_NAME_BYTES:
            raise ValueError(f"a Messenger's name has at most {MAX_NAME_BYTES} bytes, not {len(name)}: {identity.name[:40]!r}...")
        return _HELLO.pack(MAGIC, VERSION, len(name), expected_incarnation, identity.incarnation) + name

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Hello:
        magic, version, name_bytes, expected_incarnation, incarnation = _HELLO.unpack(data)
        if magic != MAGIC:
            raise ProtocolError(f"a handshake begins with {MAGIC!r}, not {magic!r}")
        if name_bytes > MAX_NAME_BYTES:
            raise ProtocolError(f"a name of {name_bytes} bytes, more than {MAX_NAME_BYTES}")
        return cls(version, expected_incarnation, incarnation, name_bytes)


@dataclass(frozen=True, slots=True)
class Welcome:
    """`region_bytes` and `granule` describe the region that the caller may now use."""

    version: int
    verdict: Verdict
    incarnation: int
    region_bytes: int
    granule: int

    @staticmethod
    def pack(verdict: Verdict, incarnation: int, region: Region) -> bytes:
        return _WELCOME.pack(MAGIC, VERSION, verdict, incarnation, region.memory.nbytes, region.granule)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Welcome:
        magic, version, verdict, incarnation, region_bytes, granule = _WELCOME.unpack(data)
        if magic != MAGIC:
            raise ProtocolError(f"a handshake is answered with {MAGIC!r}, not {magic!r}")
        try:
            return cls(version, Verdict(verdict), incarnation, region_bytes, granule)
        except ValueError as error:
            raise ProtocolError(f"unknown verdict of a handshake: {verdict}") from error


@dataclass(frozen=True, slots=True)
class Header:
    """`payload_bytes`: of the slices that follow the table (WRITE, and the answer to READ) or of the notification."""

    op: Op
    count: int
    payload_bytes: int

    def pack(self) -> bytes:
        return _HEADER.pack(self.op, self.count, self.payload_bytes)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Header:
        op, count, payload_bytes = _HEADER.unpack(data)
        try:
            header = cls(Op(op), count, payload_bytes)
        except ValueError as error:
            raise ProtocolError(f"unknown operation {op}") from error
        if count > MAX_SLICES:
            raise ProtocolError(f"{count} slices in one message, more than {MAX_SLICES}")
        if header.op is Op.NOTIFY and (count or payload_bytes > MAX_NOTIFY_BYTES):
            raise ProtocolError(f"a notification of {payload_bytes} bytes and {count} slices; at most {MAX_NOTIFY_BYTES} and 0")
        return header


def check_table(table: np.ndarray, region: Region) -> None:
    """Raises ProtocolError, naming the value, unless every entry lies within one granule of `region`."""
    # As signed numbers: what is 2**63 or more shows as negative.
    offset, length, _ = table.view(np.int64).reshape(-1, 3).T
    size, granule = region.memory.nbytes, region.granule
    good = (length > 0) & (offset >= 0) & (offset <= size - length) & (offset % granule <= granule - length)
    if not good.all():
        index = int(np.argmin(good))
        start, count = int(table["offset"][index]), int(table["length"][index])
        inside = 0 < count <= size and start <= size - count
        reason = f"crosses a granule of {granule} bytes" if inside else f"outside the region of {size} bytes"
        raise ProtocolError(f"slice {index}, offset {start}, length {count}: {reason}")
