"""Brings the blocks of a prefix from another store into an attempt's slots, layer by layer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

import grpc.aio

from kvstore import metrics
from kvstore.core.results import Acquired, UnknownAttempt
from kvstore.server.failures import TransferCancelled, error_of
from kvstore.server.node import Node
from kvstore.server.peers import CALL_TIMEOUT_S
from kvstore.server.slabs import BATCH_TIMEOUT_S, batches, block_slice, layer_groups
from messenger.base import Connection
from springtide.errors import SpringtideError
from springtide.ids import AttemptId, Slot
from springtide.rpc import common_pb2
from springtide.rpc import store_pb2 as pb

logger = logging.getLogger(__name__)

Notify = Callable[[pb.StoreNotice], None]


class Fetch:
    """`acquired` are the attempt's slots; blocks [acquired.local_blocks, len(keys)) are wanted from the store at `source`."""

    def __init__(self, node: Node, notify: Notify, attempt_id: AttemptId, acquired: Acquired, keys: Sequence[bytes], source: str) -> None:
        self._node = node
        self._notify = notify
        self._attempt_id = attempt_id
        self._acquired = acquired
        self._keys = keys
        self._source = source
        self._cancelled = False

    def cancel(self) -> None:
        """The engine does not want it any more. Reading stops after the batch under way; the slots are held until then."""
        self._cancelled = True

    async def run(self) -> None:
        """Answers the Acquire, with as many remote blocks as the source could lease, then reads them."""
        try:
            lease = await self._lease()
        except SpringtideError as error:
            self._go_without(error)
            return
        renewing = asyncio.create_task(self._renew(lease), name=f"renew lease {lease.lease_id}")
        try:
            await self._fetch(lease.handles[self._acquired.local_blocks :])
        finally:
            renewing.cancel()
            await self._release(lease)

    async def _fetch(self, handles: Sequence[common_pb2.BlockHandle]) -> None:
        local = self._acquired.local_blocks
        if not handles:
            self._answer(0)
            return
        try:
            connection = await self._node.peers.connect(self._source, handles[0].incarnation)
        except SpringtideError as error:
            self._go_without(error)
            return
        try:
            slots = self._node.pool.begin_fetch(self._attempt_id, range(local, local + len(handles)))
        except UnknownAttempt:  # released meanwhile
            return
        self._answer(len(handles))
        await self._read_all(connection, slots, handles)

    def _go_without(self, error: SpringtideError) -> None:
        logger.warning("no prefix from %s: %s", self._source, error, extra={"attempt_id": self._attempt_id})
        self._answer(0)

    def _answer(self, remote_blocks: int) -> None:
        self._notify(
            pb.StoreNotice(
                acquired=pb.Acquired(
                    attempt_id=self._attempt_id,
                    slots=self._acquired.slots,
                    local_blocks=self._acquired.local_blocks,
                    remote_blocks=remote_blocks,
                )
            )
        )

    async def _read_all(self, connection: Connection, slots: Sequence[Slot], handles: Sequence[common_pb2.BlockHandle]) -> None:
        """Ends the fetch in the pool before it says so, for the engine goes on from there."""
        start, local, valid = time.perf_counter(), self._acquired.local_blocks, 0
        try:
            valid = await self._read_layers(connection, slots, handles)
        except SpringtideError as error:
            logger.warning("fetch from %s broke off: %s", self._source, error, extra={"attempt_id": self._attempt_id})
        finally:
            self._node.pool.end_fetch(self._attempt_id, local + valid)
            self._node.changed()
        complete = valid == len(handles)
        metrics.FETCHED_BLOCKS.inc(valid)
        metrics.FETCH_SECONDS.labels("complete" if complete else "truncated").observe(time.perf_counter() - start)
        if complete:
            self._progress(self._node.options.spec.layers)
        else:
            truncated = pb.FetchTruncated(attempt_id=self._attempt_id, valid_blocks=local + valid)
            self._notify(pb.StoreNotice(fetch_truncated=truncated))

    async def _read_layers(self, connection: Connection, slots: Sequence[Slot], handles: Sequence[common_pb2.BlockHandle]) -> int:
        """How many blocks arrived in all layers: those before the first that the source refused. Raises PeerLost, DeadlineExceeded."""
        spec, valid = self._node.options.spec, len(handles)
        for layers in layer_groups(spec, len(handles), self._node.options.layer_group_bytes):
            pieces = [block_slice(spec, slots[i], handles[i].slot, handles[i].generation, layers) for i in range(valid)]
            done = 0
            for batch in batches(pieces):
                if self._cancelled:
                    raise TransferCancelled("the engine has let go of it")
                completion = await connection.read(batch, BATCH_TIMEOUT_S)
                self._node.bytes_read += completion.num_bytes
                metrics.FETCHED_BYTES.inc(completion.num_bytes)
                if completion.failed:
                    valid = done + min(completion.failed)
                    break
                done += len(batch)
            if valid == 0:
                break
            if valid == len(handles) and layers.stop < spec.layers:
                self._progress(layers.stop)
        return valid

    def _progress(self, layers_ready: int) -> None:
        self._notify(pb.StoreNotice(fetch_progress=pb.FetchProgress(attempt_id=self._attempt_id, layers_ready=layers_ready)))

    async def _lease(self) -> pb.LeaseReply:
        request = pb.LeaseRequest(attempt_id=self._attempt_id, reader=self._node.options.node_id, keys=self._keys)
        try:
            reply: pb.LeaseReply = await self._node.peers.stub(self._source).Lease(request, timeout=CALL_TIMEOUT_S)
            return reply
        except grpc.aio.AioRpcError as error:
            raise error_of(error, "leasing") from error

    async def _renew(self, lease: pb.LeaseReply) -> None:
        request = pb.RenewLeaseRequest(lease_ids=[lease.lease_id])
        while True:
            await asyncio.sleep(lease.ttl_ms / 3000)
            with contextlib.suppress(grpc.aio.AioRpcError):  # a block that is lost by it is refused when it is read
                await self._node.peers.stub(self._source).RenewLease(request, timeout=CALL_TIMEOUT_S)

    async def _release(self, lease: pb.LeaseReply) -> None:
        if lease.lease_id:
            with contextlib.suppress(grpc.aio.AioRpcError):  # it expires
                request = pb.ReleaseLeaseRequest(lease_id=lease.lease_id)
                await self._node.peers.stub(self._source).ReleaseLease(request, timeout=CALL_TIMEOUT_S)
