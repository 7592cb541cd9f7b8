"""Who is at the other end of a lane: both sides prove that they know the cluster's secret, and the owner that it is who was looked for.

A proof is HMAC-SHA256, keyed with the secret, over the side's label and everything said so far: versions, roles, names, incarnations and
both sides' nonces; so it fits no other connection, no other peer and not the other direction. The address that was dialled is not in it,
and what follows the handshake is neither encrypted nor signed: against somebody who can change packets under way, or have the caller dial
him and pass everything on, put the cluster on a network of its own.
"""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass

from messenger.base import Identity, Region, Unauthenticated
from messenger.stream import Stream, Vector
from messenger.tcp_protocol import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    VERSION,
    WELCOME_BYTES,
    Challenge,
    Hello,
    ProtocolError,
    Role,
    Verdict,
    Welcome,
    encode_name,
)
from springtide.errors import PeerLost

_CALLER, _OWNER = b"springtide messenger caller", b"springtide messenger owner"


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom the owner has welcomed, and to what."""

    identity: Identity
    role: Role
    checksums: bool


def _prove(secret: bytes | None, label: bytes, said: bytes) -> bytes:
    """Zeros where there is no secret."""
    return hmac.digest(secret, label + said, "sha256") if secret is not None else bytes(PROOF_BYTES)


async def call(stream: Stream, expected_incarnation: int, identity: Identity, role: Role, checksums: bool, secret: bytes | None) -> Welcome:
    """The caller's side. Raises PeerLost when the peer is another incarnation, speaks another version, or no Messenger at all;
    Unauthenticated when it does not know the secret, or knows one where this side does not."""
    name = encode_name(identity)
    hello = Hello(
        VERSION, role, secret is not None, checksums, len(name), expected_incarnation, identity.incarnation, os.urandom(NONCE_BYTES)
    )
    said = hello.pack() + name
    await stream.send(Vector([memoryview(said)]))
    try:
        answer = bytes(await stream.receive(CHALLENGE_BYTES))
        challenge = Challenge.unpack(answer)
        _check_challenge(challenge, secret)
        said += answer
        await stream.send(Vector([memoryview(_prove(secret, _CALLER, said))]))
        welcome = Welcome.unpack(await stream.receive(WELCOME_BYTES))
    except ProtocolError as error:
        raise PeerLost(f"no Messenger answers there: {error}") from error
    if welcome.verdict is Verdict.WRONG_SECRET:
        raise Unauthenticated("the peer refuses this side's cluster_secret: it has another")
    if not hmac.compare_digest(welcome.proof, _prove(secret, _OWNER, said + _facts(welcome))):
        raise Unauthenticated("the peer does not know the cluster_secret")
    if welcome.verdict is Verdict.OTHER_INCARNATION:
        raise PeerLost(f"the peer has restarted: it is incarnation {challenge.incarnation}, not {expected_incarnation}")
    return welcome


def _check_challenge(challenge: Challenge, secret: bytes | None) -> None:
    if challenge.version != VERSION:
        raise PeerLost(f"the peer speaks version {challenge.version} of the protocol, not {VERSION}")
    if challenge.has_secret and secret is None:
        raise Unauthenticated("the peer wants a cluster_secret, and this side has none")
    if not challenge.has_secret and secret is not None:
        raise Unauthenticated("the peer has no cluster_secret, and this side has one")


async def answer(stream: Stream, region: Region, incarnation: int, secret: bytes | None) -> Caller | None:
    """The owner's side. None when the caller has been told why it is not welcome. Raises ProtocolError on what is no handshake, or shows no
    knowledge of the secret."""
    greeting = bytes(await stream.receive(HELLO_BYTES))
    hello = Hello.unpack(greeting)
    name = bytes(await stream.receive(hello.name_bytes))
    try:
        identity = Identity(name.decode(), hello.incarnation)
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a name that is not UTF-8: {error}") from error
    challenge = Challenge(VERSION, secret is not None, incarnation, os.urandom(NONCE_BYTES)).pack()
    await stream.send(Vector([memoryview(challenge)]))
    if hello.version != VERSION:
        return None
    if hello.has_secret != (secret is not None):
        raise ProtocolError(f"{identity.name!r} has {'a' if hello.has_secret else 'no'} cluster_secret, unlike this side")
    said = greeting + name + challenge
    if not hmac.compare_digest(bytes(await stream.receive(PROOF_BYTES)), _prove(secret, _CALLER, said)):
        await stream.send(Vector([memoryview(Welcome(Verdict.WRONG_SECRET, 0, 0, bytes(PROOF_BYTES)).pack())]))
        raise ProtocolError(f"{identity.name!r} does not know the cluster_secret")
    welcome = Welcome(Verdict.WELCOME, region.memory.nbytes, region.granule, b"")
    if hello.expected_incarnation != incarnation:
        welcome = Welcome(Verdict.OTHER_INCARNATION, 0, 0, b"")
    proof = _prove(secret, _OWNER, said + _facts(welcome))
    await stream.send(Vector([memoryview(Welcome(welcome.verdict, welcome.region_bytes, welcome.granule, proof).pack())]))
    return Caller(identity, hello.role, hello.checksums) if welcome.verdict is Verdict.WELCOME else None


def _facts(welcome: Welcome) -> bytes:
    """What of a Welcome its own proof covers: all the rest."""
    return Welcome(welcome.verdict, welcome.region_bytes, welcome.granule, bytes(PROOF_BYTES)).pack()
