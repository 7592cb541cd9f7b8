"""Other stores: their gRPC stubs by address, and routes to the memory of whoever answers there now."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc.aio

from kvstore.core.stripes import Stripe, are_whole
from kvstore.server.shared.failures import error_of
from kvstore.server.shared.routes import MessengerMover, Mover, StoreRoute, StripedRoute
from messenger.base import Endpoint
from messenger.router import Messenger
from springtide.clock import Clock, ObservedTime
from springtide.credentials import Credentials
from springtide.errors import PeerLost
from springtide.modelinfo import KVSpec
from springtide.protocol import wire
from springtide.protocol.storage import LayersAt
from springtide.rpc import channels
from springtide.rpc import store_pb2 as pb
from springtide.rpc.store_pb2_grpc import StoreStub

CALL_TIMEOUT_S = 1.5
"""The time for a question that a living store answers at once."""
PROBE_TIMEOUT_S = 1.0
"""The time for the same, of a store that keeps others waiting."""
IDLE_S = 60.0
"""A store that restarts has another address, and nobody says that it left the old one: what is not asked for so long is hung up. Far longer
than any call, and short of a channel for every store that ever was."""
_LOOK_EVERY_S, _MOST_BETWEEN_LOOKS_S = 0.1, 0.25
_PAUSE_S = 0.3
"""A question in whose time this process stood still for so long, all in all, was not answered too late by whoever was asked."""
T = TypeVar("T")


@dataclass(slots=True)
class _Peer:
    channel: grpc.aio.Channel
    asked_at: float
    endpoint: Endpoint | None = None
    """The Messenger of whoever was there last."""
    layers: Sequence[LayersAt] = ()
    """Where its slots lie, if it is the first store of a bundle."""


class Peers:
    """The other stores that this one deals with, by their gRPC addresses."""

    def __init__(
        self, messenger: Messenger, credentials: Credentials, clock: Clock, spec: KVSpec, bundle: Sequence[tuple[Stripe, Mover]] = ()
    ) -> None:
        """`bundle`: the memories of the bundle of which this is the first store, its own first; none where there is no bundle."""
        self._messenger = messenger
        self._credentials = credentials
        self._clock = clock
        self._spec = spec
        self._bundle = bundle
        self._own_mover = MessengerMover(messenger)
        self._peers: dict[str, _Peer] = {}
        self._observed = ObservedTime(_MOST_BETWEEN_LOOKS_S)

    def __len__(self) -> int:
        return len(self._peers)

    def stub(self, address: str) -> StoreStub:
        """The stub for calls that are begun now and take less than `IDLE_S`."""
        return StoreStub(self._peer(address).channel)

    def observed_s(self) -> float:
        """Seconds that may be counted as others' silence: those in which this process stood still are not in it."""
        return self._look().now

    async def observe(self) -> None:
        """Sees for ever whether this process stands still."""
        while True:
            self._look()
            await asyncio.sleep(_LOOK_EVERY_S)

    async def ask(self, address: str, question: Callable[[StoreStub], Awaitable[T]]) -> T:
        """The answer of the store there. A question whose deadline passed while this process stood still is asked again: the answer may
        have been there. So it has to be one that may be asked twice."""
        while True:
            stood_still_s = self._look().stood_still_s
            try:
                return await question(self.stub(address))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED or self._look().stood_still_s - stood_still_s < _PAUSE_S:
                    raise

    def _look(self) -> ObservedTime:
        self._observed.look(asyncio.get_running_loop().time())
        return self._observed

    async def answers(self, address: str) -> bool:
        """Whether the store there lives, however slow what is asked of it."""
        try:
            await self.ask(address, lambda stub: stub.Describe(pb.DescribeRequest(), timeout=PROBE_TIMEOUT_S))
        except grpc.aio.AioRpcError:
            return False
        return True

    async def connect(self, address: str, incarnation: int) -> StoreRoute:
        """A route to the memory of the store at `address`. Raises PeerLost when that is away or another incarnation."""
        peer = self._peer(address)
        endpoint = peer.endpoint
        if endpoint is None or endpoint.incarnation != incarnation:
            endpoint, peer.layers = await self._describe(address)
            peer.endpoint = endpoint
        if endpoint.incarnation != incarnation:
            raise PeerLost(f"the store at {address} has restarted")
        try:
            connection = await self._messenger.connect(endpoint)
        except PeerLost:
            peer.endpoint = None
            raise
        if not self._bundle and not peer.layers:
            return connection
        whole = Stripe.of(range(self._spec.layers), self._spec)
        own = self._bundle or [(whole, self._own_mover)]
        theirs = [(Stripe.of(part.layers, self._spec), Endpoint.from_json(part.endpoint)) for part in peer.layers] or [(whole, endpoint)]
        return StripedRoute(self._spec.bytes_per_slot, own, theirs, connection)

    async def hang_up_idle(self) -> None:
        """Closes the channels of those that were not asked for `IDLE_S`. Whoever is there still is called anew when it is asked again."""
        now = self._clock.now()
        idle = [address for address, peer in self._peers.items() if now - peer.asked_at > IDLE_S]
        # Out of the table before anything is waited for: nobody takes up a channel that is about to be closed.
        await _close([self._peers.pop(address) for address in idle])
        self._messenger.forget_broken()

    async def close(self) -> None:
        await _close(self._peers.values())

    def _peer(self, address: str) -> _Peer:
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = _Peer(channels.connect(address, self._credentials), self._clock.now())
        peer.asked_at = self._clock.now()
        return peer

    async def _describe(self, address: str) -> tuple[Endpoint, Sequence[LayersAt]]:
        try:
            reply = await self.ask(address, lambda stub: stub.Describe(pb.DescribeRequest(), timeout=CALL_TIMEOUT_S))
            layers = [*map(wire.LAYERS_AT.decode, reply.layers)]
            if layers and not are_whole([each.layers for each in layers], self._spec.layers):
                raise PeerLost(f"the store at {address} has not all {self._spec.layers} layers of the model's slots")
            return Endpoint.from_json(reply.endpoint), layers
        except grpc.aio.AioRpcError as error:
            raise error_of(error, f"asking {address} for its endpoint") from error


async def _close(peers: Collection[_Peer]) -> None:
    await asyncio.gather(*(peer.channel.close(None) for peer in peers))
