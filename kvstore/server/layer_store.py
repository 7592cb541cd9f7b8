"""A layer store: arena, Messenger and gRPC service put together, for the first store of a bundle to order about (shared/bundle.py)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from kvstore.server.service.operations import Context, or_abort
from kvstore.server.shared.arena import MakeTransport, StoreArena
from kvstore.server.shared.context import StoreOptions
from kvstore.server.shared.failures import failure_of
from kvstore.server.shared.routes import MessengerMover
from kvstore.server.shared.stripe_ssd import KEYS_A_MESSAGE, Copy, OwnSsd, state_of
from kvstore.ssd.disk import Disk
from kvstore.ssd.errors import SsdUnavailable
from kvstore.ssd.tier import SsdTier
from messenger.base import Completion, Endpoint, Identity, Slice
from springtide.errors import SpringtideError
from springtide.ids import Slot, new_incarnation
from springtide.protocol import layer_stores, wire
from springtide.protocol.layer_stores import BundleJoined, CopiesGot, CopiesPut, JoinBundle, KeptBlocks, Moved, SetGenerations, StillThere
from springtide.protocol.storage import LayersAt
from springtide.rpc import channels
from springtide.rpc import layer_store_pb2 as pb
from springtide.rpc.layer_store_pb2_grpc import LayerStoreServicer, add_LayerStoreServicer_to_server
from springtide.supervision import end

logger = logging.getLogger(__name__)

SIGN_EVERY_S = 0.5
STOP_GRACE_S = 0.5


class LayerStore(LayerStoreServicer):
    """The store of a node with a further stage of a prefill group, for one time in a bundle: `start`, `run` until that has ended, `close`.
    Methods with capitals are called by gRPC."""

    def __init__(self, options: StoreOptions, make_transport: MakeTransport | None = None, disk: Disk | None = None) -> None:
        """As of Store. Raises NoMemory."""
        self.options = options
        self._disk = disk
        self._ssd: OwnSsd | None = None
        self.incarnation = new_incarnation()
        self._arena = StoreArena(options, self.incarnation, lambda peer, payload: None, make_transport)
        self._arena.memory.region.generations[:] = 1  # as a pool begins with
        self._mover = MessengerMover(self._arena.messenger)
        self._moves: dict[int, asyncio.Task[Completion]] = {}
        self._server = channels.new_server(options.credentials)
        self._joined = False
        self._ended = asyncio.Event()
        self._endpoint: Endpoint | None = None
        self.address = ""
        """gRPC host:port; empty until it is served."""

    async def start(self) -> Endpoint:
        """Serves once it has passed a transfer to itself. Raises OSError, ValueError or SpringtideError."""
        endpoint = self._endpoint = await self._arena.start()
        await self._arena.self_test(endpoint, 0)
        if (ssd := self.options.ssd) is not None:
            size = self._arena.bytes_per_slot
            tier = await SsdTier.open(ssd.directory, ssd.capacity_bytes, size, ssd.fingerprint, self._disk)
            self._ssd = OwnSsd(tier, self._arena.memory.region.memory, size)
        add_LayerStoreServicer_to_server(self, self._server)
        self.address = channels.listen(self._server, f"{self.options.bind_host}:0", self.options.credentials)
        await self._server.start()
        layers, slots = self.options.own_layers, self.options.num_slots
        logger.info("layer store serves layers %d to %d of %d slots at %s", layers.start, layers.stop - 1, slots, self.address)
        return endpoint

    async def run(self) -> None:
        """Returns when the bundle that it was in has ended: its memory is worth nothing any more."""
        await self._ended.wait()

    async def close(self) -> None:
        self._ended.set()
        await end(*self._moves.values())
        await self._server.stop(STOP_GRACE_S)
        await self._arena.stop()
        if self._ssd is not None:
            await self._ssd.close()
        self._arena.close()

    # ---- what its bundle's first store says ----

    async def Serve(self, request_iterator: AsyncIterator[pb.LayerOrder], context: Context) -> AsyncIterator[pb.LayerReport]:
        first = await anext(aiter(request_iterator), None)
        join = await or_abort(context, wire.LAYER_ORDER.decode, first) if first is not None else None
        if not isinstance(join, JoinBundle):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first order of a bundle is JoinBundle")
            return
        if self._joined or self._ended.is_set():
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it is in a bundle, whose end will be that of this process")
            return
        self._joined = True
        logger.info("joined the bundle of %s", join.node_id)
        taking = asyncio.create_task(self._take_in(request_iterator), name="orders of the bundle")
        try:
            yield wire.LAYER_REPORT.encode(self._greeting())
            while not (await asyncio.wait({taking}, timeout=SIGN_EVERY_S))[0]:
                yield wire.LAYER_REPORT.encode(StillThere(None if self._ssd is None else state_of(self._ssd)))
        finally:
            await end(taking)
            logger.warning("the bundle of %s has ended", join.node_id)
            self._ended.set()

    async def Move(self, request: pb.MoveRequest, context: Context) -> pb.MoveReply:
        asked = await or_abort(context, wire.MOVE.decode, request)
        moving = self._moves[asked.move_id] = asyncio.create_task(self._move(asked), name=f"move {asked.move_id}")
        moving.add_done_callback(lambda _: self._moves.pop(asked.move_id))
        try:
            await asyncio.wait({moving})
        finally:
            moving.cancel()
        if moving.cancelled():
            return wire.MOVED.encode(Moved(0, failure=failure_of(SpringtideError("the move was cancelled"))))
        error = moving.exception()
        if error is None:
            completion = moving.result()
            return wire.MOVED.encode(Moved(completion.num_bytes, {index: why.message for index, why in completion.failed.items()}))
        if not isinstance(error, SpringtideError):
            logger.error("a move broke", exc_info=error)
            error = SpringtideError(f"a layer store failed in a move: {error!r}")
        return wire.MOVED.encode(Moved(0, failure=failure_of(error)))

    async def Cancel(self, request: pb.CancelMoveRequest, context: Context) -> pb.CancelMoveReply:
        if (move := self._moves.get(request.move_id)) is not None:
            move.cancel()
        return pb.CancelMoveReply()

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:
        await self._mover.drain(Endpoint.from_json(request.endpoint))
        return pb.DrainReply()

    async def HasLetGo(self, request: pb.HasLetGoRequest, context: Context) -> pb.HasLetGoReply:
        return pb.HasLetGoReply(has_let_go=await self._arena.has_let_go(Identity(request.engine, request.incarnation)))

    # ---- its SSD ----

    async def ListKept(self, request: pb.ListKeptRequest, context: Context) -> AsyncIterator[pb.KeptBlocks]:
        keys = await (await self._ssd_or_abort(context)).kept()
        for begin in range(0, len(keys), KEYS_A_MESSAGE):
            yield wire.KEPT_BLOCKS.encode(KeptBlocks(tuple(keys[begin : begin + KEYS_A_MESSAGE])))

    async def CopyOut(self, request: pb.CopyOutRequest, context: Context) -> pb.CopyOutReply:
        ssd = await self._ssd_or_abort(context)
        return pb.CopyOutReply(copy_id=await ssd.copy_out([*map(Slot, request.slots)]))

    async def Put(self, request: pb.PutCopiesRequest, context: Context) -> pb.PutCopiesReply:
        ssd, asked = await self._ssd_or_abort(context), await or_abort(context, wire.PUT_COPIES.decode, request)
        held, lacking = await ssd.put(asked.copy_id, [*map(Copy, asked.places, asked.keys, asked.parents)])
        return wire.COPIES_PUT.encode(CopiesPut(held, tuple(lacking), state_of(ssd)))

    async def Get(self, request: pb.GetCopiesRequest, context: Context) -> pb.GetCopiesReply:
        ssd, asked = await self._ssd_or_abort(context), await or_abort(context, wire.GET_COPIES.decode, request)
        slots = [*map(Slot, asked.slots)]
        errors = await (ssd.get(asked.keys, slots) if slots else ssd.check(asked.keys))
        failed = {index: error.message for index, error in enumerate(errors) if error is not None}
        return wire.COPIES_GOT.encode(CopiesGot(failed, state_of(ssd)))

    async def Remove(self, request: pb.RemoveCopiesRequest, context: Context) -> pb.SsdState:
        ssd, asked = await self._ssd_or_abort(context), await or_abort(context, wire.REMOVE_COPIES.decode, request)
        await ssd.remove(asked.keys)
        return wire.SSD_STATE.encode(state_of(ssd))

    async def _ssd_or_abort(self, context: Context) -> OwnSsd:
        if self._ssd is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it has no SSD")
            raise SsdUnavailable("it has no SSD")
        return self._ssd

    def _greeting(self) -> BundleJoined:
        assert self._endpoint is not None, "it serves once it has one"
        layers = self.options.own_layers
        at = LayersAt(layers.start, layers.stop, self._endpoint.to_json())
        return BundleJoined(self.options.node_id, at, self.options.num_slots, None if self._ssd is None else state_of(self._ssd))

    async def _take_in(self, orders: AsyncIterator[pb.LayerOrder]) -> None:
        async for message in orders:
            order: Any = wire.LAYER_ORDER.decode(message)
            if isinstance(order, SetGenerations):
                self._arena.memory.region.generations[[*order.slots]] = [*order.generations]
                self._arena.messenger.settle()

    async def _move(self, asked: layer_stores.Move) -> Completion:
        columns = zip(asked.local_offsets, asked.remote_offsets, asked.lengths, asked.generations, strict=True)
        return await self._mover.move(Endpoint.from_json(asked.endpoint), asked.reads, [Slice(*each) for each in columns], asked.timeout_s)
