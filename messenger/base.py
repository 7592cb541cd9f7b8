"""The contract of a transport.

A process registers one `Region` and listens. A peer connects and reads or writes slices of that region without the owner's code
running for it. Each remote slice carries the generation that its granule must have: a stale one is refused, slice by slice.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from springtide.errors import PeerLost, SpringtideError
from springtide.values import value_class


class TransferTimeout(SpringtideError):
    """The operation did not end in time. Own memory is at rest; the peer's may still be written until `Connection.drain` returns."""


class InvalidSlice(SpringtideError):
    """A slice is empty, outside its region or across granules. Nothing of its batch was moved."""


class CorruptBytes(SpringtideError):
    """The checksum of a slice was wrong where it arrived: what is there now is not what was sent."""


class WrongSecret(PeerLost):
    """One side does not know the cluster's secret."""


@dataclass(frozen=True, slots=True)
class Region:
    """Memory lent to peers. `memory` is writable and `len(generations) * granule` bytes long (uint8 [n]); `generations` (uint64 [granules])
    is its fence: the owner changes a granule's generation when it gives the granule away, and from then on old handles are stale.

    The owner changes generations in the event loop that its transports run in, and then calls `Transport.settle`: from there on `tcp`
    guarantees that not one byte of an old handle lands. With `shm` and `rdma` a piece may be in flight at that moment in the peer's process
    or NIC, so granules that a live peer may be writing are to be fenced (`Transport.fence`) or acknowledged by the peer before they are
    given away.
    """

    memory: np.ndarray
    generations: np.ndarray
    granule: int

    def __post_init__(self) -> None:
        if self.granule < 1:
            raise ValueError(f"Region.granule must be at least 1 byte, not {self.granule}")
        if self.memory.dtype != np.uint8 or self.memory.ndim != 1 or not self.memory.flags.c_contiguous:
            raise ValueError(f"Region.memory must be contiguous uint8 [n], not {self.memory.dtype} {list(self.memory.shape)}")
        if self.generations.dtype != np.uint64 or self.generations.ndim != 1:
            raise ValueError(f"Region.generations must be uint64 [granules], not {self.generations.dtype} {list(self.generations.shape)}")
        if self.memory.nbytes != len(self.generations) * self.granule:
            raise ValueError(f"Region.memory has {self.memory.nbytes} bytes, not {len(self.generations)} granules of {self.granule}")


@value_class(frozen=True, slots=True)
class Slice:
    """`length` bytes at `local_offset` of the own region and `remote_offset` of the peer's, within one remote granule of `generation`."""

    local_offset: int
    remote_offset: int
    length: int
    generation: int


@value_class(frozen=True, slots=True)
class Completion:
    """What came of a batch. `num_bytes` were moved; `failed` maps the index of a slice to its error (StaleHandle, CorruptBytes); all others
    are done. What a failed slice of a read left in its local bytes is undefined. A batch that failed as a whole raises instead (PeerLost,
    TransferTimeout, InvalidSlice)."""

    num_bytes: int
    failed: Mapping[int, SpringtideError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Identity:
    """A speaker: the name that people know (the node id) and the incarnation of the process behind it."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How to reach a listening Messenger. It travels as JSON in the owner's membership record."""

    host_id: str
    """An id that all processes which can share memory have in common (boot id and mount namespace)."""
    incarnation: int
    addresses: Mapping[str, str]
    """Addresses by transport name: `shm` -> path of a Unix socket, `tcp` and `rdma` -> host:port."""

    def to_json(self) -> str:
        return json.dumps({"host_id": self.host_id, "incarnation": self.incarnation, "addresses": dict(self.addresses)})

    @classmethod
    def from_json(cls, text: str) -> Endpoint:
        """The endpoint that `to_json` made `text` of. Raises ValueError when it is none."""
        fields = json.loads(text)
        try:
            addresses = {str(name): str(address) for name, address in fields["addresses"].items()}
            return cls(host_id=str(fields["host_id"]), incarnation=int(fields["incarnation"]), addresses=addresses)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a Messenger endpoint ({error!r}): {text[:200]}") from error


@value_class(frozen=True, slots=True)
class Traffic:
    """What has come through between this process and a peer, whoever opened the connections."""

    received_bytes: int = 0
    """What has come from the peer. With `acknowledged_bytes` it is of the connections there are: more than before whenever anything has
    come through, less when one was closed."""
    acknowledged_bytes: int = 0
    """What the peer's kernel has taken: its process may hang, as long as there is room."""
    round_trip_s: float = 0.0
    """The time within which what is sent is acknowledged as a rule: the smoothed one, and four times what it varies by (RFC 6298)."""
    least_round_trip_s: float = 0.0
    """The least that there was: what the way takes when nothing is queued on it. 0: not known."""

    @property
    def num_bytes(self) -> int:
        return self.received_bytes + self.acknowledged_bytes

    def __add__(self, other: Traffic) -> Traffic:
        """That of several connections together."""
        received, acknowledged = self.received_bytes + other.received_bytes, self.acknowledged_bytes + other.acknowledged_bytes
        least_s = min((traffic.least_round_trip_s for traffic in (self, other) if traffic.least_round_trip_s), default=0.0)
        return Traffic(received, acknowledged, max(self.round_trip_s, other.round_trip_s), least_s)


NotifyHandler = Callable[[str, bytes], None]
"""The owner's function for notifications, called in the event loop with the peer's name and the payload, after the bytes of the batch are
visible. It must not block."""


class Connection(ABC):
    """A way to one peer, safe for concurrent batches from one event loop. Notifications arrive in the order of their writes.

    A batch that misses its deadline raises TransferTimeout; where the transport cannot give up one batch by itself (rdma) that closes the
    connection. A cancelled one ends where it can be left, or is given up within a second. So whenever `read` or `write` has
    ended, however it ended, the own memory of the batch is at rest and belongs to the caller again. A peer that is silent in the middle
    of a batch for some 1.5 s is lost, or for longer where the network is slow.
    """

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether batches can be moved. Once the peer is known to be lost or the connection closed, they cannot: every later one raises
        PeerLost."""

    @abstractmethod
    async def read(self, batch: Sequence[Slice], timeout_s: float) -> Completion:
        """Moves the slices from the peer to here."""

    @abstractmethod
    async def write(self, batch: Sequence[Slice], timeout_s: float, notify: bytes | None = None) -> Completion:
        """Moves the slices from here to the peer; then, when no slice failed, `notify` is delivered to the peer's handler: exactly once
        when this returns, at most once when it raises. `batch` may be empty."""

    async def drain(self) -> None:
        """Returns when no byte of a write that has failed or was cancelled can land any more (a peer that hangs is given a second to
        say so; what is then still in its kernel is refused by generation). Batches in flight on an open connection go on."""
        if not self.is_open:
            await self.close()

    @abstractmethod
    async def close(self) -> None:
        """Ends every batch; after it returns, as after `drain`, no byte of any can land. Idempotent."""


class Transport(ABC):
    """A way to move bytes (docs/add-a-transport.md)."""

    name: str
    """The name in configurations and endpoints (messenger.registry)."""
    one_host_only: bool = False
    """It leads to peers on the same host only."""

    @abstractmethod
    async def listen(self, region: Region, identity: Identity, on_notify: NotifyHandler) -> str:
        """Serves `region` to peers; returns the address for `Endpoint.addresses`. Raises OSError, ValueError or SpringtideError."""

    @abstractmethod
    async def connect(self, endpoint: Endpoint, region: Region, identity: Identity) -> Connection:
        """Connects to a peer that listens. `region` is this side's memory, which the slices' local offsets mean; `identity`, this side's
        too, is told to the peer. Raises PeerLost when the peer is away or is another incarnation than the endpoint says."""

    def settle(self) -> None:  # noqa: B027 (nothing to wait for where the owner's loop does the writing, or somebody else's process)
        """Waits for writers. To be called when the owner has changed generations: returns when no writer that relied on the old ones is at
        work, with the limits that `Region` names. It takes microseconds."""

    def traffic(self, incarnation: int) -> Traffic:
        """That with the peer of this incarnation; none where nobody counts it."""
        return Traffic()

    @abstractmethod
    async def fence(self, peer: Identity) -> bool:
        """Cuts off what `peer` opened to here. True: nothing of its earlier writes can land any more. False: it can (`shm`, where a
        process that hangs still has the memory mapped)."""

    @abstractmethod
    async def close(self) -> None:
        """Stops serving and closes every connection, both ways. Idempotent."""
