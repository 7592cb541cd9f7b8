"""The data plane in pure Python: the caller's end of the data lanes to one peer."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from messenger.base import Completion, Region, Slice
from messenger.ordering import run_to_rest
from messenger.plan import Plan, SliceVerdict, make_plan
from messenger.stream import Stream, Vector
from messenger.tcp_options import TcpOptions
from messenger.tcp_plane import DataPlane, LaneKeeper, OpenLane
from messenger.tcp_protocol import CHECKSUM, HEADER_BYTES, TABLE, Header, Op, ProtocolError, Welcome
from springtide.errors import PeerLost

_STRIPE_BYTES = 2 << 20
_STRIPE_PIECES = 512


class _Transfer:
    """One batch on its way. Lanes pull its stripes from one iterator: who is faster moves more."""

    def __init__(self, op: Op, plan: Plan) -> None:
        self.op = op
        self.plan = plan
        self.verdicts = np.zeros(plan.num_pieces, np.uint8)
        self.stripes = list(plan.stripes(_STRIPE_BYTES, _STRIPE_PIECES)) or [slice(0, 0)]
        self.pullers: list[asyncio.Task[None]] = []
        self._next = 0

    def next_stripe(self) -> slice | None:
        if self._next >= len(self.stripes):
            return None
        self._next += 1
        return self.stripes[self._next - 1]

    def stop(self) -> None:
        """What is under way goes on, nothing else begins."""
        self._next = len(self.stripes)

    def interrupt(self) -> None:
        for puller in self.pullers:
            puller.cancel()


class PythonPlane(DataPlane):
    def __init__(
        self,
        peer: str,
        welcome: Welcome,
        region: Region,
        open_lane: OpenLane,
        on_lost: Callable[[PeerLost], None],
        options: TcpOptions,
    ) -> None:
        """`open_lane` makes streams that lose patience with a peer that is silent."""
        self._peer = peer
        self._welcome = welcome
        self._memory = region.memory.data
        self._on_lost = on_lost
        self._num_lanes = options.lanes
        self._checksums = options.checksums
        self._lost: PeerLost | None = None
        self._keeper = LaneKeeper(open_lane, peer, on_lost)
        self._free: asyncio.Queue[Stream] = asyncio.Queue()
        self._transfers: set[_Transfer] = set()

    async def open(self) -> None:
        for stream in await self._keeper.open(self._num_lanes):
            if self._lost is None:
                self._free.put_nowait(stream)
            else:
                stream.close()
        if self._lost is not None:
            raise self._lost

    async def move(self, op: Op, batch: Sequence[Slice], timeout_s: float) -> Completion:
        plan = make_plan(batch, len(self._memory), self._welcome.region_bytes, self._welcome.granule, _STRIPE_BYTES)
        transfer = _Transfer(op, plan)
        if plan.num_pieces:
            await self._run(transfer, timeout_s)
        elif self._lost is not None:
            raise self._lost
        return plan.completion(transfer.verdicts)

    async def ping(self) -> None:
        empty = make_plan((), 0, 0, 1, 1)
        with contextlib.suppress(PeerLost):
            await self._run(_Transfer(Op.READ, empty), 3600.0)  # silence ends it earlier

    def lose(self, error: PeerLost) -> None:
        if self._lost is None:
            self._lost = error
            for transfer in self._transfers:
                transfer.interrupt()

    async def drain(self) -> None:
        await self._keeper.drain()

    async def close(self) -> None:
        pullers = [puller for transfer in self._transfers for puller in transfer.pullers]
        await asyncio.gather(*pullers, return_exceptions=True)
        while not self._free.empty():
            self._keeper.lay_to_rest(self._free.get_nowait())
        await self._keeper.close()

    async def _run(self, transfer: _Transfer, timeout_s: float) -> None:
        verb = "writing" if transfer.op is Op.WRITE else "reading"
        what = f"{verb} {transfer.plan.num_bytes} bytes of {self._peer}"
        await run_to_rest(self._move(transfer), timeout_s, transfer.interrupt, what, transfer.stop)

    async def _move(self, transfer: _Transfer) -> None:
        if self._lost is not None:
            raise self._lost
        num_pullers = min(self._num_lanes, len(transfer.stripes))
        transfer.pullers = [asyncio.create_task(self._pull(transfer)) for _ in range(num_pullers)]
        self._transfers.add(transfer)
        try:
            results = await asyncio.gather(*transfer.pullers, return_exceptions=True)
        finally:
            self._transfers.discard(transfer)
        if self._lost is not None and any(results):
            raise self._lost
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _pull(self, transfer: _Transfer) -> None:
        while (stripe := transfer.next_stripe()) is not None:
            stream = await self._free.get()
            try:
                await self._exchange(stream, transfer, stripe)
            except BaseException as error:
                if isinstance(error, OSError | ProtocolError):
                    self._on_lost(PeerLost(f"lost {self._peer}: {error}"))
                self._give_up(stream)
                raise
            self._put_back(stream)

    def _give_up(self, stream: Stream) -> None:
        """In the middle of an exchange."""
        self._keeper.lay_to_rest(stream)
        if self._lost is None:
            self._keeper.replace(self._put_back)

    def _put_back(self, stream: Stream) -> None:
        if self._lost is None:
            self._free.put_nowait(stream)
        else:
            self._keeper.lay_to_rest(stream)

    async def _exchange(self, stream: Stream, transfer: _Transfer, stripe: slice) -> None:
        """One request and its answer. Sets the stripe's verdicts."""
        op, plan = transfer.op, transfer.plan
        table = np.empty(stripe.stop - stripe.start, TABLE)
        table["offset"], table["length"], table["generation"] = plan.remote[stripe], plan.length[stripe], plan.generation[stripe]
        starts, ends = plan.local[stripe], plan.local[stripe] + plan.length[stripe]
        views = [self._memory[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        num_bytes = int(table["length"].sum())
        head = memoryview(Header(op, len(table), num_bytes if op is Op.WRITE else 0).pack() + table.tobytes())
        if op is Op.WRITE:
            sums = [memoryview(sums_of(views).tobytes())] if self._checksums else []
            await stream.send(Vector([head, *views, *sums]))
        else:
            await stream.send(Vector([head]))
        await self._take_header(stream, Header(op, len(table), num_bytes if op is Op.READ else 0))
        corrupt = np.zeros(len(table), np.bool_)
        if op is Op.READ:
            await stream.receive_into(Vector(views))
            if self._checksums:
                corrupt = np.frombuffer(await stream.receive(len(table) * CHECKSUM.itemsize), CHECKSUM) != sums_of(views)
        verdicts = np.frombuffer(await stream.receive(len(table)), np.uint8).copy()
        if verdicts.max(initial=0) > SliceVerdict.CORRUPT:
            raise ProtocolError(f"unknown verdict {verdicts.max()} on a slice")
        verdicts[corrupt & (verdicts == SliceVerdict.DONE)] = SliceVerdict.CORRUPT
        transfer.verdicts[stripe] = verdicts

    async def _take_header(self, stream: Stream, expected: Header) -> None:
        header = Header.unpack(await stream.receive(HEADER_BYTES))
        if header != expected:
            raise ProtocolError(f"an answer of {header} instead of {expected}")


def sums_of(views: Sequence[memoryview]) -> np.ndarray:
    """CRC-32 of each, uint32 [views]."""
    return np.array([zlib.crc32(view) for view in views], CHECKSUM)
