"""The way of the activations from one stage to the next: buffers of shared memory, into which the stage before writes by Messenger.

Each stage serves `2 * depth` buffers, of which the first half is written by the stage before and the second is where its own results lie
until they are sent. Pass n uses the n-th buffer of each half, counted round: at most `depth` passes are under way, none of which has ended
in the last stage, so that no buffer is taken before everybody is done with what it held.

All stages of a group map the arena of one store, so they are on one host and can always share memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from messenger.arena_memory import SharedMemory
from messenger.base import Connection, Endpoint, Slice
from messenger.router import Messenger
from messenger.shm import ShmOptions, ShmTransport
from springtide.errors import PeerLost
from springtide.ids import new_incarnation

SEND_TIMEOUT_S = 10.0
_ALIGNMENT = 64
_ARRIVAL = struct.Struct("<Q?")


@dataclass(frozen=True, slots=True)
class RingShape:
    """Of activations [rows, hidden] of `dtype`."""

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


@dataclass(frozen=True, slots=True)
class Arrival:
    """The activations of a pass are in its buffer; of a `void` one there are none."""

    pass_id: int
    void: bool


class Ring:
    def __init__(self, name: str, socket: Path, shape: RingShape, on_arrival: Callable[[Arrival], None]) -> None:
        """`on_arrival` is called in the event loop, in the order of the passes."""
        incarnation = new_incarnation()
        self._shape = shape
        self._memory = SharedMemory.create(2 * shape.depth, shape.buffer_bytes, incarnation)
        transport = ShmTransport(self._memory, socket, ShmOptions(helpers=0))
        self._messenger = Messenger(
            (transport,),
            self._memory.region,
            name=name,
            incarnation=incarnation,
            on_notify=lambda _, payload: on_arrival(Arrival(*_ARRIVAL.unpack(payload))),
        )
        self._next: Connection | None = None

    async def start(self) -> Endpoint:
        """For the stage before. Raises OSError, SpringtideError."""
        return await self._messenger.start()

    async def connect(self, endpoint: Endpoint) -> None:
        """To the next stage. Raises PeerLost."""
        self._next = await self._messenger.connect(endpoint)

    def incoming(self, pass_id: int, num_rows: int) -> torch.Tensor:
        """[num_rows, hidden], to be read from its Arrival until the pass has ended here."""
        return self._view(pass_id % self._shape.depth, num_rows)

    def outgoing(self, pass_id: int, num_rows: int) -> torch.Tensor:
        """[num_rows, hidden], to be written before `send`."""
        return self._view(self._shape.depth + pass_id % self._shape.depth, num_rows)

    async def send(self, pass_id: int, num_rows: int, void: bool) -> None:
        """What is in `outgoing`, to the next stage: returns when that has heard of it. Of a void pass, only that it is. Raises PeerLost,
        DeadlineExceeded."""
        assert self._next is not None, "the last stage has no next one"
        shape, slices = self._shape, list[Slice]()
        if not void:
            buffer = pass_id % shape.depth
            own = (shape.depth + buffer) * shape.buffer_bytes
            slices.append(Slice(own, buffer * shape.buffer_bytes, num_rows * shape.row_bytes, generation=0))
        completion = await self._next.write(slices, SEND_TIMEOUT_S, _ARRIVAL.pack(pass_id, void))
        if completion.failed:
            raise PeerLost(f"the next stage took no activations: {completion.failed[0]}")

    async def close(self) -> None:
        await self._messenger.close()
        self._memory.close()

    def _view(self, buffer: int, num_rows: int) -> torch.Tensor:
        assert num_rows <= self._shape.rows
        begin = buffer * self._shape.buffer_bytes
        memory = self._memory.region.memory[begin : begin + num_rows * self._shape.row_bytes]
        return torch.from_numpy(memory).view(self._shape.dtype).view(num_rows, self._shape.hidden)
