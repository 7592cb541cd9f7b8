"""A transport that breaks what networks and peers break, around any other. What it does move, the other moves: same memory, same wire."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from messenger.base import Completion, Connection, Endpoint, Identity, NotifyHandler, Region, Slice, Traffic, Transport
from messenger.ordering import TicketLock, run_to_rest
from springtide.errors import PeerLost, SpringtideError
from springtide.supervision import first_of
from tests.support.transport_faults import FaultKind, FaultPlan, TransferFault

_BREAKING: frozenset[FaultKind] = frozenset(("fail", "partial", "drop"))
_NO_GENERATION = 1 << 63
"""Flipped in a handle, it makes one that was never given out."""
_PORTION_BYTES = 256 << 10
"""Of a slow batch: moved at once, then paid for in time."""

Faults = Mapping[FaultKind, TransferFault]


class FaultyConnection(Connection):
    """Keeps the promises of `Connection` wherever no fault says otherwise: in particular order, deadlines and memory at rest."""

    def __init__(self, inner: Connection, plan: FaultPlan, peer: str) -> None:
        """Takes over `inner`."""
        self._inner = inner
        self._plan = plan
        self._peer = peer
        self._lost: PeerLost | None = None
        self._broken = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None
        self._turns = TicketLock()
        self._wire = asyncio.Lock()
        """Held by the slow batch that pays for its bytes."""
        self._late: set[asyncio.Task[None]] = set()

    @property
    def is_open(self) -> bool:
        return self._lost is None and self._inner.is_open

    async def read(self, batch: Sequence[Slice], timeout_s: float) -> Completion:
        self._check()
        work = self._move(batch, self._plan.draw("read"), inward=True, timeout_s=timeout_s)
        return await run_to_rest(work, timeout_s, self._expire, f"reading {len(batch)} slices of {self._peer}")

    async def write(self, batch: Sequence[Slice], timeout_s: float, notify: bytes | None = None) -> Completion:
        self._check()
        faults = self._plan.draw("write")
        if notify is None:
            work = self._move(batch, faults, inward=False, timeout_s=timeout_s)
        else:
            work = self._write_and_notify(batch, faults, notify, timeout_s)
        return await run_to_rest(work, timeout_s, self._expire, f"writing {len(batch)} slices to {self._peer}")

    async def drain(self) -> None:
        await super().drain()
        await self._inner.drain()

    async def close(self) -> None:
        self._break(PeerLost(f"the connection to {self._peer} was closed here"))
        assert self._closing is not None
        await asyncio.shield(self._closing)

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _expire(self) -> None:
        self._break(PeerLost(f"the connection to {self._peer} was closed when a batch missed its deadline"))

    def _break(self, error: PeerLost) -> None:
        if self._lost is None:
            self._lost = error
            self._broken.set()
            self._closing = asyncio.create_task(self._inner.close(), name=f"close {self._peer}")

    async def _write_and_notify(self, batch: Sequence[Slice], faults: Faults, notify: bytes, timeout_s: float) -> Completion:
        async with self._turns.take() as come:
            completion = await self._move(batch, faults, inward=False, timeout_s=timeout_s)
            await come()
            self._check()
            if completion.failed or "notify_lost" in faults:
                return completion
            if "notify_late" in faults:
                self._notify_later(notify, faults["notify_late"].delay_s, timeout_s)
            else:
                await self._inner.write([], timeout_s, notify)
            if "notify_twice" in faults:
                await self._inner.write([], timeout_s, notify)
            return completion

    def _notify_later(self, notify: bytes, delay_s: float, timeout_s: float) -> None:
        async def deliver() -> None:
            await self._pause(delay_s)
            if self._lost is None:
                with contextlib.suppress(SpringtideError):
                    await self._inner.write([], timeout_s, notify)

        task = asyncio.create_task(deliver(), name=f"late notification to {self._peer}")
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _move(self, batch: Sequence[Slice], faults: Faults, *, inward: bool, timeout_s: float) -> Completion:
        if "hang" in faults:
            await self._broken.wait()
        if "delay" in faults:
            await self._pause(faults["delay"].delay_s)
        if "stand" in faults:
            await first_of(self._plan.going_on.wait(), self._broken.wait())
        self._check()
        if "stale" in faults and batch:
            victim = self._plan.random.randrange(len(batch))
            stale = replace(batch[victim], generation=batch[victim].generation ^ _NO_GENERATION)
            batch = [*batch[:victim], stale, *batch[victim + 1 :]]
        breaking = sorted(_BREAKING & faults.keys())
        if breaking:
            batch = [] if "fail" in breaking else batch[: self._plan.random.randrange(len(batch) + 1)]
        move = self._inner.read if inward else self._inner.write
        if "slow" in faults:
            completion = await self._move_slowly(batch, faults["slow"].bytes_per_s, inward=inward, timeout_s=timeout_s)
        else:
            completion = await move(batch, timeout_s)
        if breaking:
            error = PeerLost(f"lost {self._peer}: injected fault {', '.join(breaking)}")
            if "drop" in breaking:
                self._break(error)
            raise error
        return completion

    async def _move_slowly(self, batch: Sequence[Slice], bytes_per_s: float, *, inward: bool, timeout_s: float) -> Completion:
        move = self._inner.read if inward else self._inner.write
        failed: dict[int, SpringtideError] = {}
        num_bytes = begin = 0
        for portion in _portions(batch):
            async with self._wire:
                completion = await move(portion, timeout_s)
                await self._pause(sum(piece.length for piece in portion) / bytes_per_s)
                self._check()
            num_bytes += completion.num_bytes
            failed.update({begin + index: error for index, error in completion.failed.items()})
            begin += len(portion)
        return Completion(num_bytes, failed)

    async def _pause(self, delay_s: float) -> None:
        """Ends early when the connection breaks."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._broken.wait()


def _portions(batch: Sequence[Slice]) -> Iterator[Sequence[Slice]]:
    begin = num_bytes = 0
    for end, piece in enumerate(batch, 1):
        num_bytes += piece.length
        if num_bytes >= _PORTION_BYTES or end == len(batch):
            yield batch[begin:end]
            begin, num_bytes = end, 0


class FaultyTransport(Transport):
    """`plan` befalls the connections that this side opens, and their batches. Serving and fencing are those of `inner`."""

    def __init__(self, inner: Transport, plan: FaultPlan) -> None:
        """Takes over `inner`."""
        self.name = inner.name
        self.one_host_only = inner.one_host_only
        self._inner = inner
        self._plan = plan
        self._connections: list[FaultyConnection] = []

    async def listen(self, region: Region, identity: Identity, on_notify: NotifyHandler) -> str:
        return await self._inner.listen(region, identity, on_notify)

    async def connect(self, endpoint: Endpoint, region: Region, identity: Identity) -> Connection:
        address = endpoint.addresses[self.name]
        if self._plan.draw("connect"):
            raise PeerLost(f"cannot connect to {address}: injected fault refuse")
        connection = FaultyConnection(await self._inner.connect(endpoint, region, identity), self._plan, address)
        self._connections = [other for other in self._connections if other.is_open] + [connection]
        return connection

    def settle(self) -> None:
        self._inner.settle()

    def traffic(self, incarnation: int) -> Traffic:
        return self._inner.traffic(incarnation)

    async def fence(self, peer: Identity) -> bool:
        return await self._inner.fence(peer)

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self._connections))
        self._connections.clear()
        await self._inner.close()
