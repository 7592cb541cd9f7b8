"""A store that takes copies of prefixes from others, as kvstore.server.transfer.replication does, over the modelled network."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from conductor.core.types.events import Replicate
from kvstore.server.transfer.pacing import RateLimit
from kvstore.server.transfer.replication import MAX_AT_ONCE
from simulator.cluster.loop import Loop
from simulator.cluster.network import Network
from simulator.cluster.store import SimStore
from springtide.errors import SpringtideError
from springtide.ids import AttemptId, BlockKey, NodeId

Ended = Callable[[int, int], None]
"""Is told how many of an order's blocks are here, from the first on, and how many were copied."""


@dataclass(slots=True, eq=False)
class _Copy:
    """Blocks [first, len(keys)) are to come, of which those before `arrived` have. `incarnations` are those of the source and of the
    store itself at the beginning: memory that is given up takes its blocks with it."""

    attempt_id: AttemptId
    source: SimStore
    lease_id: int
    incarnations: tuple[int, int]
    keys: tuple[BlockKey, ...]
    first: int
    arrived: int


class SimReplication:
    """Does few orders at a time, block after block each, and all of them together at no more than `bytes_per_s`."""

    def __init__(
        self,
        store: SimStore,
        stores: Mapping[NodeId, SimStore],
        bytes_per_block: int,
        bytes_per_s: float,
        loop: Loop,
        network: Network,
    ) -> None:
        self._store, self._stores = store, stores
        self._bytes_per_block = bytes_per_block
        self._rate = RateLimit(bytes_per_s)
        self._loop, self._network = loop, network
        self._waiting: deque[tuple[Replicate, Ended]] = deque()
        self._taken = self._in_flight = 0

    def take(self, order: Replicate, ended: Ended) -> None:
        """`ended` must not give another order at once."""
        self._waiting.append((order, ended))
        self._begin()

    def _begin(self) -> None:
        while self._waiting and self._in_flight < MAX_AT_ONCE:
            order, ended = self._waiting.popleft()
            copy = self._open(order)
            if copy is None:
                ended(self._store.pool.num_held(order.keys), 0)
            else:
                self._in_flight += 1
                self._go_on(copy, ended)

    def _open(self, order: Replicate) -> _Copy | None:
        """None when there is nothing to copy, nowhere to copy it from, or no room."""
        pool, held = self._store.pool, self._store.pool.num_held(order.keys)
        for named in order.sources if held < len(order.keys) else ():
            source = self._stores[named.node_id]
            leased = source.pool.lease(self._store.node_id, order.keys, self._loop.now)
            if len(leased.slots) > held:
                break
            source.pool.release_lease(leased.lease_id)
        else:
            return None
        self._taken += 1
        attempt_id, keys = AttemptId(f"replica-{self._taken}"), order.keys[: len(leased.slots)]
        try:
            local = pool.admit_replica(attempt_id, keys, source.pool.tenant_of(keys) or "").local_blocks
        except SpringtideError:
            source.pool.release_lease(leased.lease_id)
            return None
        pool.begin_fetch(attempt_id, range(local, len(keys)))
        self._store.changed()
        return _Copy(attempt_id, source, leased.lease_id, self._incarnations(source), keys, local, local)

    def _incarnations(self, source: SimStore) -> tuple[int, int]:
        return source.incarnation, self._store.incarnation

    def _go_on(self, copy: _Copy, ended: Ended) -> None:
        if copy.arrived == len(copy.keys) or copy.incarnations != self._incarnations(copy.source):
            self._end(copy, ended)
            return

        def send() -> None:
            self._loop.at(self._network.send(copy.source.node_id, self._store.node_id, self._bytes_per_block, self._loop.now), arrived)

        def arrived() -> None:
            copy.arrived += 1
            self._go_on(copy, ended)

        self._loop.at(self._rate.take(self._bytes_per_block, self._loop.now), send)

    def _end(self, copy: _Copy, ended: Ended) -> None:
        pool = self._store.pool
        if self._store.incarnation == copy.incarnations[1]:
            pool.end_fetch(copy.attempt_id, copy.arrived)
            pool.end_replica(copy.attempt_id)
            self._store.changed()
        copy.source.pool.release_lease(copy.lease_id)
        self._in_flight -= 1
        ended(pool.num_held(copy.keys), copy.arrived - copy.first)
        self._begin()
