"""The bytes of the tcp transport. Little-endian; a connection is one lane, for data or for notifications.

Handshake, caller and owner in turn: Hello with the caller's name, Challenge, a proof of 32 bytes, Welcome (messenger.tcp_handshake).

A control lane then carries notifications (messenger.notices). On a data lane requests follow, each a header and `count` table entries
(offset, length, generation), answered one after another:
- READ: nothing more. Answer: header, the bytes of all slices (zeros for what was refused at once), verdicts u8 [count].
- WRITE: the bytes of all slices. Answer: header, verdicts u8 [count] (messenger.plan.SliceVerdict).
With checksums, zlib's CRC-32 of each slice, u32 [count], follows the bytes of the slices. A verdict is the last word on a slice, for it may
turn stale while it is moved. A READ of no slices asks whether somebody is there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from messenger.base import Identity, Region
from springtide.errors import SpringtideError

MAGIC = b"SPMG"
VERSION = 2
MAX_SLICES = 1024
MAX_NAME_BYTES = 256
NONCE_BYTES = PROOF_BYTES = 32

TABLE = np.dtype([("offset", "<u8"), ("length", "<u8"), ("generation", "<u8")])
CHECKSUM = np.dtype("<u4")

_HELLO = struct.Struct(f"<4sHBBHQQ{NONCE_BYTES}s")
_CHALLENGE = struct.Struct(f"<4sHBxQ{NONCE_BYTES}s")
_WELCOME = struct.Struct(f"<B7xQQ{PROOF_BYTES}s")
_HEADER = struct.Struct("<B3xIQ")
HELLO_BYTES, CHALLENGE_BYTES, WELCOME_BYTES, HEADER_BYTES = _HELLO.size, _CHALLENGE.size, _WELCOME.size, _HEADER.size

_HAS_SECRET, _CHECKSUMS = 1, 2


class ProtocolError(SpringtideError):
    """The peer sent what it must not. Its connection is closed."""


class Op(IntEnum):
    READ = 1
    WRITE = 2


class Role(IntEnum):
    """Of a lane."""

    DATA = 0
    CONTROL = 1


class Verdict(IntEnum):
    """Of a handshake."""

    WELCOME = 0
    OTHER_INCARNATION = 1
    WRONG_SECRET = 2


@dataclass(frozen=True, slots=True)
class Hello:
    version: int
    role: Role
    has_secret: bool
    checksums: bool
    """The caller wants every slice to carry one."""
    name_bytes: int
    expected_incarnation: int
    incarnation: int
    nonce: bytes

    def pack(self) -> bytes:
        flags = self.has_secret * _HAS_SECRET | self.checksums * _CHECKSUMS
        fields = (MAGIC, self.version, self.role, flags, self.name_bytes, self.expected_incarnation, self.incarnation, self.nonce)
        return _HELLO.pack(*fields)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Hello:
        magic, version, role, flags, name_bytes, expected_incarnation, incarnation, nonce = _HELLO.unpack(data)
        if magic != MAGIC:
            raise ProtocolError(f"a handshake begins with {MAGIC!r}, not {magic!r}")
        if name_bytes > MAX_NAME_BYTES:
            raise ProtocolError(f"a name of {name_bytes} bytes, more than {MAX_NAME_BYTES}")
        if role not in Role.__members__.values():
            raise ProtocolError(f"unknown role of a lane: {role}")
        has_secret, checksums = bool(flags & _HAS_SECRET), bool(flags & _CHECKSUMS)
        return cls(version, Role(role), has_secret, checksums, name_bytes, expected_incarnation, incarnation, nonce)


@dataclass(frozen=True, slots=True)
class Challenge:
    version: int
    has_secret: bool
    incarnation: int
    nonce: bytes

    def pack(self) -> bytes:
        return _CHALLENGE.pack(MAGIC, self.version, self.has_secret * _HAS_SECRET, self.incarnation, self.nonce)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Challenge:
        magic, version, flags, incarnation, nonce = _CHALLENGE.unpack(data)
        if magic != MAGIC:
            raise ProtocolError(f"a handshake is answered with {MAGIC!r}, not {magic!r}")
        return cls(version, bool(flags & _HAS_SECRET), incarnation, nonce)


@dataclass(frozen=True, slots=True)
class Welcome:
    """`region_bytes` and `granule` describe the region that the caller may now use; zeros unless it is welcome."""

    verdict: Verdict
    region_bytes: int
    granule: int
    proof: bytes

    def pack(self) -> bytes:
        return _WELCOME.pack(self.verdict, self.region_bytes, self.granule, self.proof)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Welcome:
        verdict, region_bytes, granule, proof = _WELCOME.unpack(data)
        try:
            return cls(Verdict(verdict), region_bytes, granule, proof)
        except ValueError as error:
            raise ProtocolError(f"unknown verdict of a handshake: {verdict}") from error


def encode_name(identity: Identity) -> bytes:
    """Raises ValueError when it is too long."""
    name = identity.name.encode()
    if len(name) > MAX_NAME_BYTES:
        raise ValueError(f"a Messenger's name has at most {MAX_NAME_BYTES} bytes, not {len(name)}: {identity.name[:40]!r}...")
    return name


@dataclass(frozen=True, slots=True)
class Header:
    """`payload_bytes`: of the slices that follow (those of a WRITE, and of the answer to a READ)."""

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
