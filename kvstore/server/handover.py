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
from kvstore.core.ingest import Unit
from kvstore.core.results import UnknownAttempt
from kvstore.server.failures import TransferCancelled, error_of, failure_of
from kvstore.server.node import Node
from kvstore.server.peers import CALL_TIMEOUT_S
from kvstore.server.slabs import BATCH_TIMEOUT_S, batches, block_slice
from messenger.base import Connection, DeadlineExceeded
from springtide.errors import PeerLost, SpringtideError
from springtide.ids import AttemptId, Slot
from springtide.rpc import store_pb2 as pb

logger = logging.getLogger(__name__)

T = TypeVar("T")
Notify = Callable[[pb.StoreNotice], None]


class HandOver:
    """One attempt's. The engine pushes units as they become final and never waits; what it pushes faster than the network takes is joined
    to larger units. Order is kept, and the seal is the last. The slots are held by the hand-over until `run` has read them for good."""

    def __init__(self, node: Node, notify: Notify, attempt_id: AttemptId, slots: Sequence[Slot], address: str) -> None:
        self._node = node
        self._notify = notify
        self._attempt_id = attempt_id
        self._slots = slots
        self._address = address
        self._units: deque[Unit] = deque()
        self._first_token: int | None = None
        self._wake = asyncio.Event()
        self._cancelled = asyncio.Event()
        self._num_bytes = 0
        self.ended = asyncio.Event()
        """This store will not write for the attempt any more."""

    @property
    def sealed(self) -> bool:
        return self._first_token is not None

    def push(self, unit: Unit) -> None:
        self._units.append(unit)
        self._wake.set()

    def seal(self, first_token: int) -> None:
        self._first_token = first_token
        self._wake.set()

    def cancel(self) -> None:
        """Writing stops after the batch under way."""
        self._cancelled.set()
        self._wake.set()

    async def run(self) -> None:
        """Ends with HandedOver or HandOverFailed."""
        start = time.perf_counter()
        try:
            await self._transfer()
        except SpringtideError as error:
            metrics.HAND_OVER_SECONDS.labels("failed").observe(time.perf_counter() - start)
            logger.log(
                logging.INFO if isinstance(error, TransferCancelled | UnknownAttempt) else logging.WARNING,
                "hand-over to %s failed: %s",
                self._address,
                error,
                extra={"attempt_id": self._attempt_id},
            )
            self._notify(pb.StoreNotice(hand_over_failed=pb.HandOverFailed(attempt_id=self._attempt_id, failure=failure_of(error))))
        else:
            metrics.HAND_OVER_SECONDS.labels("complete").observe(time.perf_counter() - start)
            self._notify(pb.StoreNotice(handed_over=pb.HandedOver(attempt_id=self._attempt_id, num_bytes=self._num_bytes)))

    async def _transfer(self) -> None:
        try:
            try:
                targets = await self._open()
                connection = await self._unless_cancelled(self._node.peers.connect(self._address, targets[0].handle.incarnation))
                try:
                    await self._write_all(connection, targets)
                except (PeerLost, DeadlineExceeded):
                    await connection.close()  # broken anyhow; after this nothing of it lands, and the ingest can be closed
                    raise
            finally:
                self._node.pool.end_hand_over(self._attempt_id)
                self._node.changed()
                self.ended.set()
        finally:
            await self._close()

    async def _open(self) -> Sequence[pb.IngestBlock]:
        """Waits until the receiving engine has reserved slots, for a lease's time at most."""
        options = self._node.options
        request = pb.OpenIngestRequest(
            attempt_id=self._attempt_id,
            writer=options.node_id,
            writer_incarnation=self._node.incarnation,
            writer_address=self._node.address,
        )
        call = self._node.peers.stub(self._address).OpenIngest(request, timeout=options.lease_s)
        try:
            reply: pb.OpenIngestReply = await self._unless_cancelled(call)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, f"opening the ingest at {self._address}") from error
        if len(reply.blocks) != len(self._slots):
            raise SpringtideError(f"{self._address} reserved {len(reply.blocks)} blocks for a prompt of {len(self._slots)}")
        return reply.blocks

    async def _write_all(self, connection: Connection, targets: Sequence[pb.IngestBlock]) -> None:
        while (unit := await self._next()) is not None:
            await self._write(connection, targets, unit)
        assert self._first_token is not None
        seal = pb.IngestNotice(attempt_id=self._attempt_id, seal=pb.IngestSeal(first_token=self._first_token))
        await connection.write([], BATCH_TIMEOUT_S, seal.SerializeToString())

    async def _next(self) -> Unit | None:
        """The next unit, or None when everything up to the seal has been taken. Raises TransferCancelled."""
        while True:
            if self._cancelled.is_set():
                raise TransferCancelled("the hand-over was cancelled")
            if self._units:
                return join_units(self._units)
            if self.sealed:
                return None
            self._wake.clear()
            await self._wake.wait()

    async def _write(self, connection: Connection, targets: Sequence[pb.IngestBlock], unit: Unit) -> None:
        layers = range(unit.layer_begin, unit.layer_end)
        blocks = [i for i in range(unit.block_begin, min(unit.block_end, len(targets))) if not targets[i].present]
        handles = [(self._slots[i], targets[i].handle) for i in blocks]
        pieces = [block_slice(self._node.options.spec, slot, handle.slot, handle.generation, layers) for slot, handle in handles]
        done = pb.IngestUnit(layer_begin=unit.layer_begin, layer_end=unit.layer_end, block_begin=unit.block_begin, block_end=unit.block_end)
        notice = pb.IngestNotice(attempt_id=self._attempt_id, unit=done).SerializeToString()
        written = 0
        for batch in batches(pieces):
            if self._cancelled.is_set():
                raise TransferCancelled("the hand-over was cancelled")
            written += len(batch)
            completion = await connection.write(batch, BATCH_TIMEOUT_S, notice if written == len(pieces) else None)
            self._num_bytes += completion.num_bytes
            self._node.bytes_written += completion.num_bytes
            metrics.HANDED_OVER_BYTES.inc(completion.num_bytes)
            if completion.failed:
                raise next(iter(completion.failed.values()))

    async def _close(self) -> None:
        """When this is lost, the receiving store asks (CancelHandOver) before it gives the slots to others."""
        request = pb.CloseIngestRequest(
            attempt_id=self._attempt_id, writer=self._node.options.node_id, writer_incarnation=self._node.incarnation
        )
        try:
            await self._node.peers.stub(self._address).CloseIngest(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            logger.info("ingest at %s not closed: %s", self._address, error.details(), extra={"attempt_id": self._attempt_id})

    async def _unless_cancelled(self, work: Awaitable[T]) -> T:
        """Raises TransferCancelled as soon as the hand-over is, and gives up the work."""
        task = asyncio.ensure_future(work)
        cancelled = asyncio.create_task(self._cancelled.wait())
        try:
            await asyncio.wait({task, cancelled}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise TransferCancelled("the hand-over was cancelled")
            return task.result()
        finally:
            task.cancel()
            cancelled.cancel()


def join_units(units: deque[Unit]) -> Unit:
    """Takes the first unit, and those after it that continue it in layers or in blocks."""
    joined = units.popleft()
    while units:
        following = units[0]
        same_layers = (joined.layer_begin, joined.layer_end) == (following.layer_begin, following.layer_end)
        same_blocks = (joined.block_begin, joined.block_end) == (following.block_begin, following.block_end)
        if same_blocks and joined.layer_end == following.layer_begin:
            joined = Unit(joined.layer_begin, following.layer_end, joined.block_begin, joined.block_end)
        elif same_layers and joined.block_end == following.block_begin:
            joined = Unit(joined.layer_begin, joined.layer_end, joined.block_begin, following.block_end)
        else:
            break
        units.popleft()
    return joined
