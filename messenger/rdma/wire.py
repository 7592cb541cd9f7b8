"""The control messages of the transport: as protobuf, and signed with the cluster's secret."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Literal

from messenger.base import Identity
from messenger.rdma.lane import RemoteMemory, RemoteRegion
from messenger.rdma.nic import Registration
from messenger.rdma.ports import Address, Link
from messenger.rdma.queue_pair import QueuePairAddress
from springtide.rpc import rdma_pb2 as pb

VERSION = 1
NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class OfferedPath:
    pair: QueuePairAddress
    port: int
    """Index among the ports that the peer has named."""


@dataclass(frozen=True, slots=True)
class AnsweredPath:
    index: int
    """By which the lending side knows it."""
    pair: QueuePairAddress
    remote: RemoteRegion


@dataclass(frozen=True, slots=True)
class Answer:
    session: bytes
    region_bytes: int
    granule: int
    paths: list[AnsweredPath | None]
    """In the order of the offer; None: that path could not be connected."""


def proof_of(secret: bytes | None, role: Literal["offer", "answer"], caller_nonce: bytes, server_nonce: bytes, message: bytes) -> bytes:
    """Empty without a secret. Nonces make it worthless for any other connection, the role for the other direction."""
    if secret is None:
        return b""
    parts = (role.encode(), caller_nonce, server_nonce, message)
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.digest(secret, framed, hashlib.sha256)


def offer_to_pb(expected_incarnation: int, caller: Identity, paths: list[OfferedPath], session: bytes) -> pb.RdmaOffer:
    return pb.RdmaOffer(
        version=VERSION,
        expected_incarnation=expected_incarnation,
        caller_name=caller.name,
        caller_incarnation=caller.incarnation,
        paths=[pb.RdmaOfferedPath(queue_pair=pair_to_pb(path.pair), port=path.port) for path in paths],
        session=pb.RdmaSession(token=session),
    )


def answer_to_pb(answer: Answer) -> pb.RdmaAnswer:
    paths = [
        pb.RdmaAnsweredPath()
        if path is None
        else pb.RdmaAnsweredPath(
            index=path.index,
            queue_pair=pair_to_pb(path.pair),
            region=_memory_to_pb(path.remote.memory),
            generations=_memory_to_pb(path.remote.generations),
            mailbox=_memory_to_pb(path.remote.mailbox),
        )
        for path in answer.paths
    ]
    session = pb.RdmaSession(token=answer.session)
    return pb.RdmaAnswer(session=session, region_bytes=answer.region_bytes, granule=answer.granule, paths=paths)


def answer_from_pb(message: pb.RdmaAnswer) -> Answer:
    """Raises ValueError for what no peer of this version says."""
    if message.granule < 1 or message.region_bytes % message.granule:
        raise ValueError(f"a region of {message.region_bytes} bytes in granules of {message.granule}")
    paths = [_answered_path(path) if path.HasField("queue_pair") else None for path in message.paths]
    return Answer(message.session.token, message.region_bytes, message.granule, paths)


def port_to_pb(port: Address) -> pb.RdmaPort:
    return pb.RdmaPort(link=port.link, gid=port.gid, lid=port.lid, mtu=port.mtu)


def port_from_pb(message: pb.RdmaPort) -> Address:
    """Raises ValueError for an unknown kind of link."""
    return Address(Link(message.link), message.gid, message.lid, message.mtu)


def pair_to_pb(pair: QueuePairAddress) -> pb.RdmaQueuePair:
    return pb.RdmaQueuePair(
        port=port_to_pb(pair.port),
        number=pair.number,
        first_packet=pair.first_packet,
        max_reads_out=pair.max_reads_out,
        max_reads_in=pair.max_reads_in,
    )


def pair_from_pb(message: pb.RdmaQueuePair) -> QueuePairAddress:
    """Raises ValueError."""
    port = port_from_pb(message.port)
    return QueuePairAddress(port, message.number, message.first_packet, message.max_reads_out, message.max_reads_in)


def lent(registration: Registration) -> RemoteMemory:
    """What a peer has to know of memory that it may use."""
    return RemoteMemory(registration.address, registration.num_bytes, registration.remote_key)


def _answered_path(message: pb.RdmaAnsweredPath) -> AnsweredPath:
    region, generations, mailbox = (_memory_from_pb(part) for part in (message.region, message.generations, message.mailbox))
    return AnsweredPath(message.index, pair_from_pb(message.queue_pair), RemoteRegion(region, generations, mailbox))


def _memory_to_pb(memory: RemoteMemory) -> pb.RdmaMemory:
    return pb.RdmaMemory(address=memory.address, num_bytes=memory.num_bytes, key=memory.key)


def _memory_from_pb(message: pb.RdmaMemory) -> RemoteMemory:
    return RemoteMemory(message.address, message.num_bytes, message.key)
