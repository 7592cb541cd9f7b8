"""The handshake of a lane: both sides prove that they know the cluster's secret, and the owner that it is who was looked for.

Caller and owner speak in turn: Hello with the caller's name, Challenge, a proof, Welcome (docs/wire.md has their bytes). A proof is
HMAC-SHA256, keyed with the secret, over the side's label and everything said so far: versions, roles, names, incarnations and both sides'
nonces; so it fits no other connection, no other peer and not the other direction. The address that was dialled is not in it, and what
follows the handshake is neither encrypted nor signed: against somebody who can change packets in flight, or have the caller dial him and
pass everything on, put the cluster on a network of its own.
"""

from __future__ import annotations

import hmac
import os
import struct
from dataclasses import dataclass, replace
from enum import IntEnum

from messenger.base import Identity, Region, WrongSecret
from messenger.stream import SocketStream
from springtide.errors import PeerLost, SpringtideError

MAGIC = b"SPMG"
VERSION = 2
MAX_NAME_BYTES = 256
HANDSHAKE_ROUND_TRIPS = 2
NONCE_BYTES = PROOF_BYTES = 32

_HELLO = struct.Struct(f"<4sHBBHQQ{NONCE_BYTES}s")
_CHALLENGE = struct.Struct(f"<4sHBxQ{NONCE_BYTES}s")
_WELCOME = struct.Struct(f"<B7xQQ{PROOF_BYTES}s")
HELLO_BYTES, CHALLENGE_BYTES, WELCOME_BYTES = _HELLO.size, _CHALLENGE.size, _WELCOME.size

_HAS_SECRET, _CHECKSUMS = 1, 2
_CALLER, _OWNER = b"springtide messenger caller", b"springtide messenger owner"
_NO_PROOF = bytes(PROOF_BYTES)


class ProtocolError(SpringtideError):
    """The peer sent what it must not. Its connection is closed."""


class LaneRole(IntEnum):
    """What a lane is for."""

    DATA = 0
    CONTROL = 1


class HandshakeVerdict(IntEnum):
    """What the owner thinks of the caller."""

    WELCOME = 0
    OTHER_INCARNATION = 1
    WRONG_SECRET = 2


@dataclass(frozen=True, slots=True)
class Hello:
    """The caller's first words; its name follows."""

    version: int
    role: LaneRole
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
    def unpack(cls, data: bytes) -> Hello:
        """The Hello in `data`. Raises ProtocolError."""
        magic, version, role, flags, name_bytes, expected_incarnation, incarnation, nonce = _HELLO.unpack(data)
        if magic != MAGIC:
            raise ProtocolError(f"a handshake begins with {MAGIC!r}, not {magic!r}")
        if name_bytes > MAX_NAME_BYTES:
            raise ProtocolError(f"a name of {name_bytes} bytes, more than {MAX_NAME_BYTES}")
        if role not in LaneRole.__members__.values():
            raise ProtocolError(f"unknown role of a lane: {role}")
        has_secret, checksums = bool(flags & _HAS_SECRET), bool(flags & _CHECKSUMS)
        return cls(version, LaneRole(role), has_secret, checksums, name_bytes, expected_incarnation, incarnation, nonce)


@dataclass(frozen=True, slots=True)
class Challenge:
    """The owner's answer to a Hello."""

    version: int
    has_secret: bool
    incarnation: int
    nonce: bytes

    def pack(self) -> bytes:
        return _CHALLENGE.pack(MAGIC, self.version, self.has_secret * _HAS_SECRET, self.incarnation, self.nonce)

    @classmethod
    def unpack(cls, data: bytes) -> Challenge:
        """The Challenge in `data`. Raises ProtocolError."""
        magic, version, flags, incarnation, nonce = _CHALLENGE.unpack(data)
        if magic != MAGIC:
            raise ProtocolError(f"a handshake is answered with {MAGIC!r}, not {magic!r}")
        return cls(version, bool(flags & _HAS_SECRET), incarnation, nonce)


@dataclass(frozen=True, slots=True)
class Welcome:
    """The owner's answer to a proof. `region_bytes` and `granule` describe the region that the caller may now use; zeros unless it is
    welcome."""

    verdict: HandshakeVerdict
    region_bytes: int
    granule: int
    proof: bytes

    def pack(self) -> bytes:
        return _WELCOME.pack(self.verdict, self.region_bytes, self.granule, self.proof)

    @classmethod
    def unpack(cls, data: bytes) -> Welcome:
        """The Welcome in `data`. Raises ProtocolError."""
        verdict, region_bytes, granule, proof = _WELCOME.unpack(data)
        if verdict not in HandshakeVerdict.__members__.values():
            raise ProtocolError(f"unknown verdict of a handshake: {verdict}")
        if verdict == HandshakeVerdict.WELCOME and (granule < 1 or region_bytes % granule):
            raise ProtocolError(f"a region of {region_bytes} bytes in granules of {granule}")
        return cls(HandshakeVerdict(verdict), region_bytes, granule, proof)

    def unproven(self) -> bytes:
        """What its own proof covers: all of it but the proof."""
        return replace(self, proof=_NO_PROOF).pack()


@dataclass(frozen=True, slots=True)
class WelcomedCaller:
    """Whom the owner has welcomed, and to what."""

    identity: Identity
    role: LaneRole
    checksums: bool


async def call(
    stream: SocketStream, expected_incarnation: int, identity: Identity, role: LaneRole, checksums: bool, secret: bytes | None
) -> Welcome:
    """Shakes hands as the caller. Raises PeerLost when the peer is another incarnation, speaks another version, or no Messenger at all;
    WrongSecret when it does not know the secret, or knows one where this side does not."""
    name = encode_name(identity)
    hello = Hello(
        VERSION, role, secret is not None, checksums, len(name), expected_incarnation, identity.incarnation, os.urandom(NONCE_BYTES)
    )
    said = hello.pack() + name
    await stream.send(said)
    try:
        answer = await stream.receive(CHALLENGE_BYTES)
        challenge = Challenge.unpack(answer)
        _check_challenge(challenge, secret)
        said += answer
        await stream.send(_prove(secret, _CALLER, said))
        welcome = Welcome.unpack(await stream.receive(WELCOME_BYTES))
    except ProtocolError as error:
        raise PeerLost(f"no Messenger answers there: {error}") from error
    if welcome.verdict is HandshakeVerdict.WRONG_SECRET:
        raise WrongSecret("the peer refuses this side's cluster_secret: it has another")
    if not hmac.compare_digest(welcome.proof, _prove(secret, _OWNER, said + welcome.unproven())):
        raise WrongSecret("the peer does not know the cluster_secret")
    if welcome.verdict is HandshakeVerdict.OTHER_INCARNATION:
        raise PeerLost(f"the peer has restarted: it is incarnation {challenge.incarnation}, not {expected_incarnation}")
    return welcome


async def answer(stream: SocketStream, region: Region, incarnation: int, secret: bytes | None) -> WelcomedCaller | None:
    """Shakes hands as the owner. None when the caller has been told why it is not welcome. Raises ProtocolError on what is no handshake, or
    shows no knowledge of the secret."""
    greeting = await stream.receive(HELLO_BYTES)
    hello = Hello.unpack(greeting)
    name = await stream.receive(hello.name_bytes)
    try:
        identity = Identity(name.decode(), hello.incarnation)
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a name that is not UTF-8: {error}") from error
    challenge = Challenge(VERSION, secret is not None, incarnation, os.urandom(NONCE_BYTES)).pack()
    await stream.send(challenge)
    if hello.version != VERSION:
        return None
    if hello.has_secret != (secret is not None):
        raise ProtocolError(f"{identity.name!r} has {'a' if hello.has_secret else 'no'} cluster_secret, unlike this side")
    said = greeting + name + challenge
    if not hmac.compare_digest(await stream.receive(PROOF_BYTES), _prove(secret, _CALLER, said)):
        await stream.send(Welcome(HandshakeVerdict.WRONG_SECRET, 0, 0, _NO_PROOF).pack())
        raise ProtocolError(f"{identity.name!r} does not know the cluster_secret")
    welcome = Welcome(HandshakeVerdict.WELCOME, region.memory.nbytes, region.granule, _NO_PROOF)
    if hello.expected_incarnation != incarnation:
        welcome = Welcome(HandshakeVerdict.OTHER_INCARNATION, 0, 0, _NO_PROOF)
    await stream.send(replace(welcome, proof=_prove(secret, _OWNER, said + welcome.unproven())).pack())
    return WelcomedCaller(identity, hello.role, hello.checksums) if welcome.verdict is HandshakeVerdict.WELCOME else None


def encode_name(identity: Identity) -> bytes:
    """The bytes of a Messenger's name. Raises ValueError when they are too many."""
    name = identity.name.encode()
    if len(name) > MAX_NAME_BYTES:
        raise ValueError(f"a Messenger's name has at most {MAX_NAME_BYTES} bytes, not {len(name)}: {identity.name[:40]!r}...")
    return name


def _prove(secret: bytes | None, label: bytes, said: bytes) -> bytes:
    """A proof; zeros where there is no secret."""
    return hmac.digest(secret, label + said, "sha256") if secret is not None else _NO_PROOF


def _check_challenge(challenge: Challenge, secret: bytes | None) -> None:
    if challenge.version != VERSION:
        raise PeerLost(f"the peer speaks version {challenge.version} of the protocol, not {VERSION}")
    if challenge.has_secret and secret is None:
        raise WrongSecret("the peer wants a cluster_secret, and this side has none")
    if not challenge.has_secret and secret is not None:
        raise WrongSecret("the peer has no cluster_secret, and this side has one")
