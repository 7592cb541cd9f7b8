"""The reading and writing side: several paths to one peer, each batch spread over those that work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from messenger import metrics
from messenger.base import Completion, Connection, InvalidSlice, Region, Slice
from messenger.ordering import TicketLock, run_to_rest
from messenger.rdma.control import ControlClient, close_quietly
from messenger.rdma.lane import RdmaLane
from messenger.rdma.notices import MAX_NOTIFY_BYTES, NoticeOutbox
from messenger.rdma.opening import OpenedPath, PathMaker
from messenger.rdma.path import PathLost, RdmaPath
from messenger.rdma.plan import make_plan
from messenger.rdma.queue_pair import Opcode
from messenger.rdma.transfer import RdmaTransfer
from messenger.rdma.wire import AnsweredOffer
from springtide.errors import PeerLost, SpringtideError

logger = logging.getLogger(__name__)

_MAX_PIECE_BYTES = 1 << 20
_STRIPES_OF_A_BATCH = 2
"""Stripes of one batch on one lane: one in flight while the next is being prepared, and others' come in between."""
_LATE_GRACE_S = 0.5
_RESTORE_S = 10.0


@dataclass(frozen=True, slots=True)
class _JoinedLane:
    rail: int
    index: int
    """The peer's number for the path."""
    lane: RdmaLane


class RdmaConnection(Connection):
    """A connection that has several paths, which `join` gives it before it is used. As long as one is left, it tries to get lost ones
    back."""

    def __init__(
        self, peer: str, region: Region, control: ControlClient, answer: AnsweredOffer, maker: PathMaker, silence_s: float
    ) -> None:
        """Takes over `control`, which `maker` uses too. `answer`: that to the first offer. `silence_s`: time until a path is given up."""
        self._peer = peer
        self._region = region
        self._control = control
        self._answer = answer
        self._maker = maker
        self._silence_s = silence_s
        self._outbox = NoticeOutbox(maker.nics, self)
        self._lanes: dict[RdmaPath, _JoinedLane] = {}
        self._restoring: asyncio.Task[None] | None = None
        self._leaving: dict[RdmaPath, asyncio.Task[None]] = {}
        self._lost: PeerLost | None = None
        self._closing: asyncio.Task[None] | None = None
        self._turns = TicketLock()

    @property
    def is_open(self) -> bool:
        return self._lost is None

    async def join(self, opened: Sequence[OpenedPath]) -> None:
        """Takes over those of `opened` that packets come through. Raises PeerLost when it then has no path at all."""
        lanes: list[RdmaLane] = []
        try:
            for path in opened:
                lanes.append(RdmaLane(self._path(path), path.nic, path.local, path.remote))
            problems = await asyncio.gather(*(lane.probe() for lane in lanes), return_exceptions=True)
            self._raise_if_lost()
        except BaseException:
            for lane in lanes:
                lane.close()
            for path in opened:
                path.pair.close()
            raise
        level = logging.DEBUG if self._lanes else logging.WARNING  # at first, and not at every try to get one back
        for path, lane, problem in zip(opened, lanes, problems, strict=True):
            if lane.path.is_open and problem is None:
                self._lanes[lane.path] = _JoinedLane(path.rail, path.index, lane)
                metrics.RDMA_PATHS.labels(lane.nic.port.device).inc()
            else:
                logger.log(level, "no path to %s over %s: %s", self._peer, lane.nic.port, problem)
                lane.close()
        if not self._lanes:
            raise PeerLost(f"not one path works: {problems[0] if problems else 'none could be connected'}")
        self._restore_missing()

    async def read(self, batch: Sequence[Slice], timeout_s: float) -> Completion:
        transfer = self._transfer(Opcode.READ, batch)
        return await self._run(transfer, self._move(transfer), timeout_s, f"reading {transfer.plan.num_bytes} bytes of {self._peer}")

    async def write(self, batch: Sequence[Slice], timeout_s: float, notify: bytes | None = None) -> Completion:
        transfer = self._transfer(Opcode.WRITE, batch)
        if notify is not None and len(notify) > MAX_NOTIFY_BYTES:
            raise InvalidSlice(f"a notification of {len(notify)} bytes, more than {MAX_NOTIFY_BYTES}")
        work = self._move(transfer) if notify is None else self._write_and_notify(transfer, notify)
        return await self._run(transfer, work, timeout_s, f"writing {transfer.plan.num_bytes} bytes to {self._peer}")

    async def drain(self) -> None:
        # A batch ends when the NIC has ended all of it, or with the connection.
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def close(self) -> None:
        self._fail(PeerLost(f"the connection to {self._peer} was closed here"))
        assert self._closing is not None
        await asyncio.shield(self._closing)

    def _path(self, opened: OpenedPath) -> RdmaPath:
        name = f"{self._peer} over {opened.nic.port}"
        return RdmaPath(opened.pair, name, self._on_receive, self._on_lost, self._silence_s)

    def _on_receive(self, path: RdmaPath, immediate: int, length: int) -> None:
        """Takes an acknowledgement: the peer never sends anything else."""
        self._outbox.on_acknowledged(immediate)

    def _on_lost(self, path: RdmaPath, error: SpringtideError) -> None:
        joined = self._lanes.pop(path, None)
        if joined is None:  # it never worked
            return
        device = joined.lane.nic.port.device
        metrics.RDMA_PATHS.labels(device).dec()
        metrics.RDMA_PATHS_LOST.labels(device).inc()
        joined.lane.close()
        if isinstance(error, PeerLost):
            self._fail(error)
        elif not self._lanes:
            self._fail(PeerLost(f"lost {self._peer}, no path is left: {error.message}"))
        else:
            logger.warning("going on without a path to %s: %s", self._peer, error.message)
            leaving = asyncio.create_task(self._leave(joined.index), name=f"leave a path to {self._peer}")
            self._leaving[path] = leaving
            leaving.add_done_callback(lambda _: self._leaving.pop(path))
            self._restore_missing()
        self._outbox.on_lost(path, self._lost or error)

    def _missing(self) -> set[int]:
        return set(range(self._maker.num_rails)) - {joined.rail for joined in self._lanes.values()}

    def _restore_missing(self) -> None:
        if self._missing() and (self._restoring is None or self._restoring.done()):
            self._restoring = asyncio.create_task(self._restore(), name=f"restore paths to {self._peer}")

    async def _restore(self) -> None:
        while missing := self._missing():
            await asyncio.sleep(_RESTORE_S)
            try:
                _, opened = await self._maker.open(missing, self._answer.session)
                await self.join(opened)
            except SpringtideError as error:
                logger.debug("paths to %s are still missing: %s", self._peer, error)
        logger.info("all paths to %s work again", self._peer)

    def next_lane(self) -> RdmaLane:
        """The least busy lane. Raises PeerLost."""
        self._raise_if_lost()
        return self._by_load()[0]

    async def leave(self, path: RdmaPath) -> None:
        """Returns when nothing of a lost path can land any more: only then may its work be done again. Raises PeerLost."""
        self._raise_if_lost()
        if path in self._leaving:
            await asyncio.shield(self._leaving[path])
            self._raise_if_lost()

    async def check(self) -> None:
        """Asks the peer's process whether it is there. Raises PeerLost when it does not answer."""
        try:
            await self._control.ask()
        except PeerLost as error:
            self._fail(PeerLost(f"lost {self._peer}, it is silent: {error.message}"))
        self._raise_if_lost()

    def _transfer(self, opcode: Opcode, batch: Sequence[Slice]) -> RdmaTransfer:
        self._raise_if_lost()
        plan = make_plan(batch, self._region.memory.nbytes, self._answer.region_bytes, self._answer.granule, _MAX_PIECE_BYTES)
        return RdmaTransfer(opcode, plan)

    async def _run(self, transfer: RdmaTransfer, work: Coroutine[Any, Any, Completion], timeout_s: float, what: str) -> Completion:
        """Runs a batch to its end. What a NIC has been given cannot be taken back but by breaking its path: a late batch begins nothing
        more, and breaks the connection only if what it has begun does not end."""
        forced: asyncio.TimerHandle | None = None

        def expire() -> None:
            nonlocal forced
            transfer.abandon()
            late = PeerLost(f"the connection to {self._peer} was closed when a batch missed its deadline")
            forced = asyncio.get_running_loop().call_later(_LATE_GRACE_S, self._fail, late)

        try:
            return await run_to_rest(work, timeout_s, expire, what, transfer.abandon)
        finally:
            if forced is not None:
                forced.cancel()

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _by_load(self) -> list[RdmaLane]:
        """The lanes, the least busy first."""
        return sorted((joined.lane for joined in self._lanes.values()), key=lambda lane: lane.path.outstanding)

    async def _write_and_notify(self, transfer: RdmaTransfer, notify: bytes) -> Completion:
        async with self._turns.take() as come:
            completion = await self._move(transfer)
            await transfer.unless_abandoned(come())
            if not completion.failed:
                await transfer.unless_abandoned(self._outbox.send(notify))
            return completion

    async def _move(self, transfer: RdmaTransfer) -> Completion:
        """Lets lanes take the stripes from one queue; what a broken one leaves behind goes to the others."""
        while transfer.stripes:
            self._raise_if_lost()
            workers = (self._by_load() * _STRIPES_OF_A_BATCH)[: len(transfer.stripes)]
            results = await asyncio.gather(*(self._pull(lane, transfer) for lane in workers), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
        transfer.check()
        return transfer.plan.completion(transfer.stale)

    async def _pull(self, lane: RdmaLane, transfer: RdmaTransfer) -> None:
        while transfer.stripes:
            async with lane.turn(transfer.unless_abandoned) as row:
                if not transfer.stripes:
                    return
                stripe = transfer.stripes.popleft()
                try:
                    transfer.stale[stripe] = await lane.move(transfer.opcode, transfer.plan, stripe, row)
                except PathLost:
                    await self.leave(lane.path)
                    transfer.put_back(stripe)
                    return

    async def _leave(self, index: int) -> None:
        try:
            await self._control.leave(self._answer.session, index)
        except PeerLost as error:
            self._fail(PeerLost(f"lost {self._peer} with a path to it: {error.message}"))

    def _fail(self, error: PeerLost) -> None:
        if self._lost is not None:
            return
        self._lost = error
        if self._restoring is not None:
            self._restoring.cancel()
        for path, joined in self._lanes.items():
            metrics.RDMA_PATHS.labels(joined.lane.nic.port.device).dec()
            path.close(error)
            joined.lane.close()
            self._outbox.on_lost(path, error)
        self._lanes.clear()
        self._closing = asyncio.create_task(self._release(), name=f"release {self._peer}")

    async def _release(self) -> None:
        """Tells the peer to let go, as the NICs of this side have already."""
        self._outbox.close()
        if self._restoring is not None:
            await asyncio.wait((self._restoring,))
        await close_quietly(self._control, self._answer.session)
