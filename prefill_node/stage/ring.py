"""The way of the activations from one stage to the next: buffers of shared memory, into which the stage before writes by Messenger; on
devices also buffers there, into which it copies, so that only word of it goes by Messenger.

Each stage serves `2 * depth` buffers, of which the first half is written by the stage before and the second is where its own results lie
until they are sent, and `depth` on its device. Pass n uses the n-th buffer of each kind, counted round: at most `depth` passes are under
way, none of which has ended in the last stage, so that no buffer is taken before everybody is done with what it held.

Stages of one node share memory; devices often can, and need not: then activations go through the host. Between nodes they go by the
transports of the stores.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.device.memory import open_shared, share
from messenger.arena_memory import SharedMemory
from messenger.base import Connection, Endpoint, Slice, Transport
from messenger.options import ShmOptions
from messenger.router import Messenger
from messenger.shm import ShmTransport
from springtide.errors import PeerLost
from springtide.ids import new_incarnation

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 10.0
RING_SHM = ShmOptions(helpers=0, populate=True)
_ALIGNMENT = 64
_ARRIVAL = struct.Struct("<Q??")


@dataclass(frozen=True, slots=True)
class RingShape:
    """What a ring has room for: activations [rows, hidden] of `dtype`, of `depth` passes."""

    depth: int
    rows: int
    hidden: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.dtype.itemsize

    @property
    def buffer_bytes(self) -> int:
        return -(-self.rows * self.row_bytes // _ALIGNMENT) * _ALIGNMENT

    def on(self, device: torch.device) -> torch.Tensor:
        """[depth, rows, hidden]: the buffers for what comes in."""
        return torch.empty(self.depth, self.rows, self.hidden, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Arrival:
    """The activations of a pass are in its buffer, of the device or of the host; of a `void` one there are none."""

    pass_id: int
    void: bool
    on_device: bool = False


@dataclass(frozen=True, slots=True)
class Entrance:
    """How the stage before gets at a ring. `buffers`: those of the device, as `share` has them; empty where there are none."""

    endpoint: Endpoint
    buffers: bytes


RingTransports = Callable[[SharedMemory], Sequence[Transport]]
"""What makes the transports by which a ring's memory is served, best first."""


def shared_on(socket: Path) -> RingTransports:
    """Shared memory alone, handed out at the socket."""
    return lambda memory: [ShmTransport(memory, socket, RING_SHM)]


class Ring:
    """A stage's buffers, and its way to those of the next stage."""

    def __init__(
        self,
        name: str,
        transports: RingTransports,
        shape: RingShape,
        on_arrival: Callable[[Arrival], None],
        buffers: torch.Tensor | None = None,
    ) -> None:
        """`on_arrival` is called in the event loop, in the order of the passes. `buffers`: `shape.on` the device of this stage, which may
        serve other rings later."""
        incarnation = new_incarnation()
        self._shape = shape
        self._memory = SharedMemory.create(2 * shape.depth, shape.buffer_bytes, incarnation)
        self._messenger = Messenger(
            transports(self._memory),
            self._memory.region,
            name=name,
            incarnation=incarnation,
            on_notify=lambda _, payload: on_arrival(Arrival(*_ARRIVAL.unpack(payload))),
        )
        self._buffers = buffers
        self._next: Connection | None = None
        self._next_buffers: torch.Tensor | None = None

    async def start(self) -> Entrance:
        """Serves the buffers; returns what the stage before needs to get at them. Raises OSError, SpringtideError."""
        return Entrance(await self._messenger.start(), self._shared())

    async def connect(self, entrance: Entrance) -> None:
        """Connects to the ring of the next stage. Raises PeerLost."""
        self._next_buffers = self._opened(entrance.buffers)
        self._next = await self._messenger.connect(entrance.endpoint)

    def _shared(self) -> bytes:
        try:
            return share(self._buffers) if self._buffers is not None else b""
        except RuntimeError as error:
            logger.warning("the stage before cannot write to this stage's device, so it writes to the host's memory: %s", error)
            return b""

    def _opened(self, buffers: bytes) -> torch.Tensor | None:
        try:
            return open_shared(buffers) if buffers else None
        except RuntimeError as error:
            logger.warning("cannot write to the device of the next stage, so its activations go through the host's memory: %s", error)
            return None

    def incoming(self, arrival: Arrival, num_rows: int) -> torch.Tensor:
        """[num_rows, hidden], to be read from its arrival until the pass has ended here."""
        assert num_rows <= self._shape.rows
        buffer = arrival.pass_id % self._shape.depth
        if not arrival.on_device:
            return self._view(buffer, num_rows)
        assert self._buffers is not None, "what is not served is not written to"
        return self._buffers[buffer, :num_rows]

    def outgoing(self, pass_id: int, num_rows: int) -> torch.Tensor:
        """[num_rows, hidden], to be written before `send`."""
        assert num_rows <= self._shape.rows
        buffer = pass_id % self._shape.depth
        if self._next_buffers is not None:
            return self._next_buffers[buffer, :num_rows]
        return self._view(self._shape.depth + buffer, num_rows)

    async def send(self, pass_id: int, num_rows: int, void: bool) -> None:
        """Sends what is in `outgoing` to the next stage: returns when that has heard of it. Of a void pass, only that it is. Raises
        PeerLost, TransferTimeout."""
        assert self._next is not None, "the last stage has no next one"
        on_device = self._next_buffers is not None and not void
        slices = [] if void or on_device else [self._slice(pass_id, num_rows)]
        completion = await self._next.write(slices, SEND_TIMEOUT_S, _ARRIVAL.pack(pass_id, void, on_device))
        if completion.failed:
            raise PeerLost(f"the next stage took no activations: {completion.failed[0]}")

    async def close(self) -> None:
        self._next_buffers = None
        await self._messenger.close()
        self._memory.close()

    def _slice(self, pass_id: int, num_rows: int) -> Slice:
        shape, buffer = self._shape, pass_id % self._shape.depth
        own = (shape.depth + buffer) * shape.buffer_bytes
        return Slice(own, buffer * shape.buffer_bytes, num_rows * shape.row_bytes, generation=0)

    def _view(self, buffer: int, num_rows: int) -> torch.Tensor:
        """One of the host's buffers."""
        begin = buffer * self._shape.buffer_bytes
        memory = self._memory.region.memory[begin : begin + num_rows * self._shape.row_bytes]
        return torch.from_numpy(memory).view(self._shape.dtype).view(num_rows, self._shape.hidden)
