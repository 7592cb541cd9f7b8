"""A transport between peers in one process, which meet on a hub."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from messenger.base import Completion, Connection, Endpoint, Identity, NotifyHandler, Region, Slice, Transport
from messenger.batch import completion_of, native_batch
from messenger.ordering import TicketLock, deliver, run_to_rest
from springtide.errors import PeerLost

_STEPS = 8
"""Steps in which a batch is copied, so that other batches and the owner come in between, as they would with a peer in another process."""


class _ServedRegion:
    """What one listening transport lends, and who is connected to it."""

    def __init__(self, region: Region, identity: Identity, on_notify: NotifyHandler) -> None:
        self.region = region
        self.identity = identity
        self.callers: set[InprocConnection] = set()
        self._on_notify = on_notify

    def deliver(self, peer: str, payload: bytes) -> None:
        deliver(self._on_notify, peer, payload)

    def cut_off(self, peer: Identity | None = None) -> None:
        """Breaks the connections of `peer`, of everybody when None."""
        for connection in list(self.callers):
            if peer is None or connection.identity == peer:
                connection.fail(PeerLost(f"{self.identity.name} closed the connection"))


class InprocHub:
    """Where the transports of one test find each other."""

    def __init__(self) -> None:
        self._served: dict[str, _ServedRegion] = {}

    def add(self, address: str, served: _ServedRegion) -> None:
        if address in self._served:
            raise ValueError(f"somebody listens on the hub as {address!r} already")
        self._served[address] = served

    def remove(self, address: str) -> None:
        self._served.pop(address, None)

    def find(self, address: str) -> _ServedRegion:
        if address not in self._served:
            raise PeerLost(f"nobody listens on the hub as {address!r}")
        return self._served[address]


class InprocConnection(Connection):
    def __init__(self, served: _ServedRegion, region: Region, identity: Identity) -> None:
        self.identity = identity
        self._served = served
        self._region = region
        self._lost: PeerLost | None = None
        self._turns = TicketLock()
        served.callers.add(self)

    @property
    def is_open(self) -> bool:
        return self._lost is None

    async def read(self, batch: Sequence[Slice], timeout_s: float) -> Completion:
        self._check()
        return await run_to_rest(self._move(batch, inward=True), timeout_s, self._expire, f"reading {len(batch)} slices")

    async def write(self, batch: Sequence[Slice], timeout_s: float, notify: bytes | None = None) -> Completion:
        self._check()
        return await run_to_rest(self._write(batch, notify), timeout_s, self._expire, f"writing {len(batch)} slices")

    async def close(self) -> None:
        self.fail(PeerLost(f"the connection to {self._served.identity.name} was closed here"))

    def fail(self, error: PeerLost) -> None:
        if self._lost is None:
            self._lost = error
            self._served.callers.discard(self)

    def _expire(self) -> None:
        self.fail(PeerLost(f"the connection to {self._served.identity.name} was closed when a batch missed its deadline"))

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    async def _write(self, batch: Sequence[Slice], notify: bytes | None) -> Completion:
        async with self._turns.take() as come:
            completion = await self._move(batch, inward=False)
            if notify is None or completion.failed:
                return completion
            await come()
            self._check()
            self._served.deliver(self.identity.name, notify)
            return completion

    async def _move(self, batch: Sequence[Slice], inward: bool) -> Completion:
        local, remote = self._region.memory, self._served.region
        work = native_batch(batch, local.nbytes, remote.memory.nbytes, remote.granule)
        ends = sorted({work.num_bytes * step // _STEPS for step in range(_STEPS + 1)})
        for begin, end in itertools.pairwise(ends):
            self._check()
            work.copy(local, remote.memory, remote.generations, not inward, begin, end)
            await asyncio.sleep(0)
        self._check()
        return completion_of(work, batch, remote.granule)


class InprocTransport(Transport):
    name = "inproc"

    def __init__(self, hub: InprocHub, address: str) -> None:
        self._hub = hub
        self._address = address
        self._served: _ServedRegion | None = None
        self._connections: list[InprocConnection] = []

    async def listen(self, region: Region, identity: Identity, on_notify: NotifyHandler) -> str:
        self._served = _ServedRegion(region, identity, on_notify)
        self._hub.add(self._address, self._served)
        return self._address

    async def connect(self, endpoint: Endpoint, region: Region, identity: Identity) -> Connection:
        served = self._hub.find(endpoint.addresses[self.name])
        if served.identity.incarnation != endpoint.incarnation:
            raise PeerLost(f"the peer has restarted: it is incarnation {served.identity.incarnation}, not {endpoint.incarnation}")
        connection = InprocConnection(served, region, identity)
        self._connections = [other for other in self._connections if other.is_open] + [connection]
        return connection

    async def fence(self, peer: Identity) -> bool:
        if self._served is not None:
            self._served.cut_off(peer)
        return True

    async def close(self) -> None:
        for connection in self._connections:
            await connection.close()
        self._connections.clear()
        if self._served is not None:
            self._hub.remove(self._address)
            self._served.cut_off()
            self._served = None
