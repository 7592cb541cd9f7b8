"""The memory of a store: the slabs of its layers of every slot, lent to its node's engine by file descriptor and to peers by Messenger."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvstore.server.shared.context import StoreOptions
from messenger.arena_memory import FdServer, SharedMemory
from messenger.base import Endpoint, Identity, NotifyHandler, Slice, Transport
from messenger.notices import receive_identity
from messenger.registry import TransportSite, make_transport
from messenger.router import Messenger
from messenger.stream import PeerClosed, SocketStream
from springtide.errors import SpringtideError
from springtide.ids import Incarnation

SELF_TEST_BYTES = 64 << 10
MakeTransport = Callable[[str, SharedMemory], Transport]


class Attachments:
    """The engines that have the arena mapped, where shm is not among the transports that would know. `serve` is for an FdServer."""

    def __init__(self) -> None:
        self._attached: dict[SocketStream, Identity | None] = {}
        """None: somebody who has not said who it is."""

    async def serve(self, stream: SocketStream) -> None:
        """Returns when it has let go."""
        self._attached[stream] = None
        try:
            self._attached[stream] = await receive_identity(stream)
            await stream.drain()
        except PeerClosed:
            return
        finally:
            del self._attached[stream]

    async def has_let_go(self, peer: Identity) -> bool:
        """Whether it has let go, and nobody is here who may be it."""
        return not any(attached in (None, peer) for attached in self._attached.values())


class StoreArena:
    """The memory, and who gets at it. `close` leaves none of it behind."""

    def __init__(
        self, options: StoreOptions, incarnation: Incarnation, on_notify: NotifyHandler, make: MakeTransport | None = None
    ) -> None:
        """Takes the memory (address space; pages come at their first touch, but for huge ones). Raises NoMemory when it cannot be had.
        `make` makes what `options.transports` names, where it is to be something else than usual."""
        self._options = options
        self.bytes_per_slot = options.own_spec.bytes_per_slot
        # Huge pages that a control group refuses are missed here, not at their first touch, which would end the process.
        populate = options.hugepages > 0
        self.memory = SharedMemory.create(options.num_slots, self.bytes_per_slot, incarnation, populate, options.hugepages)
        self._attachments = Attachments()
        self._server = None if "shm" in options.transports else FdServer(self.memory, options.arena_socket, self._attachments.serve)
        self.messenger = Messenger(
            [(make or self._transport)(name, self.memory) for name in options.transports],
            self.memory.region,
            options.node_id,
            incarnation,
            on_notify,
            optional=options.optional_transports,
        )

    async def start(self) -> Endpoint:
        """Serves it. Raises OSError, ValueError or SpringtideError."""
        endpoint = await self.messenger.start()
        if self._server is not None:
            await self._server.start()
        return endpoint

    async def self_test(self, endpoint: Endpoint, slot: int) -> None:
        """Writes from one half of the slot, which nobody uses, to the other by Messenger and compares. Raises SpringtideError when that
        does not work."""
        region, half = self.memory.region, self.bytes_per_slot // 2
        source, size = slot * self.bytes_per_slot, min(half, SELF_TEST_BYTES)
        target = source + half
        pattern = np.random.default_rng(endpoint.incarnation).integers(0, 256, size, dtype=np.uint8)
        region.memory[source : source + size] = pattern
        connection = await self.messenger.connect(endpoint)
        completion = await connection.write([Slice(source, target, size, int(region.generations[slot]))], 5.0)
        await connection.close()
        if completion.failed or not np.array_equal(region.memory[target : target + size], pattern):
            raise SpringtideError(f"the self-test transfer of {size} bytes over {'/'.join(self._options.transports)} failed")

    async def has_let_go(self, engine: Identity) -> bool:
        """Whether nothing of the engine's can land any more: no process of it has the memory."""
        return await self.messenger.fence(engine.name, engine.incarnation) and await self._attachments.has_let_go(engine)

    async def stop(self) -> None:
        """Serves it no more; the memory is there still."""
        await self.messenger.close()
        if self._server is not None:
            await self._server.close()

    def close(self) -> None:
        """Gives the memory back."""
        self.memory.close()

    def _transport(self, name: str, memory: SharedMemory) -> Transport:
        site = TransportSite(memory, self._options.bind_host, self._options.arena_socket)
        return make_transport(name, site, self._options.transport_options)
