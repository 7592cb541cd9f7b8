"""The gRPC service `Store`, as other stores and Conductors use it: translates messages, nothing more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import grpc

from kvstore.server.service.operations import Context, Operations, await_or_abort, or_abort
from kvstore.server.shared.context import StoreContext
from kvstore.server.shared.watchers import WatcherLags
from kvstore.server.transfer.attempt_transfers import AttemptTransfers
from kvstore.server.transfer.ingests import Ingests
from kvstore.server.transfer.promotion import Promotion
from kvstore.server.transfer.replication import Replicator
from messenger.base import Endpoint
from springtide.clock import Clock
from springtide.ids import AttemptId
from springtide.protocol import wire
from springtide.protocol.storage import LayersAt, StillHere
from springtide.rpc import store_pb2 as pb

logger = logging.getLogger(__name__)

STILL_HERE_EVERY_S = 0.5


class StoreService(Operations):
    """The service: what other stores, Conductors and operators ask of a store."""

    def __init__(
        self,
        shared: StoreContext,
        transfers: AttemptTransfers,
        ingests: Ingests,
        replicator: Replicator,
        promotion: Promotion,
        endpoint: Endpoint,
        clock: Clock,
        layers: Sequence[LayersAt] = (),
    ) -> None:
        """`layers`: where the memories of the bundle are, where this is the first store of one."""
        super().__init__(shared, replicator, clock)
        self._layers = [*map(wire.LAYERS_AT.encode, layers)]
        self._transfers = transfers
        self._ingests = ingests
        self._promotion = promotion
        self._endpoint = endpoint

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeReply:
        return pb.DescribeReply(
            node_id=self._shared.options.node_id,
            incarnation=self._shared.incarnation,
            endpoint=self._endpoint.to_json(),
            layers=self._layers,
        )

    async def Watch(self, request: pb.WatchStoreRequest, context: Context) -> AsyncIterator[pb.StoreEvent]:
        self._shared.publish()
        subscription = self._shared.watchers.subscribe()
        logger.info("%s watches from event %d on", request.watcher, subscription.sequence)
        sequence = subscription.sequence
        try:
            while True:
                try:
                    async with asyncio.timeout(STILL_HERE_EVERY_S):
                        event = await subscription.next()
                except TimeoutError:
                    yield wire.STORE_EVENT.encode(StillHere(sequence))
                else:
                    sequence = event.sequence
                    yield wire.STORE_EVENT.encode(event)
        except WatcherLags as error:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, error.message)
        finally:
            self._shared.watchers.unsubscribe(subscription)

    async def Lease(self, request: pb.LeaseRequest, context: Context) -> pb.LeaseReply:
        asked = await or_abort(context, wire.LEASE_PREFIX.decode, request)
        await self._promotion.promote(asked.keys, asked.tenant)
        return wire.LEASED_PREFIX.encode(self._shared.pool.lease(asked.reader, asked.keys, self._clock.now(), asked.tenant))

    async def RenewLease(self, request: pb.RenewLeaseRequest, context: Context) -> pb.RenewLeaseReply:
        return pb.RenewLeaseReply(lost=self._shared.pool.renew_leases(request.lease_ids, self._clock.now()))

    async def ReleaseLease(self, request: pb.ReleaseLeaseRequest, context: Context) -> pb.ReleaseLeaseReply:
        self._shared.pool.release_lease(request.lease_id)
        return pb.ReleaseLeaseReply()

    async def OpenIngest(self, request: pb.OpenIngestRequest, context: Context) -> pb.OpenIngestReply:
        asked = wire.OPEN_INGEST.decode(request)
        return wire.INGEST_TARGETS.encode(await await_or_abort(context, self._ingests.open(asked.attempt_id, asked.writer)))

    async def CloseIngest(self, request: pb.CloseIngestRequest, context: Context) -> pb.CloseIngestReply:
        told = wire.CLOSE_INGEST.decode(request)
        self._ingests.close(told.attempt_id, told.writer.node_id, told.writer.incarnation)
        return pb.CloseIngestReply()

    async def CancelHandOver(self, request: pb.CancelHandOverRequest, context: Context) -> pb.CancelHandOverReply:
        await self._transfers.cancel_hand_over(AttemptId(request.attempt_id))
        return pb.CancelHandOverReply(incarnation=self._shared.incarnation)
