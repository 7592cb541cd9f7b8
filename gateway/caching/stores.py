"""The way to the stores of the cluster: which there are, and what a context cache's keeper orders of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc
import grpc.aio

from gateway.caching.context import ContextCache, Strength
from gateway.caching.core import Copied, NotPinned, Pinned, Store, TooManyHard
from springtide.credentials import OPEN, Credentials
from springtide.ids import BlockKey, Incarnation, NodeId
from springtide.membership import Membership
from springtide.protocol import wire
from springtide.protocol.scheduling import PrefixSource
from springtide.protocol.storage import ReplicatePrefix
from springtide.rpc import store_pb2 as pb
from springtide.rpc.channels import connect
from springtide.rpc.store_pb2_grpc import StoreStub

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 3.0
COPY_TIMEOUT_S = 120.0
_KINDS = {Strength.SOFT: pb.PIN_KIND_SOFT, Strength.HARD: pb.PIN_KIND_HARD}
T = TypeVar("T")


class Stores:
    """The stores, connected when they are first asked."""

    def __init__(self, membership: Membership, credentials: Credentials = OPEN) -> None:
        self._membership = membership
        self._credentials = credentials
        self._seen: dict[NodeId, Store] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def seen(self) -> tuple[Store, ...]:
        """Those that there were when last looked."""
        return tuple(self._seen.values())

    @property
    def word(self) -> str:
        """The same as long as the stores are."""
        return " ".join(f"{store.node_id}:{store.incarnation}" for store in self.seen)

    async def look(self) -> None:
        """Sees which there are. While Valkey cannot be asked, those last seen are."""
        members = await self._membership.members()
        if members is None:
            return
        prefilling = {member.node_id for member in members if member.role == "prefill"}
        self._seen = {
            NodeId(member.member_id): Store(
                NodeId(member.member_id), Incarnation(member.incarnation), member.address, member.member_id in prefilling
            )
            for member in members
            if member.role == "store"
        }
        addresses = {store.address for store in self.seen}
        for address in self._channels.keys() - addresses:
            self._hang_up(self._channels.pop(address))

    def store(self, node_id: NodeId) -> Store | None:
        return self._seen.get(node_id)

    async def pin(
        self, node_id: NodeId, cache: ContextCache, keys: Sequence[BlockKey], strength: Strength, ttl_s: float
    ) -> Pinned | NotPinned | TooManyHard:
        request = pb.PinRequest(pin_id=cache.pin_id, keys=keys, kind=_KINDS[strength], ttl_ms=max(1, round(ttl_s * 1000)))
        try:
            reply = await self._ask(node_id, lambda stub: stub.Pin(request, timeout=ASK_TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            match error.code():
                case grpc.StatusCode.NOT_FOUND:
                    return Pinned(node_id, 0)
                case grpc.StatusCode.RESOURCE_EXHAUSTED:
                    return TooManyHard(node_id)
                case _:
                    logger.warning("%s cannot be pinned at %s: %s", cache.cache_id, node_id, error.details())
                    return NotPinned(node_id)
        return NotPinned(node_id) if reply is None else Pinned(node_id, reply.pin.blocks)

    async def unpin(self, node_id: NodeId, pin_id: str) -> None:
        """Where it fails, the pin's lease ends it."""
        try:
            await self._ask(node_id, lambda stub: stub.Unpin(pb.UnpinRequest(pin_id=pin_id), timeout=ASK_TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                logger.warning("%s cannot be unpinned at %s: %s", pin_id, node_id, error.details())

    async def copy(self, node_id: NodeId, keys: Sequence[BlockKey], sources: Sequence[NodeId]) -> Copied:
        """Has the store copy the blocks from the first of the sources that gives them."""
        stores = [store for source in sources if (store := self._seen.get(source)) is not None]
        order = ReplicatePrefix(tuple(keys), tuple(PrefixSource(store.node_id, store.address, len(keys)) for store in stores))
        try:
            reply = await self._ask(node_id, lambda stub: stub.Replicate(wire.REPLICATE_PREFIX.encode(order), timeout=COPY_TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            logger.warning("%s does not copy %d blocks: %s", node_id, len(keys), error.details())
            return Copied(node_id, 0)
        return Copied(node_id, 0 if reply is None else reply.blocks)

    async def close(self) -> None:
        for channel in self._channels.values():
            self._hang_up(channel)
        await asyncio.gather(*self._closing)

    async def _ask(self, node_id: NodeId, call: Callable[[StoreStub], Awaitable[T]]) -> T | None:
        """None: there is no such store any more."""
        store = self._seen.get(node_id)
        if store is None:
            return None
        channel = self._channels.get(store.address)
        if channel is None:
            channel = self._channels[store.address] = connect(store.address, self._credentials)
        return await call(StoreStub(channel))

    def _hang_up(self, channel: grpc.aio.Channel) -> None:
        task = asyncio.create_task(channel.close(ASK_TIMEOUT_S))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
