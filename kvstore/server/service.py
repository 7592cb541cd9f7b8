"""The gRPC services `Store` and `LocalStore`: translate messages, nothing more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc
import grpc.aio

from kvstore.core.ingest import Writer
from kvstore.core.results import PoolEvent, Stored
from kvstore.link import engine_identity
from kvstore.server.departed import DepartedEngines
from kvstore.server.engine import EngineSession, Transfers
from kvstore.server.failures import status_of
from kvstore.server.ingests import Ingests
from kvstore.server.node import Node
from kvstore.server.operations import Context, Operations, or_abort
from kvstore.server.promotion import Promotion
from kvstore.server.replication import Replication
from kvstore.server.watchers import SnapshotPart, WatcherLags
from messenger.base import Endpoint, Identity
from springtide.blocks import checked_keys
from springtide.clock import Clock
from springtide.errors import SpringtideError
from springtide.ids import AttemptId, Incarnation, NodeId
from springtide.protocol import wire
from springtide.protocol.storage import StoreHello, Tier
from springtide.rpc import common_pb2
from springtide.rpc import store_pb2 as pb
from springtide.rpc.store_pb2_grpc import LocalStoreServicer

logger = logging.getLogger(__name__)

STILL_HERE_EVERY_S = 0.5
_TIERS = {Tier.DRAM: pb.TIER_DRAM, Tier.SSD: pb.TIER_SSD}
T = TypeVar("T")


class StoreService(Operations):
    """What other stores, Conductors and operators ask of a store."""

    def __init__(
        self,
        node: Node,
        transfers: Transfers,
        ingests: Ingests,
        replication: Replication,
        promotion: Promotion,
        endpoint: Endpoint,
        clock: Clock,
    ) -> None:
        super().__init__(node, replication, clock)
        self._transfers = transfers
        self._ingests = ingests
        self._promotion = promotion
        self._endpoint = endpoint

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeReply:
        return pb.DescribeReply(node_id=self._node.options.node_id, incarnation=self._node.incarnation, endpoint=self._endpoint.to_json())

    async def Watch(self, request: pb.WatchStoreRequest, context: Context) -> AsyncIterator[pb.StoreEvent]:
        self._node.publish()
        subscription = self._node.watchers.subscribe()
        logger.info("%s watches from event %d on", request.watcher, subscription.sequence)
        sequence = subscription.sequence
        try:
            while True:
                try:
                    async with asyncio.timeout(STILL_HERE_EVERY_S):
                        event = await subscription.next()
                except TimeoutError:
                    yield self._event(sequence, still_here=pb.StillHere())
                else:
                    sequence = event.sequence
                    yield self._translate(event)
        except WatcherLags as error:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, error.message)
        finally:
            self._node.watchers.unsubscribe(subscription)

    async def Lease(self, request: pb.LeaseRequest, context: Context) -> pb.LeaseReply:
        keys = await or_abort(context, checked_keys, request.keys)
        tenant = request.tenant if request.HasField("tenant") else None
        await self._promotion.promote(keys, tenant)
        leased = self._node.pool.lease(request.reader, keys, self._clock.now(), tenant)
        handles = [self._handle(slot, generation) for slot, generation in leased.slots]
        ttl_ms = int(self._node.pool.lease_s * 1000)
        return pb.LeaseReply(lease_id=leased.lease_id, handles=handles, ttl_ms=ttl_ms, tenant=leased.tenant)

    async def RenewLease(self, request: pb.RenewLeaseRequest, context: Context) -> pb.RenewLeaseReply:
        return pb.RenewLeaseReply(lost=self._node.pool.renew_leases(request.lease_ids, self._clock.now()))

    async def ReleaseLease(self, request: pb.ReleaseLeaseRequest, context: Context) -> pb.ReleaseLeaseReply:
        self._node.pool.release_lease(request.lease_id)
        return pb.ReleaseLeaseReply()

    async def OpenIngest(self, request: pb.OpenIngestRequest, context: Context) -> pb.OpenIngestReply:
        writer = Writer(NodeId(request.writer), Incarnation(request.writer_incarnation), request.writer_address)
        targets = await _or_abort(self._ingests.open(AttemptId(request.attempt_id), writer), context)
        blocks = [pb.IngestBlock(handle=self._handle(target.slot, target.generation), present=target.present) for target in targets]
        return pb.OpenIngestReply(blocks=blocks)

    async def CloseIngest(self, request: pb.CloseIngestRequest, context: Context) -> pb.CloseIngestReply:
        self._ingests.close(AttemptId(request.attempt_id), NodeId(request.writer), Incarnation(request.writer_incarnation))
        return pb.CloseIngestReply()

    async def CancelHandOver(self, request: pb.CancelHandOverRequest, context: Context) -> pb.CancelHandOverReply:
        await self._transfers.cancel_hand_over(AttemptId(request.attempt_id))
        return pb.CancelHandOverReply(incarnation=self._node.incarnation)

    def _handle(self, slot: int, generation: int) -> common_pb2.BlockHandle:
        return common_pb2.BlockHandle(
            node_id=self._node.options.node_id, incarnation=self._node.incarnation, slot=slot, generation=generation
        )

    def _translate(self, event: SnapshotPart | PoolEvent) -> pb.StoreEvent:
        tier = _TIERS[event.tier]
        if isinstance(event, SnapshotPart):
            return self._event(event.sequence, snapshot=pb.Snapshot(keys=event.keys, tier=tier, complete=event.complete))
        if isinstance(event, Stored):
            return self._event(event.sequence, stored=pb.BlocksStored(keys=event.keys, tier=tier))
        return self._event(event.sequence, removed=pb.BlocksRemoved(keys=event.keys, tier=tier))

    def _event(
        self,
        sequence: int,
        *,
        snapshot: pb.Snapshot | None = None,
        stored: pb.BlocksStored | None = None,
        removed: pb.BlocksRemoved | None = None,
        still_here: pb.StillHere | None = None,
    ) -> pb.StoreEvent:
        return pb.StoreEvent(
            node_id=self._node.options.node_id,
            incarnation=self._node.incarnation,
            sequence=sequence,
            snapshot=snapshot,
            stored=stored,
            removed=removed,
            still_here=still_here,
        )


class LocalStoreService(LocalStoreServicer):
    """What a node's engine asks of its store. `on_engine` is told of a new engine's session, and of None when it has gone."""

    def __init__(
        self,
        node: Node,
        transfers: Transfers,
        ingests: Ingests,
        departed: DepartedEngines,
        on_engine: Callable[[EngineSession | None], None],
    ) -> None:
        self._node = node
        self._transfers = transfers
        self._ingests = ingests
        self._departed = departed
        self._on_engine = on_engine
        self._session: EngineSession | None = None

    async def Engine(self, requests: AsyncIterator[pb.EngineCommand], context: Context) -> AsyncIterator[pb.StoreNotice]:
        hello = await anext(aiter(requests), None)
        if hello is None or not hello.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an engine's first command is EngineHello")
            return
        session = self._begin(engine_identity(hello.hello.instance_id, hello.hello.incarnation))
        commands = asyncio.create_task(_take_in(requests, session), name="engine commands")
        try:
            yield self._hello()
            while (notice := await session.notices.get()) is not None:
                yield wire.STORE_NOTICE.encode(notice)
        finally:
            commands.cancel()
            self._end(session)

    def _begin(self, engine: Identity) -> EngineSession:
        if self._session is not None:
            logger.warning("%s takes the place of %s", engine.name, self._session.engine.name)
            self._session.close()
        logger.info("%s connected", engine.name)
        self._session = EngineSession(self._node, self._transfers, self._ingests, self._departed, engine)
        self._on_engine(self._session)
        return self._session

    def _end(self, session: EngineSession) -> None:
        session.close()
        logger.info("%s disconnected", session.engine.name)
        if self._session is session:
            self._session = None
            self._on_engine(None)

    def _hello(self) -> pb.StoreNotice:
        options = self._node.options
        return wire.STORE_NOTICE.encode(StoreHello(options.node_id, self._node.incarnation, options.num_slots, self._node.address))


async def _take_in(requests: AsyncIterator[pb.EngineCommand], session: EngineSession) -> None:
    """Until the engine ends the stream. What breaks here ends it too: the engine connects anew, and no attempt waits in vain."""
    try:
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            async for command in requests:
                session.take(command)
    except Exception:
        logger.exception("a command of %s broke; ending its session", session.engine.name)
    finally:
        session.close()


async def _or_abort(work: Awaitable[T], context: Context) -> T:
    try:
        return await work
    except SpringtideError as error:
        await context.abort(status_of(error), error.message)
        raise
