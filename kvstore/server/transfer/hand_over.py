"""Writes an attempt's blocks into the slots that the decode node's store has reserved for it, while they are being computed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc.aio

from kvstore import metrics
from kvstore.core.results import TransferCancelled, UnknownAttempt
from kvstore.core.turns import Transfer
from kvstore.server.shared.context import StoreContext
from kvstore.server.shared.failures import error_of, failure_of
from kvstore.server.shared.peers import LONGEST_BATCH_S
from kvstore.server.shared.routes import StoreRoute
from kvstore.server.transfer.pacing import block_slice
from messenger.base import Completion, Slice, TransferTimeout
from springtide.errors import SpringtideError
from springtide.ids import AttemptId, Slot
from springtide.protocol import wire
from springtide.protocol.outputs import HandedOver
from springtide.protocol.storage import (
    CloseIngest,
    HandOverFailed,
    IngestSeal,
    IngestTargets,
    IngestUnit,
    Notice,
    OpenIngest,
    Unit,
    Writer,
)
from springtide.supervision import first_of

logger = logging.getLogger(__name__)

_REPEAT_S = 0.5
T = TypeVar("T")
Notify = Callable[[Notice], None]


class HandOverWriter:
    """The hand-over of one attempt. The engine pushes units as they become final and never waits; what it pushes faster than the network
    takes is joined to larger units, so that few are kept whatever the network does. Order is kept, and the seal is the last. The slots are
    held by the hand-over until it has read them for good."""

    def __init__(self, shared: StoreContext, notify: Notify, attempt_id: AttemptId, slots: Sequence[Slot], address: str) -> None:
        self._shared = shared
        self._notify = notify
        self._attempt_id = attempt_id
        self._slots = slots
        self._address = address
        self._units: deque[Unit] = deque()
        self._first_token: int | None = None
        self._wake = asyncio.Event()
        self._cancelled = asyncio.Event()
        self._route: StoreRoute | None = None
        self._progress = Transfer(asyncio.get_running_loop().time(), len(slots) * shared.options.spec.bytes_per_slot)
        self._num_bytes = 0
        self._first_write_at: float | None = None
        self._written_at = 0.0
        self._writing_s = 0.0
        self.ended = asyncio.Event()
        """This store will not write for the attempt any more."""

    @property
    def sealed(self) -> bool:
        return self._first_token is not None

    @property
    def num_waiting(self) -> int:
        """The number of units that have been pushed and are not being written yet."""
        return len(self._units)

    def push(self, unit: Unit) -> None:
        """Takes a unit that has become final."""
        self._units.append(unit)
        join_last(self._units)
        self._wake.set()

    def seal(self, first_token: int) -> None:
        """Takes the end of the prompt: nothing more is pushed."""
        self._first_token = first_token
        self._wake.set()

    def cancel(self) -> None:
        """Gives it up: writing stops after the batch in flight."""
        self._cancelled.set()
        self._wake.set()

    async def run(self) -> None:
        """Writes it, and tells the engine HandedOver or HandOverFailed, as soon as its slots are at rest; then lets the receiving store
        know that nothing will follow, for a lease's time at most: its engine may be waiting for what will not come."""
        try:
            await self._hand_over()
        finally:
            self.ended.set()
            closed = await self._close()
        loop = asyncio.get_running_loop()
        until = loop.time() + self._shared.options.lease_s
        while not closed and loop.time() < until:
            await asyncio.sleep(_REPEAT_S)
            closed = await self._close()

    async def _hand_over(self) -> None:
        start = time.perf_counter()
        try:
            try:
                await self._transfer()
            finally:
                self._shared.pool.end_hand_over(self._attempt_id)
                self._shared.changed()
        except SpringtideError as error:
            metrics.HAND_OVER_SECONDS.labels("failed").observe(time.perf_counter() - start)
            self._failed(error)
            await self._come_to_rest()
        except asyncio.CancelledError:
            await self._come_to_rest()
            raise
        else:
            metrics.HAND_OVER_SECONDS.labels("complete").observe(time.perf_counter() - start)
            self._notify(self._report())

    def _report(self) -> HandedOver:
        began = self._written_at if self._first_write_at is None else self._first_write_at  # nothing but the seal was to be written
        return HandedOver(
            attempt_id=self._attempt_id,
            num_bytes=self._num_bytes,
            span_ms=1000 * (self._written_at - began),
            write_ms=1000 * self._writing_s,
        )

    async def _come_to_rest(self) -> None:
        """Waits until nothing of it can land any more: the ingest can be closed then."""
        if self._route is not None:
            await self._route.drain()

    def _failed(self, error: SpringtideError) -> None:
        level = logging.INFO if isinstance(error, TransferCancelled | UnknownAttempt) else logging.WARNING
        logger.log(level, "hand-over to %s failed: %s", self._address, error, extra={"attempt_id": self._attempt_id})
        self._notify(HandOverFailed(self._attempt_id, failure_of(error)))

    async def _transfer(self) -> None:
        targets = await self._open()
        self._route = await self._unless_cancelled(self._shared.peers.connect(self._address, targets.incarnation))
        await self._write_all(self._route, targets)

    async def _open(self) -> IngestTargets:
        """Waits until the receiving engine has reserved slots, for a lease's time at most. The question is repeated, so that a store that
        has gone silent is noticed."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._shared.options.lease_s
        while not (targets := await self._ask_for_targets()).slots:
            if loop.time() >= until:
                raise TransferTimeout(f"{self._address} reserved nothing for the prompt within {self._shared.options.lease_s:g} s")
        self._progress.remaining_bytes -= targets.present_blocks * self._shared.options.spec.bytes_per_slot
        if len(targets.slots) != len(self._slots):
            raise SpringtideError(f"{self._address} reserved {len(targets.slots)} blocks for a prompt of {len(self._slots)}")
        return targets

    async def _ask_for_targets(self) -> IngestTargets:
        """Has no slots while nothing has been reserved; the receiving store takes its time to say so."""
        request = wire.OPEN_INGEST.encode(OpenIngest(self._attempt_id, self._writer()))
        try:
            call = self._shared.peers.ask(self._address, lambda stub, timeout_s: stub.OpenIngest(request, timeout=timeout_s))
            return wire.INGEST_TARGETS.decode(await self._unless_cancelled(call))
        except grpc.aio.AioRpcError as error:
            raise error_of(error, f"opening the ingest at {self._address}") from error

    def _writer(self) -> Writer:
        return Writer(self._shared.options.node_id, self._shared.incarnation, self._shared.address, self._shared.beside)

    async def _write_all(self, route: StoreRoute, targets: IngestTargets) -> None:
        while (unit := await self._next()) is not None:
            await self._write(route, targets, unit)
        assert self._first_token is not None
        seal = wire.INGEST_NOTICE.encode(IngestSeal(self._attempt_id, self._first_token))
        await self._watched(route.write([], LONGEST_BATCH_S, seal.SerializeToString()))
        self._written_at = time.perf_counter()

    async def _next(self) -> Unit | None:
        """The next unit, or None when everything up to the seal has been taken. Raises TransferCancelled."""
        while True:
            if self._cancelled.is_set():
                raise TransferCancelled("the hand-over was cancelled")
            if self._units:
                return self._units.popleft()
            if self.sealed:
                return None
            self._wake.clear()
            await self._wake.wait()

    async def _write(self, route: StoreRoute, targets: IngestTargets, unit: Unit) -> None:
        spec, layers = self._shared.options.spec, range(unit.layer_begin, unit.layer_end)
        absent = range(max(unit.block_begin, targets.present_blocks), min(unit.block_end, len(targets.slots)))
        pieces = [block_slice(spec, self._slots[i], targets.slots[i], targets.generations[i], layers) for i in absent]
        notice = wire.INGEST_NOTICE.encode(IngestUnit(self._attempt_id, unit)).SerializeToString()
        link = self._shared.peers.link(self._address)
        while pieces:
            async with link.turn(self._progress, [piece.length for piece in pieces], self._unless_cancelled) as turn:
                batch, pieces = pieces[: turn.num_pieces], pieces[turn.num_pieces :]
                began = time.perf_counter()
                self._first_write_at = began if self._first_write_at is None else self._first_write_at
                completion = await self._watched(_write_batch(route, batch, None if pieces else notice))
                turn.moved = completion.num_bytes
                turn.round_trips_s = (1 if pieces else 2) * self._shared.peers.least_round_trip_s(self._address)
                self._writing_s += time.perf_counter() - began
            self._num_bytes += completion.num_bytes
            self._shared.bytes_written += completion.num_bytes
            metrics.HANDED_OVER_BYTES.inc(completion.num_bytes)
            if completion.failed:
                raise next(iter(completion.failed.values()))

    async def _close(self) -> bool:
        """Whether the receiving store has heard it. When it has not, it asks (CancelHandOver) before it gives the slots to others."""
        request = wire.CLOSE_INGEST.encode(CloseIngest(self._attempt_id, self._writer()))
        try:
            await self._shared.peers.ask(self._address, lambda stub, timeout_s: stub.CloseIngest(request, timeout=timeout_s))
            return True
        except grpc.aio.AioRpcError as error:
            logger.info("ingest at %s not closed: %s", self._address, error.details(), extra={"attempt_id": self._attempt_id})
            return False

    async def _watched(self, work: Awaitable[T]) -> T:
        return await self._shared.peers.while_it_lives(self._address, work, self._shared.options.batch_timeout_s)

    async def _unless_cancelled(self, work: Awaitable[T]) -> T:
        """Raises TransferCancelled as soon as the hand-over is, and gives up the work."""
        task = asyncio.ensure_future(work)
        await first_of(task, self._cancelled.wait())
        if self._cancelled.is_set():
            raise TransferCancelled("the hand-over was cancelled")
        return task.result()


async def _write_batch(route: StoreRoute, batch: Sequence[Slice], notice: bytes | None) -> Completion:
    """The notice goes by itself: with the bytes it would be held up by those of other hand-overs that were begun before."""
    completion = await route.write(batch, LONGEST_BATCH_S)
    if notice is not None and not completion.failed:
        await route.write([], LONGEST_BATCH_S, notice)
    return completion


def join_last(units: deque[Unit]) -> None:
    """Joins the last unit to the one before where it continues that in layers or in blocks, and the result again, as far as it goes."""
    while len(units) > 1 and (joined := _join(units[-2], units[-1])) is not None:
        units.pop()
        units[-1] = joined


def _join(first: Unit, second: Unit) -> Unit | None:
    same_layers = (first.layer_begin, first.layer_end) == (second.layer_begin, second.layer_end)
    same_blocks = (first.block_begin, first.block_end) == (second.block_begin, second.block_end)
    if same_blocks and first.layer_end == second.layer_begin:
        return Unit(first.layer_begin, second.layer_end, first.block_begin, first.block_end)
    if same_layers and first.block_end == second.block_begin:
        return Unit(first.layer_begin, first.layer_end, first.block_begin, second.block_end)
    return None
