"""The state of the cluster as people are shown it, in parts each of which is made within a millisecond or so at a thousand instances.

Between two parts the core may go on: what is gone by then is left out, or shown as it last was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence

from conductor.core.conductor import ConductorCore
from conductor.core.pool_balance import PoolLoads
from conductor.core.replication.popularity import PopularPrefix
from conductor.core.state import Instance, PlacedAttempt
from springtide.protocol.instances import Role
from springtide.protocol.observation import (
    AttemptTable,
    InstanceTable,
    ObservedAttempt,
    ObservedPart,
    ObservedPrefix,
    PrefixTable,
    StoreTable,
)
from springtide.slices import slices

MOST_ATTEMPTS, MOST_ATTEMPTS_OF_A_TENANT = 500, 200
"""That are listed; all are counted."""
MOST_PREFIXES = 32
MOST_HOLDERS = 128
"""That are named of a prefix."""
_INSTANCES_AT_ONCE = 200
_ATTEMPTS_AT_ONCE = 100
_LOOKED_AT_ONCE = 4000


def observed_work(core: ConductorCore, pools: PoolLoads, now: float) -> Iterator[ObservedPart | None]:
    """The instances with their load, and the attempts. None: nothing to tell yet."""
    loads = pools.by_instance
    instances = core.state.in_order()
    yield None
    for some in slices(instances, _INSTANCES_AT_ONCE):
        yield InstanceTable(
            instance_ids=tuple(instance.ref.instance_id for instance in some),
            node_ids=tuple(instance.ref.node_id for instance in some),
            roles=tuple(instance.ref.role for instance in some),
            ready=tuple(core.scheduler.ready(instance) for instance in some),
            loads=tuple(loads.get(instance.ref.instance_id, 0.0) for instance in some),
            running=tuple(instance.load.running for instance in some),
            waiting=tuple(map(_waiting, some)),
            idle=tuple(instance.load.idle.running for instance in some),
            queue_ms=tuple(instance.queue_ms(now) if instance.ref.role is Role.PREFILL else instance.inlining_ms() for instance in some),
            step_ms=tuple(instance.load.step_ms for instance in some),
            slots_total=tuple(instance.load.slots_total for instance in some),
            slots_available=tuple(instance.load.slots_available for instance in some),
            seconds_since_report=tuple(now - instance.changed_at for instance in some),
        )
    listed = yield from _listed(list(core.state.attempts.values()))
    for chosen in slices(listed, _ATTEMPTS_AT_ONCE):
        yield AttemptTable(tuple(map(_attempt, chosen)))


def observed_pool(core: ConductorCore, now: float) -> Iterator[ObservedPart | None]:
    """The stores with what they hold, and the prefixes that are asked for most. None: nothing to tell yet."""
    index = core.index
    for some in slices([node_id for node_id, _ in index.live_nodes()], _INSTANCES_AT_ONCE):
        on_ssd = tuple(map(index.ssd_blocks_of, some))
        yield StoreTable(tuple(some), tuple(index.blocks_of(node) - ssd for node, ssd in zip(some, on_ssd, strict=True)), on_ssd)
    popular = yield from core.replication.most_popular(MOST_PREFIXES, now)
    yield None
    for prefix in popular:
        yield PrefixTable((_prefix(core, prefix),))


def _waiting(instance: Instance) -> int:
    """What was placed at a decode node since its report is still in prefill elsewhere."""
    return instance.load.waiting + (len(instance.unreported) if instance.ref.role is Role.PREFILL else 0)


def _listed(attempts: Sequence[PlacedAttempt]) -> Generator[None, None, list[PlacedAttempt]]:
    """Returns the newest, in turns by tenant."""
    newest: dict[str, deque[PlacedAttempt]] = {}
    for some in slices(attempts, _LOOKED_AT_ONCE):
        for attempt in some:
            of_tenant = newest.get(attempt.tenant)
            if of_tenant is None:
                of_tenant = newest[attempt.tenant] = deque(maxlen=MOST_ATTEMPTS_OF_A_TENANT)
            of_tenant.append(attempt)
        yield
    listed: list[PlacedAttempt] = []
    while newest and len(listed) < MOST_ATTEMPTS:
        for tenant, waiting in list(newest.items()):
            listed.append(waiting.pop())
            if not waiting:
                del newest[tenant]
    return listed[:MOST_ATTEMPTS]


def _attempt(attempt: PlacedAttempt) -> ObservedAttempt:
    predicted = attempt.prediction
    return ObservedAttempt(
        attempt_id=attempt.attempt_id,
        request_id=attempt.request_id or "",
        tenant=attempt.tenant,
        gateway_id=attempt.gateway_id,
        prefill_id=attempt.prefill_id,
        decode_id=attempt.decode_id,
        phase=attempt.phase,
        num_tokens=attempt.num_tokens,
        idle=attempt.idle,
        placed_at=attempt.joins_at - (predicted.ttft_ms / 1000.0 if predicted is not None else 0.0),
        first_token_at=attempt.first_token_at or 0.0,
        prediction=predicted,
    )


def _prefix(core: ConductorCore, prefix: PopularPrefix) -> ObservedPrefix:
    holders = list(core.index.match(prefix.keys).items())
    shown = holders[:MOST_HOLDERS]
    in_dram = [blocks for _, blocks in shown]
    if core.index.has_ssd:
        of_node = core.index.match_in_dram(prefix.keys)
        in_dram = [of_node.get(node_id, 0) for node_id, _ in shown]
    return ObservedPrefix(
        key=prefix.keys[-1],
        tenant=prefix.tenant,
        blocks=len(prefix.keys),
        asks=prefix.asks,
        num_holders=len(holders),
        num_whole=sum(blocks == len(prefix.keys) for _, blocks in holders),
        node_ids=tuple(node_id for node_id, _ in shown),
        held=tuple(blocks for _, blocks in shown),
        held_in_dram=tuple(in_dram),
    )
