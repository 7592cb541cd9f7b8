"""A bundle as its first store sees it: the layer stores, of the nodes of a prefill group's further stages, whose memories have the slabs
of their layers of the same slots.

The first store has the pool: which block is in which slot, who holds it, until when. A slot means the same in every memory, so what the
pool says is true of all of them, and a block that is committed is there in all layers. Layer stores know nothing of blocks. They move bytes
as the first store says, and refuse handles by the generations that it tells them.

They are one store: when one of them is lost, so are the blocks, and the first store's process ends, and with it the others' (LayerStore).
Nobody is told before that that a transfer in which the lost one had a part has come to rest, for nobody knows; who was written to fences
them all.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import grpc.aio

from kvstore.core.stripes import Stripe, are_whole
from kvstore.server.shared.routes import Mover
from kvstore.server.shared.stripe_ssd import LayerStoreSsd
from messenger.base import Completion, Endpoint, Identity, Slice
from messenger.ordering import run_to_rest
from springtide.clock import ObservedTime
from springtide.credentials import Credentials
from springtide.errors import PeerLost, SpringtideError, StaleHandle
from springtide.ids import Incarnation
from springtide.modelinfo import KVSpec
from springtide.protocol import wire
from springtide.protocol.layer_stores import BundleJoined, JoinBundle, LayerOrder, Move, SetGenerations, StillThere
from springtide.protocol.outputs import Failure, FailureCode
from springtide.protocol.storage import LayersAt, StoreIncarnation
from springtide.rpc import channels
from springtide.rpc import layer_store_pb2 as pb
from springtide.rpc.layer_store_pb2_grpc import LayerStoreStub
from springtide.rpc.outgoing import Outgoing
from springtide.supervision import end, first_of

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 5.0
SILENCE_S = 2.5
"""A layer store that has said nothing for so long is lost; it speaks twice a second."""
ANSWER_GRACE_S = 5.0
"""What it answers later than it had time for by so much, it does not answer."""
_LOOK_EVERY_S, _MOST_BETWEEN_LOOKS_S = 0.25, 0.5
OnLost = Callable[[PeerLost], None]
_Orders: TypeAlias = Outgoing[LayerOrder, pb.LayerOrder]


class LayerStoreLink(Mover):
    """The link to one layer store, made by `join`. `on_lost` is called, once, when it is lost."""

    def __init__(self, address: str, channel: grpc.aio.Channel, call: Any, orders: _Orders, joined: BundleJoined, on_lost: OnLost) -> None:
        self.joined = joined
        self.endpoint = Endpoint.from_json(joined.at.endpoint)
        self._address = address
        self._channel = channel
        self._stub = LayerStoreStub(channel)
        self.ssd = None if joined.ssd is None else LayerStoreSsd(self._stub, self._ask, joined.ssd)
        """None: it has none."""
        self._call = call
        self._orders = orders
        self._on_lost = on_lost
        self._over = False
        self._move_ids = itertools.count()
        self._silent = ObservedTime(_MOST_BETWEEN_LOOKS_S)
        self._heard_at = 0.0
        self._hearing = asyncio.create_task(self._hear(), name=f"layer store {joined.node_id}")

    @classmethod
    async def join(cls, address: str, credentials: Credentials, first: JoinBundle, on_lost: OnLost) -> LayerStoreLink:
        """Takes the layer store at the address into the bundle. Raises PeerLost when it is not there, or in another bundle."""
        channel, orders = channels.connect(address, credentials), _Orders(wire.LAYER_ORDER.encode)
        orders.put(first)
        try:
            call = LayerStoreStub(channel).Serve(orders.stream())
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                report = await call.read()
            joined = wire.LAYER_REPORT.decode(report) if isinstance(report, pb.LayerReport) else None
            if not isinstance(joined, BundleJoined):
                raise PeerLost(f"the layer store at {address} did not join")
            return cls(address, channel, call, orders, joined, on_lost)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            await channel.close(None)
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else f"no answer within {JOIN_TIMEOUT_S:g} s"
            raise PeerLost(f"the layer store at {address} did not join: {reason}") from error
        except BaseException:
            await channel.close(None)
            raise

    @property
    def identity(self) -> StoreIncarnation:
        return StoreIncarnation(self.joined.node_id, Incarnation(self.endpoint.incarnation))

    def order(self, order: SetGenerations) -> None:
        """Tells it, without waiting; orders keep their order."""
        self._orders.put(order)

    async def move(self, endpoint: Endpoint, reads: bool, batch: Sequence[Slice], timeout_s: float) -> Completion:
        move = Move(
            move_id=next(self._move_ids),
            endpoint=endpoint.to_json(),
            reads=reads,
            local_offsets=[piece.local_offset for piece in batch],
            remote_offsets=[piece.remote_offset for piece in batch],
            lengths=[piece.length for piece in batch],
            generations=[piece.generation for piece in batch],
            timeout_s=timeout_s,
        )
        most_s = timeout_s + ANSWER_GRACE_S
        call = self._ask(self._stub.Move, wire.MOVE.encode(move), most_s)
        cancelling: list[asyncio.Task[Any]] = []

        def cancel() -> None:
            request = pb.CancelMoveRequest(move_id=move.move_id)
            cancelling.append(asyncio.create_task(self._ask(self._stub.Cancel, request, ANSWER_GRACE_S)))

        try:
            moved = wire.MOVED.decode(await run_to_rest(call, most_s + 1.0, lambda: None, f"a move of {self.joined.node_id}", cancel))
        finally:
            await asyncio.gather(*cancelling)
        if moved.failure is not None:
            raise _error_of(moved.failure)
        return Completion(moved.num_bytes, {index: StaleHandle(why) for index, why in moved.failed.items()})

    async def drain(self, endpoint: Endpoint) -> None:
        await self._ask(self._stub.Drain, pb.DrainRequest(endpoint=endpoint.to_json()), ANSWER_GRACE_S)

    async def has_let_go(self, engine: Identity) -> bool:
        """As of StoreArena."""
        request = pb.HasLetGoRequest(engine=engine.name, incarnation=engine.incarnation)
        reply: pb.HasLetGoReply = await self._ask(self._stub.HasLetGo, request, ANSWER_GRACE_S)
        return reply.has_let_go

    async def close(self) -> None:
        """Lets it go: its process ends."""
        self._over = True
        self._orders.end()
        await end(self._hearing)
        self._call.cancel()
        await self._channel.close(None)

    async def _hear(self) -> None:
        try:
            why = await first_of(self._listen(), self._watch())
        except Exception as error:  # what it says makes no sense here
            logger.exception("%s cannot be heard", self.joined.node_id)
            why = repr(error)
        self._lose(why)

    async def _listen(self) -> str:
        """Returns why it is lost."""
        try:
            while isinstance(report := await self._call.read(), pb.LayerReport):
                self._heard_at = self._silent.now
                said = wire.LAYER_REPORT.decode(report)
                if isinstance(said, StillThere) and said.ssd is not None and self.ssd is not None:
                    self.ssd.state = said.ssd
        except grpc.aio.AioRpcError as error:
            return str(error.details())
        return "it ended its session"

    async def _watch(self) -> str:
        """Returns why it is lost. Pauses of this process are not its silence."""
        loop = asyncio.get_running_loop()
        while self._silent.now - self._heard_at < SILENCE_S:
            self._silent.look(loop.time())
            await asyncio.sleep(_LOOK_EVERY_S)
        return f"it is silent for {SILENCE_S:g} s"

    async def _ask(self, method: Callable[..., Any], request: Any, timeout_s: float | None = None) -> Any:
        """Its answer; None: however long it takes, while it lives. That there is none loses it: what it is at is not known any more."""
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._lose(str(error.details())) from error

    def _lose(self, why: str) -> PeerLost:
        loss = PeerLost(f"lost {self.joined.node_id}, the layer store at {self._address}: {why}")
        if not self._over:
            self._over = True
            self._on_lost(loss)
        return loss


class Bundle:
    """The layer stores, in the order of their layers."""

    def __init__(self, spec: KVSpec, own_layers: range, links: Sequence[LayerStoreLink]) -> None:
        """`own_layers` are the first store's. Raises ValueError when all of them together are not the model's layers, once each."""
        self._spec = spec
        self._own_layers = own_layers
        self._links = links
        ranges = [own_layers, *(link.joined.at.layers for link in links)]
        if not are_whole(ranges, spec.layers):
            raise ValueError(
                f"the stores of a bundle must have the model's {spec.layers} layers, once each and in order, not "
                + ", ".join(f"{layers.start} to {layers.stop - 1}" for layers in ranges)
            )

    @classmethod
    async def form(
        cls, addresses: Sequence[str], credentials: Credentials, first: JoinBundle, spec: KVSpec, own_layers: range, on_lost: OnLost
    ) -> Bundle:
        """Brings the layer stores at the addresses together. Raises PeerLost when one does not join, ValueError as `Bundle` does."""
        links: list[LayerStoreLink] = []
        try:
            for address in addresses:
                links.append(await LayerStoreLink.join(address, credentials, first, on_lost))
            return cls(spec, own_layers, links)
        except BaseException:
            for link in links:
                await link.close()
            raise

    @property
    def num_slots(self) -> int:
        """The most that all of them have."""
        return min(link.joined.num_slots for link in self._links)

    @property
    def has_ssd(self) -> bool:
        """Whether each of them has one."""
        return len(self.ssds) == len(self._links)

    @property
    def ssds(self) -> Sequence[LayerStoreSsd]:
        return [link.ssd for link in self._links if link.ssd is not None]

    @property
    def stores(self) -> tuple[StoreIncarnation, ...]:
        return tuple(link.identity for link in self._links)

    def movers(self, own: Mover) -> list[tuple[Stripe, Mover]]:
        """Who moves what, the first store's own memory first."""
        movers: list[tuple[range, Mover]] = [(self._own_layers, own), *((link.joined.at.layers, link) for link in self._links)]
        return [(Stripe.of(layers, self._spec), mover) for layers, mover in movers]

    def layers_at(self, own: Endpoint) -> list[LayersAt]:
        """Where which layers are, the first store's own first."""
        return [LayersAt(self._own_layers.start, self._own_layers.stop, own.to_json()), *(link.joined.at for link in self._links)]

    def set_generations(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Has them refuse older handles to these slots. A read of one that is under way, or that comes before they have heard it, still
        gets the bytes that were there; nobody writes into slots of a bundle but its own stores and engines."""
        for link in self._links:
            link.order(SetGenerations(slots, generations))

    async def have_let_go(self, engine: Identity) -> bool:
        """Whether nothing of the engine's can land in any of their memories any more."""
        return all(await asyncio.gather(*(link.has_let_go(engine) for link in self._links)))

    async def close(self) -> None:
        """Lets them go: what they hold is worth nothing any more."""
        await asyncio.gather(*(link.close() for link in self._links))


def _error_of(failure: Failure) -> SpringtideError:
    return PeerLost(failure.message) if failure.code is FailureCode.PEER_LOST else SpringtideError(failure.message)
