"""Copies ahead of what is asked for again and again while those who hold it are congested.

Algorithm 1's fetches replicate a prefix as well, one prefill node after the other, but each of them at the expense of the request that
needs it first. Here the copy is made before. What it spares a request that comes to the node is the cheapest of what that request could
do without it: wait at the least loaded holder instead, compute the prefix, or fetch it over links that are shared with the transfers
in flight. Where fetching is quick that is next to nothing, and no copy is made. How much may be copied is bounded: so many copies at a
time, and so many bytes a second over the whole cluster and at each node, whether it gives or takes.

A store without an engine computes nothing, and nobody waits for it: it is there to hold what others lose. So one such store has a copy of
each popular prefix, whatever a request would be spared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice

import numpy as np

from conductor import _native
from conductor.core.placement.instance_columns import PrefillColumns, PrefillInstances
from conductor.core.placement.policy import POLICIES
from conductor.core.placement.transfer import TransferModel
from conductor.core.prefix_index import Matches, PrefixIndex, bits
from conductor.core.replication.popularity import Popularity, PopularPrefix
from conductor.core.settings import ConductorSettings
from conductor.core.state import ClusterState, Instance
from conductor.core.types.arrays import Floats
from conductor.core.types.decision import Alternatives
from conductor.core.types.events import Replicate, ReplicationEnded
from springtide.ids import BlockKey, InstanceId, NodeId
from springtide.protocol.scheduling import PrefixSource, Schedule
from springtide.slices import saying

MOST_COPIES = 16
"""At a time, over the whole cluster; a store takes two."""
_AHEAD_S = 1.0
"""Orders are made about once a second, so a second's worth is given out at a time. One order may exceed it: what follows waits longer."""
_WHOLE_CLUSTER = NodeId("")
ASKS_A_COPY = 4.0
"""A copy pays when it can expect so many asks in `popularity.TIME_CONSTANT_S`: it costs one transfer, and room that others lose."""
_MOST_EXAMINED = 32
"""Prefixes at a time, the most popular."""
_MOST_TARGETS = 16
"""Nodes that are looked at for each of them, the least loaded of those that lack it."""
_MOST_SOURCES = 3
_ROOM = 4
"""A prefix is copied to arenas that are at least so many times its size."""
_LATE_S = 30.0
"""An order of which nothing has been heard for so long beyond twice its time at the allowed rate is given up for lost."""
_REST_S = 20.0
"""Before the same order is given again: what was just copied may have been evicted at once, and would be again."""
_REFUSED_REST_S = 60.0


class CopyBudget:
    """What may still be copied."""

    def __init__(self, cluster_bytes_per_s: float, node_bytes_per_s: float) -> None:
        self._cluster_bytes_per_s = cluster_bytes_per_s
        self._node_bytes_per_s = node_bytes_per_s
        self._spent_until: dict[NodeId, float] = {}
        """Until when what was given out keeps the node, or the whole cluster, busy at its rate."""

    def allows(self, node_ids: Iterable[NodeId], now: float) -> bool:
        """Whether these nodes may take part in one more copy now."""
        return all(self._spent_until.get(node_id, now) < now + _AHEAD_S for node_id in (_WHOLE_CLUSTER, *node_ids))

    def spend(self, node_ids: Iterable[NodeId], num_bytes: int, now: float) -> None:
        """A copy of so many bytes is ordered, in which these nodes take part."""
        self._spend(_WHOLE_CLUSTER, num_bytes / self._cluster_bytes_per_s, now)
        for node_id in node_ids:
            self._spend(node_id, num_bytes / self._node_bytes_per_s, now)

    def seconds(self, num_bytes: int) -> float:
        """How long one node takes for so much, at the least."""
        return num_bytes / self._node_bytes_per_s

    def forget_past(self, now: float) -> None:
        self._spent_until = {node_id: until for node_id, until in self._spent_until.items() if until > now}

    def _spend(self, node_id: NodeId, seconds: float, now: float) -> None:
        self._spent_until[node_id] = max(self._spent_until.get(node_id, now), now) + seconds


@dataclass(frozen=True, slots=True)
class _Prefills:
    """The prefill instances that are ready, the least loaded first."""

    ready: PrefillInstances
    """Where these rows are from: others, once other instances are ready."""
    instance_ids: Sequence[InstanceId]
    columns: PrefillInstances
    queue_ms: Floats


class ReplicationPlanner:
    """Decides what is copied; what it orders is done elsewhere, and told by `ended`."""

    def __init__(
        self,
        settings: ConductorSettings,
        index: PrefixIndex,
        state: ClusterState,
        transfers: TransferModel,
        ready: Callable[[], PrefillColumns],
    ) -> None:
        """`ready`: the prefill instances that can take requests now."""
        self._settings = settings
        self._index = index
        self._state = state
        self._transfers = transfers
        self._ready = ready
        self._popularity = Popularity(keep_from=2 * ASKS_A_COPY)
        self._budget = CopyBudget(max(settings.replication_bytes_per_s, 1.0), settings.replication_node_bytes_per_s)
        self._in_flight: dict[tuple[NodeId, BlockKey], float] = {}
        """Orders, by where and by their last key: until when they are waited for."""
        self._rests: dict[tuple[NodeId, BlockKey], float] = {}
        """Until when an order is not given again."""
        self._active = settings.replication_bytes_per_s > 0 and POLICIES[settings.policy].fetches

    @property
    def in_flight(self) -> int:
        """Orders whose end has not been heard of."""
        return len(self._in_flight)

    def ask(self, request: Schedule, alternatives: Alternatives, now: float) -> None:
        """A new request wants this prompt, whether it is admitted or not."""
        if self._active and not request.accepted:
            most_reused = (request.num_tokens - 1) // self._settings.block_tokens
            depths = {min(blocks, most_reused) for _, blocks in alternatives.holders} - {0}
            self._popularity.ask(request.block_keys, depths, now, request.tenant)

    def most_popular(self, at_most: int, now: float) -> Generator[None, None, list[PopularPrefix]]:
        """Returns, in parts, the prefixes that are asked for most, in that order; none where nothing is replicated."""
        return self._popularity.most_popular(at_most, now)

    def ended(self, event: ReplicationEnded, now: float) -> None:
        order = event.node_id, event.last_key
        if self._in_flight.pop(order, None) is not None:
            self._rests[order] = now + (_REFUSED_REST_S if event.failed else _REST_S)

    def orders(self, store_addresses: Mapping[NodeId, str], now: Callable[[], float]) -> Iterator[list[Replicate]]:
        """What is to be copied, in parts, between which time goes on and the cluster may become another: the most popular first, at most
        one prefix to a node."""
        self._forget_past(now())
        nothing: list[Replicate] = []
        popular = yield from saying(nothing, self._popularity.most_popular(_MOST_EXAMINED, now()))
        yield from saying(nothing, self._popularity.forget_unpopular(now()))
        if not popular:
            return
        without_engine = self._without_engine(store_addresses)
        yield nothing
        prefills, taken = self._prefills(now()), set[NodeId]()
        for prefix in popular:
            yield nothing
            if prefills.ready is not self._ready().instances:
                prefills = self._prefills(now())
            matches = self._index.match(prefix.keys)
            orders = self._copies(prefix, matches, prefills, store_addresses, taken, now())
            if without_engine:
                orders += self._kept(prefix, matches, without_engine, store_addresses, taken, now())
            taken.update(order.node_id for order in orders)
            yield orders

    def validate(self) -> None:
        """Asserts the bounds."""
        self._popularity.validate()
        assert not self._in_flight.keys() & self._rests.keys(), "an order is in flight and rests"

    # ---- within ----

    def _prefills(self, now: float) -> _Prefills:
        ready = self._ready()
        columns, names = ready.instances, ready.instance_ids
        queue_ms = columns.queue_ms_at(now)
        rows = np.lexsort((ready.by_name(), queue_ms))
        return _Prefills(columns, [names[row] for row in rows.tolist()], PrefillInstances(columns.rows[rows]), queue_ms[rows])

    def _without_engine(self, node_ids: Iterable[NodeId]) -> list[NodeId]:
        """Those of the stores, in order, that are known to hold something or nothing, and beside which there is no engine."""
        with_engine = {instance.ref.node_id for instance in self._state.instances.values()}
        return sorted(node_id for node_id in node_ids if node_id not in with_engine and self._index.knows(node_id))

    def _kept(
        self,
        prefix: PopularPrefix,
        matches: Matches,
        without_engine: Sequence[NodeId],
        store_addresses: Mapping[NodeId, str],
        taken: Set[NodeId],
        now: float,
    ) -> list[Replicate]:
        """The copy at a store without an engine, where none has one. Which of them is to have it, the prefix says; it refuses what it has
        no room for."""
        depth, last_key = len(prefix.keys), prefix.keys[-1]
        longest, holders = matches.longest(depth)
        holding = {matches.node_of_bit[bit] for bit in bits(holders)}
        node_id = without_engine[int.from_bytes(last_key) % len(without_engine)]
        order = node_id, last_key
        if longest < depth or holding.intersection(without_engine) or node_id in taken or node_id not in store_addresses:
            return []
        if order in self._in_flight or order in self._rests:
            return []
        sources = self._sources(holding, depth, store_addresses)
        if not sources or not self._budget.allows((node_id, sources[0].node_id), now):
            return []
        return [self._order(prefix, node_id, store_addresses[node_id], depth - matches.get(node_id, 0), sources, now)]

    def _copies(
        self,
        prefix: PopularPrefix,
        matches: Matches,
        prefills: _Prefills,
        store_addresses: Mapping[NodeId, str],
        taken: Set[NodeId],
        now: float,
    ) -> list[Replicate]:
        """Those of one prefix that pay, to nodes that are not taken. They at most double those who hold it, each with a source of its
        own."""
        depth, last_key = len(prefix.keys), prefix.keys[-1]
        longest, holders = matches.longest(depth)
        if longest < depth:
            return []
        held = matches.blocks_by_bit()[prefills.columns.bit]
        holding = (held >= depth).nonzero()[0]
        coming = sum(key == last_key for _, key in self._in_flight)
        more = min(int(prefix.asks / ASKS_A_COPY) - len(holding) - coming, holders.bit_count())
        if more < 1:
            return []
        waits_ms = self._waits_ms(prefix, prefills)
        # A request without a copy may wait at the least loaded of those who have one.
        gains_ms = (waits_ms[holding[0]] if len(holding) else math.inf) - waits_ms
        sources: list[PrefixSource] = []
        orders: list[Replicate] = []
        instances = self._state.instances
        lacking = ((row, instances[prefills.instance_ids[row]]) for row in (held < depth).nonzero()[0].tolist())
        free = ((row, target) for row, target in lacking if target.ref.node_id not in taken)
        for row, target in islice(free, _MOST_TARGETS):
            if len(orders) == more:
                break
            missing = depth - int(held[row])
            if gains_ms[row] < self._settings.replication_gain_ms or not self._has_place(target, last_key, depth, missing):
                continue
            # Sorted only now: mostly no copy pays, and the holders may be a thousand.
            sources = sources or self._sources({matches.node_of_bit[bit] for bit in bits(holders)}, depth, store_addresses)
            if not sources:
                break
            node_id = target.ref.node_id
            if not self._budget.allows((node_id, sources[0].node_id), now) or not self._pays(target, missing, depth, sources[0].node_id):
                continue
            orders.append(self._order(prefix, node_id, target.ref.store_address, missing, sources, now))
            sources = sources[1:] + sources[:1]
        return orders

    def _order(
        self,
        prefix: PopularPrefix,
        node_id: NodeId,
        store_address: str,
        missing: int,
        sources: Sequence[PrefixSource],
        now: float,
    ) -> Replicate:
        """To a node that misses so many blocks, from the first of the sources, or else the next."""
        num_bytes = missing * self._settings.bytes_per_block
        self._budget.spend((node_id, sources[0].node_id), num_bytes, now)
        within_s = 2 * self._budget.seconds(num_bytes) + _LATE_S
        self._in_flight[node_id, prefix.keys[-1]] = now + within_s
        return Replicate(node_id, store_address, prefix.keys, tuple(sources[:_MOST_SOURCES]), num_bytes, within_s)

    def _waits_ms(self, prefix: PopularPrefix, prefills: _Prefills) -> Floats:
        """How long a request that finds the prefix there would wait, by what prompts with so much left to compute have waited."""
        settings = self._settings
        cached_tokens = len(prefix.keys) * settings.block_tokens
        # Of the last, incomplete block, half on average; one token is always left.
        rest_tokens = max(round((prefix.rest_blocks + 0.5) * settings.block_tokens), 1)
        own_ms = np.empty(len(prefills.instance_ids))
        _native.prompts_ms(
            prefills.columns.view,
            own_ms,
            num_tokens=cached_tokens + rest_tokens,
            cached_tokens=cached_tokens,
            chunk_tokens=settings.chunk_tokens,
            chunk_ms=settings.chunk_ms or 0.0,
        )
        return np.asarray(prefills.queue_ms * self._state.queue_bias.factors(own_ms, prefills.queue_ms))

    def _has_place(self, target: Instance, last_key: BlockKey, depth: int, missing: int) -> bool:
        """The node has room, and the order was not given to it of late."""
        order = target.ref.node_id, last_key
        roomy = target.load.slots_total >= _ROOM * depth and target.load.slots_available >= missing
        return roomy and order not in self._in_flight and order not in self._rests

    def _pays(self, target: Instance, missing: int, depth: int, source_id: NodeId) -> bool:
        """Whether what a request at this node is spared, without going elsewhere, is worth a copy of the missing blocks."""
        settings, cost = self._settings, target.load.prefill_cost
        assert cost is not None, f"{target.ref.instance_id} is ready without a cost"
        if self._fetch_ms(source_id, target.ref.node_id, missing * settings.bytes_per_block) < settings.replication_gain_ms:
            return False
        compute_ms = self._state.prefill_ms(cost, missing * settings.block_tokens, (depth - missing) * settings.block_tokens)
        return compute_ms >= settings.replication_gain_ms

    def _fetch_ms(self, source_id: NodeId, node_id: NodeId, num_bytes: int) -> float:
        """Of a request's own fetch, sharing the source with what leaves it now."""
        source, destination = self._transfers.number(source_id), self._transfers.number(node_id)
        rates = self._transfers.rates_from(source)
        measured = math.nan if rates is None else float(rates[destination])
        bytes_per_s = self._settings.transfer_bytes_per_s if math.isnan(measured) else measured
        sharers = 1 + max(int(self._transfers.links.leaving[source]), int(self._transfers.links.arriving[destination]))
        return 1000.0 * num_bytes * sharers / bytes_per_s

    def _sources(self, holding: Set[NodeId], depth: int, store_addresses: Mapping[NodeId, str]) -> list[PrefixSource]:
        """Those of the holders that are up; first where fewer transfers leave now."""
        up = sorted(store_addresses.keys() & holding)
        numbers = [self._transfers.number(node_id) for node_id in up]
        leaving = self._transfers.links.leaving[numbers]
        return [PrefixSource(up[row], store_addresses[up[row]], depth) for row in np.argsort(leaving, kind="stable").tolist()]

    def _forget_past(self, now: float) -> None:
        self._budget.forget_past(now)
        for order in [order for order, until in self._in_flight.items() if until <= now]:
            del self._in_flight[order]
            self._rests[order] = now + _REFUSED_REST_S
        self._rests = {order: until for order, until in self._rests.items() if until > now}
