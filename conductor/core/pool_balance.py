"""The balance of the prefill and the decode pool: how loaded both are, how many instances of each role the recent demand wants, and which
instance moves from one to the other when the two agree for long.

Loads are satisfaction of the objectives (arXiv 2407.00079, section 7.1): 1 is as much as they allow.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from conductor.core.settings import PoolBalanceSettings
from conductor.core.state import ClusterState, Instance
from conductor.core.types.arrays import Floats
from conductor.core.types.decision import Alternatives, Decision, Placement
from conductor.core.types.events import SwitchRole
from springtide.ids import InstanceId
from springtide.protocol.instances import Load, Role, RoleSwitch
from springtide.protocol.scheduling import Schedule
from springtide.slices import slices

_RATIO_S, _SIZES_S = 120.0, 30.0
"""Of the demand that counts: for the ratio of the pools, whose roles are not to turn with every burst, and for their sizes, as more nodes
take their time to come anyway."""
_LATE_S = 120.0
"""A move of which nothing has been seen for so long after its drain has failed: a large model takes its time to load."""
_INSTANCES_AT_ONCE, _ATTEMPTS_AT_ONCE = 128, 512
"""Of which a part of the work tells."""

# ---- how loaded the pools are ----


@dataclass(frozen=True, slots=True)
class PoolLoads:
    """The loads of both pools, and of their instances."""

    prefill: float
    """Mean over the instances; 0 without any."""
    decode: float
    by_instance: Mapping[InstanceId, float]
    """Prefill: the wait behind all of the queue, over the objective. Decode: the time between tokens, over the objective."""


def pool_loads(state: ClusterState, ttft_slo_ms: float, tbt_slo_ms: float, now: float) -> Generator[None, None, PoolLoads]:
    """Returns, in parts, the loads of the instances that are up, at this moment: what is still in prefill counts there, not at its decode
    node."""
    tbts_ms = state.forecast.tbts_ms(state.forecast.pool(now, now, joining=False))
    decode = {instance_id: tbt_ms / tbt_slo_ms for instance_id, tbt_ms in tbts_ms.items()}
    yield
    instances = [instance for instance in state.of_role(Role.PREFILL) if instance.up and instance.load.prefill_cost is not None]
    waits_ms = yield from _waits_ms(state, instances, now)
    prefill = {instance.ref.instance_id: load for instance, load in zip(instances, (waits_ms / ttft_slo_ms).tolist(), strict=True)}
    return PoolLoads(fmean(prefill.values()) if prefill else 0.0, fmean(decode.values()) if decode else 0.0, {**prefill, **decode})


def _waits_ms(state: ClusterState, instances: Sequence[Instance], now: float) -> Generator[None, None, Floats]:
    """Returns [instances], in parts, how long prompts like those that are there now wait behind all of the queue, on average; where there
    are none, all of its work."""
    queues_ms: list[float] = []
    for some in slices(instances, _INSTANCES_AT_ONCE):
        queues_ms += [instance.queue_ms(now) for instance in some]
        yield
    queue_ms = np.array(queues_ms)
    rows = {instance.ref.instance_id: row for row, instance in enumerate(instances)}
    waiting: list[tuple[int, float]] = []
    for attempts in slices(list(state.in_prefill.values()), _ATTEMPTS_AT_ONCE):
        waiting += [(row, attempt.prefill_ms) for attempt in attempts if (row := rows.get(attempt.prefill_id)) is not None]
        yield
    if not waiting:
        return queue_ms
    row_of, own_ms = np.array([row for row, _ in waiting]), np.array([own_ms for _, own_ms in waiting])
    factors = np.bincount(row_of, state.queue_bias.factors(own_ms, queue_ms[row_of]), len(instances))
    counts = np.bincount(row_of, minlength=len(instances))
    return np.asarray(queue_ms * np.where(counts > 0, factors / np.maximum(counts, 1), 1.0))


@dataclass(frozen=True, slots=True)
class PoolUse:
    """What the instances of a role that are up have to do, by their latest reports and what was placed on them since."""

    running: int
    waiting: int
    tokens: int
    """As of Load, reported alone."""
    kv_used: float
    """Share of the slots of their stores that attempts hold or are promised; above 1 where more is promised than there is."""


def pool_use(state: ClusterState, role: Role) -> Generator[None, None, PoolUse]:
    """Returns it, in parts."""
    slots = free = running = waiting = tokens = 0
    for some in slices(list(state.of_role(role)), _INSTANCES_AT_ONCE):
        for instance in some:
            if instance.up:
                load = instance.load
                slots += load.slots_total
                free += instance.slots_free()
                running += load.running
                waiting += load.waiting + len(instance.unreported)
                tokens += load.tokens
        yield
    return PoolUse(running, waiting, tokens, kv_used=max(0.0, 1.0 - free / slots) if slots else 0.0)


# ---- how many instances of each role are wanted ----


@dataclass(frozen=True, slots=True)
class PoolWork:
    """Instances of each role that the predicted work of recent requests, those that were refused included, would keep busy."""

    prefill: float
    decode: float

    @property
    def prefill_share(self) -> float | None:
        """The share of the instances that should do prefill; None while nothing has been asked for."""
        total = self.prefill + self.decode
        return self.prefill / total if total > 0 else None

    def wanted(self, role: Role, num_instances: int) -> int | None:
        """How many of the instances should have this role: at least one each. None while nothing has been asked for."""
        share = self.prefill_share
        if share is None or num_instances < 2:
            return None
        prefill = min(max(round(share * num_instances), 1), num_instances - 1)
        return prefill if role is Role.PREFILL else num_instances - prefill


class PoolDemand:
    """The work that requests ask for of late, of each pool."""

    def __init__(self, state: ClusterState, tbt_slo_ms: float) -> None:
        self._state = state
        self._tbt_slo_ms = tbt_slo_ms
        self._by_ratio, self._by_sizes = (_WorkOfLate(time_constant_s) for time_constant_s in (_RATIO_S, _SIZES_S))

    def ask(self, request: Schedule, alternatives: Alternatives, placed: Decision, output_tokens: float, now: float) -> None:
        """A request, of an output of so many tokens, is placed, or would be if it were admitted. One that was accepted before has been
        counted."""
        if request.accepted or not isinstance(placed, Placement):
            return
        load = self._state.instances[placed.decode.instance_id].load
        decode_ms = decode_work_ms(load, request.num_tokens, output_tokens, alternatives.num_blocks, self._tbt_slo_ms)
        prefill_ms = placed.prefill.prefill_ms / (1 + self._state.instances[placed.prefill.instance_id].load.slowed_by)
        if placed.inlined:
            prefill_ms, decode_ms = 0.0, decode_ms + prefill_ms
        self._by_ratio.add(prefill_ms, decode_ms, now)
        self._by_sizes.add(prefill_ms, decode_ms, now)

    def work(self, now: float) -> PoolWork:
        """Of the last two minutes or so: the ratio of the pools follows it."""
        return self._by_ratio.get(now)

    def recent_work(self, now: float) -> PoolWork:
        """Of the last half minute or so: their sizes follow it."""
        return self._by_sizes.get(now)


class _WorkOfLate:
    """Milliseconds of work a millisecond, that is instances, each moment counting less by a factor of e when it is so long past."""

    def __init__(self, time_constant_s: float) -> None:
        self._time_constant_s = time_constant_s
        self._since: float | None = None
        self._prefill_ms = self._decode_ms = self._at = 0.0
        """Of both pools, as of then: one exponential for both, for it is in the way of every decision."""

    def add(self, prefill_ms: float, decode_ms: float, now: float) -> None:
        if self._since is None:
            self._since = self._at = now
        left = math.exp((self._at - now) / self._time_constant_s)
        self._prefill_ms = self._prefill_ms * left + prefill_ms
        self._decode_ms = self._decode_ms * left + decode_ms
        self._at = now

    def get(self, now: float) -> PoolWork:
        if self._since is None:
            return PoolWork(0.0, 0.0)
        # The time that there has been, weighted as the work is: a young cluster's is not thinned out by a time before its first request.
        window_ms = -1000.0 * self._time_constant_s * math.expm1(-max(now - self._since, 1.0) / self._time_constant_s)
        left = math.exp((self._at - now) / self._time_constant_s)
        return PoolWork(self._prefill_ms * left / window_ms, self._decode_ms * left / window_ms)


def decode_work_ms(load: Load, num_tokens: int, output_tokens: float, num_blocks: int, tbt_slo_ms: float) -> float:
    """Instance time of one request's decoding: its part of each step, in the largest batch of its like that the objective, the
    configuration and the slots allow."""
    cost = load.decode_cost
    assert cost is not None, "an instance without a decode cost was chosen for decoding"
    fixed_ms, own_ms = cost.fixed_ms, cost.per_sequence_ms + cost.per_context_token_ms * (num_tokens + output_tokens / 2.0)
    largest = min(load.slots_total / num_blocks, load.max_batch or math.inf, (tbt_slo_ms - fixed_ms) / own_ms if own_ms > 0 else math.inf)
    return output_tokens * (fixed_ms / max(largest, 1.0) + own_ms)


# ---- who moves ----


@dataclass(frozen=True, slots=True)
class _Move:
    instance_id: InstanceId
    to: Role
    until: float


class PoolBalance:
    """Moves instances from one pool to the other: one at a time, each after the loads have differed without a break and the one before has
    had time to show its effect.

    Two things must agree: the loads at hand, which also see what no prediction does, and the ratio that the demand of the last minutes
    asks for, which does not turn with every burst.
    """

    def __init__(self, settings: PoolBalanceSettings) -> None:
        self._settings = settings
        self._busier: Role | None = None
        self._since = 0.0
        self._move: _Move | None = None
        self._pause_until = float("-inf")
        self._refused: InstanceId | None = None
        """The last one that did not take its order: it would be the idlest again."""

    @property
    def moving(self) -> InstanceId | None:
        """The instance that is on its way to its new role."""
        return self._move.instance_id if self._move is not None else None

    def decide(self, ready: Iterable[Instance], loads: PoolLoads, work: PoolWork, now: float) -> SwitchRole | None:
        """What is to be moved now, if anything. To be called about once a second. `ready`: the instances that can take requests."""
        pools: dict[Role, list[Instance]] = {role: [] for role in Role}
        for instance in ready:
            pools[instance.ref.role].append(instance)
        if self._switching(pools, now):
            return None
        busier = self._which(loads)
        if busier is not self._busier:
            self._busier, self._since = busier, now
        settings = self._settings
        if busier is None or now - self._since < settings.after_s or now < self._pause_until:
            return None
        other = Role.DECODE if busier is Role.PREFILL else Role.PREFILL
        givers, takers = pools[other], pools[busier]
        wanted = work.wanted(busier, len(givers) + len(takers))
        if len(givers) < 2 or wanted is None or wanted <= len(takers) or not _helps(loads, busier, len(givers), len(takers)):
            return None
        willing = [instance for instance in givers if instance.ref.instance_id != self._refused]
        idlest = min(willing, key=lambda instance: (loads.by_instance.get(instance.ref.instance_id, 0.0), instance.ref.instance_id))
        self._move = _Move(idlest.ref.instance_id, busier, now + settings.drain_s + _LATE_S)
        self._busier = None
        return SwitchRole(idlest.ref, RoleSwitch(busier, settings.drain_s))

    def failed(self, instance_id: InstanceId, now: float) -> None:
        """The instance did not take the order: the move is over, its pause begins, and next time another is asked."""
        if self.moving == instance_id:
            self._refused = instance_id
            self._end_move(now)

    def _which(self, loads: PoolLoads) -> Role | None:
        """The pool that is loaded, and so many times as the other."""
        for role, load, others in ((Role.PREFILL, loads.prefill, loads.decode), (Role.DECODE, loads.decode, loads.prefill)):
            if load >= self._settings.least_load and load >= self._settings.ratio * others:
                return role
        return None

    def _switching(self, pools: dict[Role, list[Instance]], now: float) -> bool:
        """Whether the last move is not over; when it ends, the pause begins."""
        move = self._move
        if move is None:
            return False
        arrived = any(instance.ref.instance_id == move.instance_id for instance in pools[move.to])
        if not arrived and now < move.until:
            return True
        self._end_move(now)
        return False

    def _end_move(self, now: float) -> None:
        self._move, self._pause_until = None, now + self._settings.pause_s


def _helps(loads: PoolLoads, busier: Role, givers: int, takers: int) -> bool:
    """Whether the pools' roles would not just be reversed: with the same work, the giving pool stays the less loaded one."""
    taking, giving = (loads.prefill, loads.decode) if busier is Role.PREFILL else (loads.decode, loads.prefill)
    return giving * givers / (givers - 1) < taking * takers / (takers + 1)
