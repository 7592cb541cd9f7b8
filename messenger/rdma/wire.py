"""The control messages of the transport, to and from protobuf."""

from __future__ import annotations

from dataclasses import dataclass

from messenger.base import Identity
from messenger.rdma.nic import Registration, RemoteMemory, RemoteRegion
from messenger.rdma.ports import LinkLayer, PortAddress
from messenger.rdma.queue_pair import QueuePairAddress
from springtide.rpc import rdma_pb2 as pb

VERSION = 1


@dataclass(frozen=True, slots=True)
class OfferedPath:
    """A queue pair that the caller has made, to be connected with one of the peer's."""

    pair: QueuePairAddress
    port: int
    """The index of the port among those that the peer has named."""


@dataclass(frozen=True, slots=True)
class AnsweredPath:
    """The peer's queue pair for an offered path, and what it lends over it."""

    index: int
    """The lending side's number for it."""
    pair: QueuePairAddress
    remote: RemoteRegion


@dataclass(frozen=True, slots=True)
class AnsweredOffer:
    """What became of an offer."""

    session: bytes
    region_bytes: int
    granule: int
    paths: list[AnsweredPath | None]
    """The paths in the order of the offer; None: that one could not be connected."""


def offer_to_pb(expected_incarnation: int, caller: Identity, paths: list[OfferedPath], session: bytes) -> pb.RdmaOffer:
    return pb.RdmaOffer(
        version=VERSION,
        expected_incarnation=expected_incarnation,
        caller_name=caller.name,
        caller_incarnation=caller.incarnation,
        paths=[pb.RdmaOfferedPath(queue_pair=pair_to_pb(path.pair), port=path.port) for path in paths],
        session=pb.RdmaSession(token=session),
    )


def answer_to_pb(answer: AnsweredOffer) -> pb.RdmaAnswer:
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


def answer_from_pb(message: pb.RdmaAnswer) -> AnsweredOffer:
    """The answer that a peer gave. Raises ValueError for what no peer of this version says."""
    if message.granule < 1 or message.region_bytes % message.granule:
        raise ValueError(f"a region of {message.region_bytes} bytes in granules of {message.granule}")
    paths = [_answered_path(path) if path.HasField("queue_pair") else None for path in message.paths]
    return AnsweredOffer(message.session.token, message.region_bytes, message.granule, paths)


def port_to_pb(port: PortAddress) -> pb.RdmaPort:
    return pb.RdmaPort(link=port.link, gid=port.gid, lid=port.lid, mtu=port.mtu)


def port_from_pb(message: pb.RdmaPort) -> PortAddress:
    """The address of a port. Raises ValueError for an unknown kind of link."""
    return PortAddress(LinkLayer(message.link), message.gid, message.lid, message.mtu)


def pair_to_pb(pair: QueuePairAddress) -> pb.RdmaQueuePair:
    return pb.RdmaQueuePair(
        port=port_to_pb(pair.port),
        number=pair.number,
        first_packet=pair.first_packet,
        max_reads_out=pair.max_reads_out,
        max_reads_in=pair.max_reads_in,
    )


def pair_from_pb(message: pb.RdmaQueuePair) -> QueuePairAddress:
    """The address of a queue pair. Raises ValueError for an unknown kind of link."""
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
