"""The contract of a transport.

A process registers one `Region` and listens. A peer connects and reads or writes slices of that region without the owner's code
running for it. Each remote slice carries the generation that its granule must have: a stale one is refused, slice by slice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from springtide.errors import SpringtideError


@dataclass(frozen=True, slots=True)
class Region:
    """Memory lent to peers. `memory` is writable and `len(generations) * granule` bytes long (uint8 [n]); `generations` (uint64 [granules])
    is its fence: the owner changes a granule's generation when it gives the granule away, and from then on old handles are stale."""

    memory: np.ndarray
    generations: np.ndarray
    granule: int


@dataclass(frozen=True, slots=True)
class Slice:
    """`length` bytes at `local_offset` of the own region and `remote_offset` of the peer's, within one remote granule of `generation`."""

    local_offset: int
    remote_offset: int
    length: int
    generation: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What came of a batch. `failed` maps the index of a slice to its error (StaleHandle); all others are done. A batch that failed as
    a whole raises instead (PeerLost, DeadlineExceeded)."""

    num_bytes: int
    failed: Mapping[int, SpringtideError] = field(default_factory=dict)


class DeadlineExceeded(SpringtideError):
    """The operation did not end in time; a write may still be landing until its connection is closed."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How to reach a listening Messenger. Travels as JSON in the owner's membership record."""

    host_id: str
    """Same for all processes that can share memory (boot id and IPC reach)."""
    incarnation: int
    addresses: Mapping[str, str]
    """By transport name: `shm` -> Unix socket path, `tcp` -> host:port, `inproc` -> name."""


NotifyHandler = Callable[[str, bytes], None]
"""Called in the event loop with the peer's name and the payload, after the bytes of the batch are visible. Must not block."""


class Connection(ABC):
    """To one peer. Safe for concurrent batches from one event loop. Notifications arrive in the order of their writes."""

    @abstractmethod
    async def read(self, batch: Sequence[Slice], timeout_s: float) -> Completion:
        """Peer to here."""

    @abstractmethod
    async def write(self, batch: Sequence[Slice], timeout_s: float, notify: bytes | None = None) -> Completion:
        """Here to peer; then, when no slice failed, `notify` is delivered to the peer's handler. `batch` may be empty."""

    @abstractmethod
    async def close(self) -> None:
        """After it returns, no byte of an earlier write can land any more."""


class Transport(ABC):
    """One way to move bytes. `connect` raises PeerLost when the peer is away or is another incarnation than the endpoint says."""

    name: str

    @abstractmethod
    async def listen(self, region: Region, on_notify: NotifyHandler) -> str:
        """Serves `region` to peers; returns the address for `Endpoint.addresses`."""

    @abstractmethod
    async def connect(self, endpoint: Endpoint, region: Region, own_name: str) -> Connection:
        """`region` is this side's memory, which the slices' local offsets mean; `own_name` is told to the peer's handler."""

    @abstractmethod
    async def close(self) -> None:
        """Stops serving and closes every connection, both ways."""
