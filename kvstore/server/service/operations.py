"""The part of the gRPC service that operators, and whoever places blocks, use: replicas, pins, what is held and whether it is sound."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import grpc
import grpc.aio

from kvstore.core.listing import Chain
from kvstore.core.pins import Pin, PinKind
from kvstore.server.shared.context import StoreContext
from kvstore.server.shared.failures import status_of
from kvstore.server.shared.ssd import Ssd
from kvstore.server.transfer.replication import Replicator
from springtide.blocks import checked_keys
from springtide.clock import Clock
from springtide.errors import InvalidRequest, SpringtideError
from springtide.ids import BlockKey
from springtide.protocol import wire
from springtide.rpc import store_pb2 as pb
from springtide.rpc.store_pb2_grpc import StoreServicer

MAX_LISTED = 10_000
COMMIT_PATIENCE_S = 1.0
_MAX_TENANTS = 100
_PIN_KINDS = {pb.PIN_KIND_SOFT: PinKind.SOFT, pb.PIN_KIND_HARD: PinKind.HARD}
_PIN_KINDS_ON_THE_WIRE = {kind: number for number, kind in _PIN_KINDS.items()}
P = ParamSpec("P")
T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]


class Operations(StoreServicer):
    """The orders and questions of operators."""

    def __init__(self, shared: StoreContext, replicator: Replicator, clock: Clock) -> None:
        self._shared = shared
        self._replicator = replicator
        self._clock = clock

    async def Replicate(self, request: pb.ReplicateRequest, context: Context) -> pb.ReplicateReply:
        order = await or_abort(context, wire.REPLICATE_PREFIX.decode, request)
        return wire.REPLICATED.encode(await await_or_abort(context, self._replicator.replicate(order.keys, order.sources)))

    # ---- pins ----

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinReply:
        keys, kind = await or_abort(context, checked_keys, request.keys), await or_abort(context, _pin_kind, request.kind)
        await self._committed(keys)
        now = self._clock.now()
        pin = await or_abort(context, self._shared.pool.pins.pin, request.pin_id, keys, kind, request.ttl_ms / 1000, now)
        return pb.PinReply(pin=_pin_info(pin, now))

    async def _committed(self, keys: Sequence[BlockKey]) -> None:
        """Returns when none of this node's attempts is about to commit these blocks, or when that takes long. Whoever has heard of an
        answer asks to pin its prompt over another way than the engine's word of the same blocks takes, and may be the faster."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COMMIT_PATIENCE_S):
                while self._shared.pool.committing(keys):
                    await self._shared.next_change()

    async def RenewPin(self, request: pb.RenewPinRequest, context: Context) -> pb.PinReply:
        now = self._clock.now()
        pin = await or_abort(context, self._shared.pool.pins.renew, request.pin_id, request.ttl_ms / 1000, now)
        return pb.PinReply(pin=_pin_info(pin, now))

    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.PinReply:
        pin = await or_abort(context, self._shared.pool.pins.unpin, request.pin_id)
        return pb.PinReply(pin=_pin_info(pin, self._clock.now()))

    async def ListPins(self, request: pb.ListPinsRequest, context: Context) -> pb.ListPinsReply:
        now = self._clock.now()
        return pb.ListPinsReply(pins=[_pin_info(pin, now) for pin in self._shared.pool.pins])

    # ---- what is held ----

    async def ListBlocks(self, request: pb.ListBlocksRequest, context: Context) -> pb.ListBlocksReply:
        spec, pool = self._shared.options.spec, self._shared.pool
        if request.keys:
            part = pool.listing.held_part(await or_abort(context, checked_keys, request.keys))
            chains, total = ([part], 1) if part is not None else ([], 0)
        else:
            chains, total = pool.listing.chains(request.key_prefix.lower(), min(request.limit, MAX_LISTED))
        return pb.ListBlocksReply(
            chains=[_chain(chain) for chain in chains], total=total, bytes_per_block=spec.bytes_per_slot, block_tokens=spec.block_tokens
        )

    async def Evict(self, request: pb.EvictRequest, context: Context) -> pb.EvictReply:
        evicted = self._shared.pool.evict(None if request.all else await or_abort(context, checked_keys, request.keys))
        self._shared.changed()
        if self._shared.ssd is not None:
            await self._shared.ssd.remove(evicted.copies)
        return pb.EvictReply(blocks=evicted.blocks, kept_blocks=evicted.kept, ssd_blocks=len(evicted.copies))

    async def Verify(self, request: pb.VerifyRequest, context: Context) -> pb.VerifyReply:
        start, pool = time.perf_counter(), self._shared.pool
        problem = ""
        try:
            pool.validate()
        except AssertionError as error:
            problem = str(error) or "an invariant does not hold"
        ssd, num_read = self._shared.ssd, 0
        if request.ssd and ssd is not None and not problem:
            num_read = len(ssd.blocks)
            bad = await ssd.verify()
            self._shared.changed()
            if bad:
                problem = f"{len(bad)} blocks on the SSD were not what they had been and are dropped, that of {bad[0].hex()} first"
        elapsed_ms = (time.perf_counter() - start) * 1000
        return pb.VerifyReply(
            slots=pool.counts().total, blocks=pool.num_blocks, elapsed_ms=elapsed_ms, problem=problem, ssd_blocks=num_read
        )

    async def Stat(self, request: pb.StatRequest, context: Context) -> pb.StatReply:
        counts, pool = self._shared.pool.counts(), self._shared.pool
        return pb.StatReply(
            node_id=self._shared.options.node_id,
            incarnation=self._shared.incarnation,
            slots_total=counts.total,
            slots_free=counts.free,
            slots_cached=counts.cached,
            slots_in_use=counts.in_use,
            slots_quarantined=counts.quarantined,
            lookups_blocks=pool.looked_up_blocks,
            hits_blocks=pool.hit_blocks,
            bytes_read=self._shared.bytes_read,
            bytes_written=self._shared.bytes_written,
            bytes_per_slot=self._shared.options.spec.bytes_per_slot,
            leases=counts.leases,
            pins=len(pool.pins),
            blocks_hard_pinned=pool.pins.num_hard,
            blocks_soft_pinned=pool.pins.num_soft,
            hard_pin_limit=pool.pins.hard_limit,
            sequence=pool.sequence,
            tenants=[
                pb.TenantUsage(tenant=tenant.name, slots=tenant.slots, slots_cached=tenant.unreferenced, quota_slots=tenant.quota)
                for tenant in heapq.nlargest(_MAX_TENANTS, pool.tenants, key=lambda tenant: tenant.slots)
            ],
            watchers=len(self._shared.watchers),
            watchers_cut_off=self._shared.watchers.num_cut_off,
            ssd=None if self._shared.ssd is None else _ssd_stat(self._shared.ssd),
            slots_free_or_spare=pool.num_free_or_spare,
        )


async def or_abort(context: Context, do: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Returns what `do` returns; what it raises ends the call."""
    try:
        return do(*arguments, **named)
    except SpringtideError as error:
        await context.abort(status_of(error), error.message)
        raise


async def await_or_abort(context: Context, work: Awaitable[T]) -> T:
    """Returns what `work` comes to; what it raises ends the call."""
    try:
        return await work
    except SpringtideError as error:
        await context.abort(status_of(error), error.message)
        raise


def _ssd_stat(ssd: Ssd) -> pb.SsdStat:
    counts = ssd.counts()
    return pb.SsdStat(
        state=counts.state.value,
        blocks=counts.held,
        free_blocks=counts.free,
        capacity_blocks=counts.capacity,
        dropped=counts.dropped,
        missed=ssd.blocks.missed,
        read_us_per_block=ssd.read_us_per_block,
        direct=ssd.own.tier.direct,
    )


def _pin_kind(kind: pb.PinKind) -> PinKind:
    """Raises InvalidRequest."""
    if kind not in _PIN_KINDS:
        raise InvalidRequest(f"kind must be PIN_KIND_SOFT or PIN_KIND_HARD, not {kind}", param="kind")
    return _PIN_KINDS[kind]


def _pin_info(pin: Pin, now: float) -> pb.PinInfo:
    return pb.PinInfo(
        pin_id=pin.pin_id,
        kind=_PIN_KINDS_ON_THE_WIRE[pin.kind],
        blocks=len(pin.blocks),
        ttl_ms=max(0, round((pin.expires_at - now) * 1000)),
        tenant=pin.tenant,
    )


def _chain(chain: Chain) -> pb.BlockChain:
    return pb.BlockChain(
        key=chain.key,
        blocks=chain.blocks,
        own_blocks=chain.own_blocks,
        children=chain.children,
        references=chain.references,
        pin=pb.PIN_KIND_UNSPECIFIED if chain.pin is None else _PIN_KINDS_ON_THE_WIRE[chain.pin],
        tenant=chain.tenant,
    )
