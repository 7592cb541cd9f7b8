"""The inproc transport: peers in one process, met on a named hub. For tests: its FaultPlan breaks what networks break."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Literal

from messenger.base import Completion, Connection, Endpoint, Identity, NotifyHandler, Region, Slice, Transport
from messenger.copying import CopyJob
from messenger.faults import Fault, FaultKind, FaultPlan
from messenger.ordering import Turns, deliver, run_to_rest
from messenger.plan import Plan, make_plan
from springtide.errors import PeerLost

_PIECE_BYTES = 1 << 20
_PIECES_PER_STEP = 16


_BREAKING: frozenset[FaultKind] = frozenset(("fail", "partial", "drop"))


class _Served:
    """What one listening transport lends, and who is connected to it."""

    def __init__(self, region: Region, identity: Identity, on_notify: NotifyHandler) -> None:
        self.region = region
        self.identity = identity
        self.callers: set[InprocConnection] = set()
        self._on_notify = on_notify
        self._late: set[asyncio.TimerHandle] = set()

    def deliver(self, peer: str, payload: bytes) -> None:
        deliver(self._on_notify, peer, payload)

    def deliver_later(self, delay_s: float, peer: str, payload: bytes) -> None:
        self._late.add(asyncio.get_running_loop().call_later(delay_s, self.deliver, peer, payload))

    def cut_off(self, peer: Identity | None = None) -> None:
        """Breaks the connections of `peer`, of everybody when None."""
        for connection in list(self.callers):
            if peer is None or connection.identity == peer:
                connection.fail(PeerLost(f"{self.identity.name} closed the connection"))

    def close(self) -> None:
        self.cut_off()
        for handle in self._late:
            handle.cancel()


class InprocHub:
    """Where the transports of one test find each other."""

    def __init__(self) -> None:
        self._served: dict[str, _Served] = {}

    def add(self, address: str, served: _Served) -> None:
        if address in self._served:
            raise ValueError(f"somebody listens on the hub as {address!r} already")
        self._served[address] = served

    def remove(self, address: str) -> None:
        self._served.pop(address, None)

    def find(self, address: str) -> _Served:
        if address not in self._served:
            raise PeerLost(f"nobody listens on the hub as {address!r}")
        return self._served[address]


class InprocConnection(Connection):
    def __init__(self, served: _Served, region: Region, identity: Identity, faults: FaultPlan) -> None:
        self.identity = identity
        self._served = served
        self._region = region
        self._faults = faults
        self._lost: PeerLost | None = None
        self._broken = asyncio.Event()
        self._turns = Turns()
        served.callers.add(self)

    @property
    def is_open(self) -> bool:
        return self._lost is None

    async def read(self, batch: Sequence[Slice], timeout_s: float) -> Completion:
        plan = self._plan(batch)
        work = self._move(plan, "read", self._faults.draw("read"))
        return await run_to_rest(work, timeout_s, self._expire, f"reading {plan.num_bytes} bytes")

    async def write(self, batch: Sequence[Slice], timeout_s: float, notify: bytes | None = None) -> Completion:
        plan = self._plan(batch)
        return await run_to_rest(self._write(plan, notify), timeout_s, self._expire, f"writing {plan.num_bytes} bytes")

    async def close(self) -> None:
        self.fail(PeerLost(f"the connection to {self._served.identity.name} was closed here"))

    def fail(self, error: PeerLost) -> None:
        if self._lost is None:
            self._lost = error
            self._broken.set()
            self._served.callers.discard(self)

    def _expire(self) -> None:
        self.fail(PeerLost(f"the connection to {self._served.identity.name} was closed when a batch missed its deadline"))

    def _plan(self, batch: Sequence[Slice]) -> Plan:
        self._check()
        remote = self._served.region
        return make_plan(batch, self._region.memory.nbytes, remote.memory.nbytes, remote.granule, _PIECE_BYTES)

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    async def _write(self, plan: Plan, notify: bytes | None) -> Completion:
        faults = self._faults.draw("write")
        async with self._turns.take() as come:
            completion = await self._move(plan, "write", faults)
            if notify is None or completion.failed:
                return completion
            await come()
            self._check()
            self._notify(notify, faults)
            return completion

    async def _move(self, plan: Plan, operation: Literal["read", "write"], faults: Mapping[FaultKind, Fault]) -> Completion:
        if "delay" in faults:
            await self._pause(faults["delay"].delay_s)
        job = CopyJob(plan, self._region.memory, self._served.region, inward=operation == "read")
        if "stale" in faults and plan.num_pieces:
            job.stale[self._faults.random.randrange(plan.num_pieces)] = True
        breaking = sorted(_BREAKING & faults.keys())
        await self._copy(job, self._pieces_before_break(plan, breaking))
        if breaking:
            error = PeerLost(f"lost {self._served.identity.name}: injected fault {', '.join(breaking)}")
            if "drop" in faults:
                self.fail(error)
            raise error
        return plan.completion(job.stale)

    def _pieces_before_break(self, plan: Plan, breaking: Sequence[FaultKind]) -> int:
        if not breaking:
            return plan.num_pieces
        return 0 if "fail" in breaking else self._faults.random.randrange(plan.num_pieces + 1)

    async def _copy(self, job: CopyJob, num_pieces: int) -> None:
        """In steps, so that other batches and the owner come in between, as they would with a peer in another process."""
        for begin in range(0, num_pieces, _PIECES_PER_STEP):
            self._check()
            job.run(slice(begin, min(begin + _PIECES_PER_STEP, num_pieces)))
            await asyncio.sleep(0)
        self._check()

    async def _pause(self, delay_s: float) -> None:
        """Ends early when the connection breaks."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._broken.wait(), delay_s)

    def _notify(self, payload: bytes, faults: Mapping[FaultKind, Fault]) -> None:
        if "notify_late" in faults:
            self._served.deliver_later(faults["notify_late"].delay_s, self.identity.name, payload)
        else:
            self._served.deliver(self.identity.name, payload)
        if "notify_twice" in faults:
            self._served.deliver(self.identity.name, payload)


class InprocTransport(Transport):
    name = "inproc"

    def __init__(self, hub: InprocHub, address: str, faults: FaultPlan | None = None) -> None:
        """`faults` befall the batches of the connections that this transport opens."""
        self._hub = hub
        self._address = address
        self._faults = faults or FaultPlan()
        self._served: _Served | None = None
        self._connections: list[InprocConnection] = []

    async def listen(self, region: Region, identity: Identity, on_notify: NotifyHandler) -> str:
        self._served = _Served(region, identity, on_notify)
        self._hub.add(self._address, self._served)
        return self._address

    async def connect(self, endpoint: Endpoint, region: Region, identity: Identity) -> Connection:
        served = self._hub.find(endpoint.addresses[self.name])
        if served.identity.incarnation != endpoint.incarnation:
            raise PeerLost(f"the peer has restarted: it is incarnation {served.identity.incarnation}, not {endpoint.incarnation}")
        connection = InprocConnection(served, region, identity, self._faults)
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
            self._served.close()
            self._served = None
