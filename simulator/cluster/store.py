"""A node's store: the very pool of kvstore/, whose transfers take the time that the network model gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from conductor.core.types.events import Event as ConductorEvent
from kvstore.core.eviction import new_policy
from kvstore.core.pool import Pool
from simulator.cluster.loop import Loop
from simulator.cluster.network import Network
from springtide.choices import EvictionName
from springtide.errors import PoolFull, SpringtideError
from springtide.ids import AttemptId, BlockKey, Incarnation, NodeId
from springtide.protocol import storage
from springtide.protocol.outputs import AttemptFailed, Failure, FailureCode, HandedOver

LAYER_GROUPS = 2
"""In which prefixes arrive: the first is told at once, so that the engine may wait layer by layer, the last when all is there."""
_INCARNATIONS_APART = 1 << 32
"""Leases count from their incarnation on: an old one never fits another."""


@dataclass(slots=True)
class SimHandOver:
    """A prompt's way to the decode node's store. `ready_at` and `bytes_waiting` are those of what could not be sent yet."""

    attempt_id: AttemptId
    destination: SimStore
    num_blocks: int
    present_blocks: int | None = None
    """At the destination; None while it has no slots for the prompt."""
    bytes_waiting: float = 0.0
    waiting_since: float = 0.0
    arrived_at: float = 0.0
    """All that was sent so far."""
    first_token: int | None = None
    cancelled: bool = False


class SimStore:
    """`notify` takes notices to the node's engine, `tell` events to the Conductor."""

    def __init__(
        self,
        node_id: NodeId,
        num_slots: int,
        bytes_per_block: int,
        num_layers: int,
        eviction: EvictionName,
        loop: Loop,
        network: Network,
        stores: Mapping[NodeId, SimStore],
        tell: Callable[[ConductorEvent], object],
        keys_of: Callable[[AttemptId], Callable[[int, int], tuple[BlockKey, ...]] | None],
    ) -> None:
        """`keys_of` an attempt: the keys of blocks [begin, end) of its prompt and output. The engine has no tokens to hash."""
        self.node_id = node_id
        self.incarnation = Incarnation(0)
        self.notify: Callable[[storage.Notice], None] = lambda notice: None
        self._eviction = eviction
        self.renew(num_slots)
        self._bytes_per_block = bytes_per_block
        self._num_layers = num_layers
        self._loop, self._network, self._stores, self._tell, self._keys_of = loop, network, stores, tell, keys_of
        self._hand_overs: dict[AttemptId, SimHandOver] = {}
        self._expected: dict[AttemptId, tuple[SimHandOver, SimStore]] = {}
        """Hand-overs to here that wait for slots, with their source."""
        self._fetches: dict[AttemptId, float] = {}
        """When each has ended."""
        self._leases = 0
        self._was_full = False

    def renew(self, num_slots: int) -> None:
        """Other memory takes the place of what was there, with nothing in it. What is being read of that has been read."""
        self.incarnation = Incarnation(self.incarnation + _INCARNATIONS_APART)
        policy = new_policy(self._eviction, num_slots)
        self.pool = Pool([0] * num_slots, 1, node_id=self.node_id, incarnation=self.incarnation, policy=policy)

    def engine_left(self) -> None:
        """Notes that nobody asks for anything any more until another engine comes: what the last one had is given up."""
        self.notify = lambda notice: None
        self._was_full = False
        for hand_over in list(self._hand_overs.values()):
            self._end(hand_over)
        self._expected.clear()
        self.pool.engine_fenced(self.pool.engine_ended())
        self.changed()

    # ---- the engine's orders ----

    def order(self, order: storage.Order) -> None:
        """Does an order of the engine's, but for Push: see `push`."""
        try:
            match order:
                case storage.Acquire():
                    self._acquire(order)
                case storage.Reserve():
                    self._reserve(order)
                case storage.Grow(attempt_id, num_blocks):
                    slots = self.pool.grow(attempt_id, num_blocks)
                    self.notify(storage.Grown(attempt_id, tuple(slots)))
                case storage.Commit(attempt_id, first_block, keys):
                    self._commit(attempt_id, first_block, len(keys))
                case storage.OpenHandOver():
                    self._open(order)
                case storage.Seal(attempt_id, first_token):
                    self._hand_overs[attempt_id].first_token = first_token
                case storage.Release(attempt_id, finish_hand_over):
                    self._release(attempt_id, finish_hand_over)
        except PoolFull as error:
            self._was_full = True
            self._failed(order.attempt_id, FailureCode.POOL_FULL, error.message)
        except SpringtideError as error:
            self._failed(order.attempt_id, FailureCode.INTERNAL, error.message)
        self.changed()

    @property
    def slots_available(self) -> int:
        return self.pool.num_available

    def fetched_at(self, attempt_id: AttemptId) -> float:
        """When the attempt's prefix has arrived."""
        return self._fetches.get(attempt_id, 0.0)

    def _failed(self, attempt_id: AttemptId, code: FailureCode, message: str) -> None:
        self.notify(AttemptFailed(attempt_id, Failure(code, message)))

    def _acquire(self, order: storage.Acquire) -> None:
        attempt_id = order.attempt_id
        keys = order.keys
        acquired = self.pool.acquire(
            attempt_id, keys, order.num_blocks, order.max_reused_blocks, order.tenant, order.leave_available, order.leave_in_quota
        )
        self._was_full = False
        local = acquired.local_blocks
        source = next((source for source in order.sources if source.node_id != self.node_id), None)
        remote = 0
        if source is not None and (wanted := min(source.num_blocks, order.max_reused_blocks)) > local:
            remote = self._fetch(attempt_id, keys[:wanted], local, self._stores[NodeId(source.node_id)])
        self.notify(storage.Acquired(order.attempt_id, tuple(acquired.slots), local, remote))
        if remote:
            self.notify(storage.FetchProgress(order.attempt_id, LAYER_GROUPS - 1))

    def _fetch(self, attempt_id: AttemptId, keys: Sequence[BlockKey], local: int, source: SimStore) -> int:
        """How many blocks beyond the local ones will come."""
        leased = source.pool.lease(self.node_id, keys, self._loop.now)
        remote = len(leased.slots) - local
        if remote <= 0:
            source.pool.release_lease(leased.lease_id)
            return 0
        self.pool.begin_fetch(attempt_id, range(local, local + remote))
        end = self._network.send(source.node_id, self.node_id, remote * self._bytes_per_block, self._loop.now)
        self._fetches[attempt_id] = end

        def arrived() -> None:
            source.pool.release_lease(leased.lease_id)
            self._fetches.pop(attempt_id, None)
            self.pool.end_fetch(attempt_id, local + remote)
            self.notify(storage.FetchProgress(attempt_id, LAYER_GROUPS))
            self.changed()

        self._loop.at(end, arrived)
        return remote

    def _reserve(self, order: storage.Reserve) -> None:
        attempt_id = order.attempt_id
        reserved = self.pool.reserve(
            attempt_id,
            cast(Sequence[BlockKey], order.keys),
            order.num_blocks,
            order.tenant,
            order.leave_available,
            order.leave_in_quota,
        )
        self._was_full = False
        self.notify(storage.Reserved(order.attempt_id, tuple(reserved.slots), reserved.present_blocks))
        expected = self._expected.pop(attempt_id, None)
        if expected is not None:
            expected[1]._reserved(expected[0])

    def _commit(self, attempt_id: AttemptId, first_block: int, count: int) -> None:
        keys = self._keys_of(attempt_id)
        if keys is not None:
            self.pool.commit(attempt_id, first_block, keys(first_block, first_block + count))

    def _release(self, attempt_id: AttemptId, finish_hand_over: bool) -> None:
        self._expected.pop(attempt_id, None)
        hand_over = self._hand_overs.get(attempt_id)
        if hand_over is not None:
            if finish_hand_over and hand_over.first_token is not None:
                if hand_over.present_blocks is not None:
                    self._loop.at(hand_over.arrived_at, lambda: self._complete(hand_over))
            else:
                self._end(hand_over)
        self.pool.release(attempt_id)

    # ---- hand-over: the prefill side ----

    def _open(self, order: storage.OpenHandOver) -> None:
        attempt_id = order.attempt_id
        destination = self._stores[NodeId(order.node_id)]
        hand_over = SimHandOver(attempt_id, destination, len(self.pool.begin_hand_over(attempt_id)), waiting_since=self._loop.now)
        self._hand_overs[attempt_id] = hand_over
        if not destination._accept(hand_over, self):
            destination._expected[attempt_id] = (hand_over, self)

    def _accept(self, hand_over: SimHandOver, source: SimStore) -> bool:
        """Whether there are slots for it here. Raises UnknownAttempt when nobody waits for it any more."""
        ingest = self.pool.begin_ingest(hand_over.attempt_id, storage.Writer(source.node_id, source.incarnation, ""))
        if ingest is None:
            return False
        hand_over.present_blocks = ingest.present
        return True

    def _reserved(self, hand_over: SimHandOver) -> None:
        """The destination has slots now."""
        if hand_over.cancelled or not hand_over.destination._accept(hand_over, self):
            return
        self._send(hand_over, hand_over.bytes_waiting, self._loop.now, self._loop.now)
        hand_over.bytes_waiting = 0.0
        if hand_over.first_token is not None:
            self._loop.at(hand_over.arrived_at, lambda: self._complete(hand_over))

    def push(self, attempt_id: AttemptId, blocks: range, began_at: float, ended_at: float) -> None:
        """Notes that all layers of `blocks` became final, layer by layer, between these times; nearly all of their bytes may be there by
        the end."""
        hand_over = self._hand_overs.get(attempt_id)
        if hand_over is None:
            return
        present = hand_over.present_blocks or 0
        num_bytes = float(max(0, blocks.stop - max(blocks.start, present)) * self._bytes_per_block)
        if hand_over.present_blocks is None:
            hand_over.bytes_waiting += num_bytes
        else:
            self._send(hand_over, num_bytes, began_at, ended_at)

    def _send(self, hand_over: SimHandOver, num_bytes: float, began_at: float, ended_at: float) -> None:
        if num_bytes:
            arrived = self._network.send(self.node_id, hand_over.destination.node_id, num_bytes, began_at)
            last_layer = ended_at + self._network.seconds(num_bytes / self._num_layers)
            hand_over.arrived_at = max(hand_over.arrived_at, arrived, last_layer)

    def _complete(self, hand_over: SimHandOver) -> None:
        if hand_over.cancelled:
            return
        assert hand_over.first_token is not None
        self._hand_overs.pop(hand_over.attempt_id, None)
        self.pool.end_hand_over(hand_over.attempt_id)
        hand_over.destination._ingested(hand_over, self)
        self.notify(HandedOver(hand_over.attempt_id, hand_over.num_blocks * self._bytes_per_block))
        self.changed()

    def _ingested(self, hand_over: SimHandOver, writer: SimStore) -> None:
        attempt_id = hand_over.attempt_id
        assert hand_over.first_token is not None
        self.pool.cover(attempt_id, writer.node_id, storage.Unit(0, 1, 0, hand_over.num_blocks))
        if self.pool.seal(attempt_id, writer.node_id, hand_over.first_token) is not None:
            self.notify(storage.Ingested(attempt_id, hand_over.first_token))
        self.pool.close_ingest(attempt_id, writer.node_id, writer.incarnation)
        self.changed()

    def _end(self, hand_over: SimHandOver) -> None:
        """It is given up."""
        hand_over.cancelled = True
        self._hand_overs.pop(hand_over.attempt_id, None)
        hand_over.destination._expected.pop(hand_over.attempt_id, None)
        self.pool.end_hand_over(hand_over.attempt_id)
        if hand_over.present_blocks is not None:
            hand_over.destination.pool.close_ingest(hand_over.attempt_id, self.node_id, self.incarnation)
            hand_over.destination.changed()

    # ---- what others are told ----

    def changed(self) -> None:
        for event in self.pool.take_events():
            self._tell(event)
        if self._was_full:
            self.notify(storage.StoreLoad(0, self.slots_available))
