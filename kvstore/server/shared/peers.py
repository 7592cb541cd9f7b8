"""Other stores: their gRPC stubs by address, and routes to the memory of whoever answers there now."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc.aio

from kvstore.core.stripes import Stripe, are_whole
from kvstore.server.shared.failures import error_of
from kvstore.server.shared.links import Link
from kvstore.server.shared.routes import MessengerMover, Mover, StoreRoute, StripedRoute
from messenger.base import Endpoint, Traffic, TransferTimeout
from messenger.router import Messenger
from springtide.clock import Clock, ObservedTime, RoundTrips, patience_s
from springtide.credentials import Credentials
from springtide.errors import PeerLost
from springtide.modelinfo import KVSpec
from springtide.protocol import wire
from springtide.protocol.storage import LayersAt
from springtide.rpc import channels
from springtide.rpc import store_pb2 as pb
from springtide.rpc.store_pb2_grpc import StoreStub
from springtide.supervision import first_of, uninterrupted

CALL_TIMEOUT_S = 1.5
"""The time for a question that a living store answers at once, on a network that is not slow."""
LONGEST_CALL_S = 10.0
"""The time for the same, all in all, while bytes of the store come through."""
PROBE_TIMEOUT_S = 1.0
"""The time for the same, of a store that keeps others waiting."""
IDLE_S = 60.0
"""A store that restarts has another address, and nobody says that it left the old one: what is not asked for so long is hung up. Far longer
than any call, and short of a channel for every store that ever was."""
FORGOTTEN_S = 3600.0
"""After so long it is not known any more who was there, nor how fast the way. Far longer than any hand-over waits for its first bytes."""
_LOOK_EVERY_S, _MOST_BETWEEN_LOOKS_S = 0.1, 0.25
LATE_S, _WATCH_EVERY_S = 1.0, 0.25
"""A store with which something is under way, and of which nothing has come through for so long, is asked whether it lives."""
LONGEST_BATCH_S = 600.0
"""The deadline of a batch of a transfer of which bytes come through all the while."""
_PAUSE_S = 0.3
"""A question in whose time this process stood still for so long, all in all, was not answered too late by whoever was asked."""
T = TypeVar("T")


@dataclass(slots=True)
class _Peer:
    asked_at: float
    channel: grpc.aio.Channel | None = None
    """None: hung up."""
    endpoint: Endpoint | None = None
    """The Messenger of whoever was there last."""
    layers: Sequence[LayersAt] = ()
    """Where its slots lie, if it is the first store of a bundle."""
    incarnations: Collection[int] = ()
    """Of whoever has memory there."""
    round_trips: RoundTrips = field(default_factory=RoundTrips)
    """Of questions that are answered at once."""
    link: Link = field(default_factory=Link)


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
        """How many of them there is a channel to."""
        return sum(peer.channel is not None for peer in self._peers.values())

    def stub(self, address: str) -> StoreStub:
        """The stub for calls that are begun now and take less than `IDLE_S`."""
        peer = self._peer(address)
        if peer.channel is None:
            peer.channel = channels.connect(address, self._credentials)
        return StoreStub(peer.channel)

    def link(self, address: str) -> Link:
        """What hand-overs to the store there share."""
        return self._peer(address).link

    def observed_s(self) -> float:
        """Seconds that may be counted as others' silence: those in which this process stood still are not in it."""
        return self._look().now

    async def observe(self) -> None:
        """Sees for ever whether this process stands still."""
        while True:
            self._look()
            await asyncio.sleep(_LOOK_EVERY_S)

    async def ask(
        self,
        address: str,
        question: Callable[[StoreStub, float], Awaitable[T]],
        timeout_s: float = CALL_TIMEOUT_S,
        longest_s: float = LONGEST_CALL_S,
    ) -> T:
        """The answer of the store there to `question`, which is given its deadline: `timeout_s`, more on a slow network. One whose deadline
        passed while this process stood still is asked again: the answer may have been there. So is one, for `longest_s` at most, while
        bytes have come from that store: it lives, which what its kernel acknowledges would not show. So it has to be a question that may be
        asked twice."""
        timeout_s, until_s = patience_s(timeout_s, self.round_trip_s(address)), self.observed_s() + longest_s
        while True:
            stood_still_s, received = self._look().stood_still_s, self._traffic(address).received_bytes
            try:
                return await question(self.stub(address), timeout_s)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
                if self._look().stood_still_s - stood_still_s >= _PAUSE_S:
                    continue
                timeout_s = min(2 * timeout_s, until_s - self.observed_s())
                if timeout_s <= 0 or self._traffic(address).received_bytes <= received:
                    raise

    def round_trip_s(self, address: str) -> float:
        """The time within which the store there answers, or its kernel acknowledges bytes, as a rule; 0 when it is not known."""
        return max(self._traffic(address).round_trip_s, self._peer(address).round_trips.smoothed_s)

    def least_round_trip_s(self, address: str) -> float:
        """The time that the way there and back takes when nothing is queued on it; 0 when it is not known."""
        return self._traffic(address).least_round_trip_s

    def _traffic(self, address: str) -> Traffic:
        """With the store there; of a bundle, with all its stores."""
        return sum((self._messenger.traffic(incarnation) for incarnation in self._peer(address).incarnations), Traffic())

    def _look(self) -> ObservedTime:
        self._observed.look(asyncio.get_running_loop().time())
        return self._observed

    async def describe(self, address: str, timeout_s: float, longest_s: float) -> pb.DescribeReply:
        """What the store there says of itself, asked as by `ask`."""

        async def describe(stub: StoreStub, timeout_s: float) -> pb.DescribeReply:
            began_s = self.observed_s()
            reply: pb.DescribeReply = await stub.Describe(pb.DescribeRequest(), timeout=timeout_s)
            self._peer(address).round_trips.answered(self.observed_s() - began_s)
            return reply

        return await self.ask(address, describe, timeout_s, longest_s)

    async def answers(self, address: str) -> bool:
        """Whether the store there lives, however slow what is asked of it."""
        try:
            await self.describe(address, PROBE_TIMEOUT_S, longest_s=0.0)
        except grpc.aio.AioRpcError:
            return False
        return True

    async def while_it_lives(self, address: str, work: Awaitable[T], silence_s: float) -> T:
        """What `work` with the store there comes to. What is late may be slow: as long as bytes come through nobody is in doubt; when none
        do, the store is asked whether it lives. Raises PeerLost when it does not say so, and TransferTimeout when it does and yet nothing
        comes through for `silence_s`; then the work is given up, and has ended."""
        task = asyncio.ensure_future(work)
        moved, moved_s = self._traffic(address).num_bytes, self.observed_s()
        heard_s = moved_s
        try:
            while not (await asyncio.wait({task}, timeout=_WATCH_EVERY_S))[0]:
                now_s = self.observed_s()
                before, moved = moved, self._traffic(address).num_bytes
                if moved > before:
                    moved_s = heard_s = now_s
                elif now_s - moved_s >= silence_s:
                    raise TransferTimeout(f"{address} has taken and given nothing for {silence_s:g} s")
                elif now_s - heard_s >= LATE_S:
                    if not await first_of(_ended(task), self.answers(address)) and self._traffic(address).num_bytes <= moved:
                        raise PeerLost(f"{address} does not answer")
                    heard_s = self.observed_s()
            return task.result()
        finally:
            task.cancel()
            await uninterrupted(asyncio.wait({task}))

    async def connect(self, address: str, incarnation: int) -> StoreRoute:
        """A route to the memory of the store at `address`. Raises PeerLost when that is away or another incarnation."""
        peer = self._peer(address)
        endpoint = peer.endpoint
        if endpoint is None or endpoint.incarnation != incarnation:
            endpoint, peer.layers = await self._describe(address)
            peer.endpoint = endpoint
            peer.incarnations = {endpoint.incarnation, *(Endpoint.from_json(part.endpoint).incarnation for part in peer.layers)}
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
        idle = {address: peer for address, peer in self._peers.items() if now - peer.asked_at > IDLE_S}
        for address, peer in idle.items():
            if now - peer.asked_at > FORGOTTEN_S:
                del self._peers[address]
        await _hang_up(idle.values())
        self._messenger.forget_broken()

    async def close(self) -> None:
        await _hang_up(self._peers.values())

    def _peer(self, address: str) -> _Peer:
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = _Peer(self._clock.now())
        peer.asked_at = self._clock.now()
        return peer

    async def _describe(self, address: str) -> tuple[Endpoint, Sequence[LayersAt]]:
        try:
            reply = await self.describe(address, CALL_TIMEOUT_S, LONGEST_CALL_S)
            layers = [*map(wire.LAYERS_AT.decode, reply.layers)]
            if layers and not are_whole([each.layers for each in layers], self._spec.layers):
                raise PeerLost(f"the store at {address} has not all {self._spec.layers} layers of the model's slots")
            return Endpoint.from_json(reply.endpoint), layers
        except grpc.aio.AioRpcError as error:
            raise error_of(error, f"asking {address} for its endpoint") from error


async def _ended(work: asyncio.Future[Any]) -> bool:
    """True, as soon as it has."""
    await asyncio.wait({work})
    return True


async def _hang_up(peers: Collection[_Peer]) -> None:
    # None before anything is waited for: nobody takes up a channel that is about to be closed.
    closing = [peer.channel for peer in peers if peer.channel is not None]
    for peer in peers:
        peer.channel = None
    await asyncio.gather(*(channel.close(None) for channel in closing))
