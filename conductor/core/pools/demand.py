"""How many instances the recent demand would keep busy in each pool, and so in which ratio the pools should be."""

from __future__ import annotations

from dataclasses import dataclass

from conductor.core.decayed import DecayedSums
from conductor.core.state import ClusterState
from conductor.core.types.decision import Alternatives, Decision, Placement
from springtide.protocol.instances import Load, Role
from springtide.protocol.scheduling import Schedule

TIME_CONSTANT_S = 120.0


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
    def __init__(self, state: ClusterState, tbt_slo_ms: float) -> None:
        self._state = state
        self._tbt_slo_ms = tbt_slo_ms
        self._work_ms: DecayedSums[Role] = DecayedSums(TIME_CONSTANT_S, len(Role))
        self._since: float | None = None

    def ask(self, request: Schedule, alternatives: Alternatives, placed: Decision, now: float) -> None:
        """A request is placed, or would be if it were admitted. One that was accepted before has been counted."""
        if request.accepted or not isinstance(placed, Placement):
            return
        if self._since is None:
            self._since = now
        output_tokens = self._state.output_tokens(request)
        load = self._state.instances[placed.decode.instance_id].load
        decode_ms = decode_work_ms(load, request.num_tokens, output_tokens, alternatives.num_blocks, self._tbt_slo_ms)
        self._work_ms.add(Role.DECODE if placed.inlined else Role.PREFILL, placed.prefill.prefill_ms, now)
        self._work_ms.add(Role.DECODE, decode_ms, now)

    def work(self, now: float) -> PoolWork:
        """The work that was asked for of late, in instances: milliseconds of work a millisecond."""
        if self._since is None:
            return PoolWork(0.0, 0.0)
        window_ms = 1000.0 * min(TIME_CONSTANT_S, max(now - self._since, 1.0))
        return PoolWork(self._work_ms.get(Role.PREFILL, now) / window_ms, self._work_ms.get(Role.DECODE, now) / window_ms)


def decode_work_ms(load: Load, num_tokens: int, output_tokens: float, num_blocks: int, tbt_slo_ms: float) -> float:
    """Instance time of one request's decoding: its part of each step, in the largest batch of its like that the objective, the
    configuration and the slots allow."""
    cost = load.decode_cost
    assert cost is not None, "an instance without a decode cost was chosen for decoding"
    own_ms = cost.per_sequence_ms + cost.per_context_token_ms * (num_tokens + output_tokens / 2.0)
    largest = [(tbt_slo_ms - cost.fixed_ms) / own_ms if own_ms > 0 else float("inf"), load.slots_total / num_blocks]
    if load.max_batch:
        largest.append(load.max_batch)
    return output_tokens * (cost.fixed_ms / max(min(largest), 1.0) + own_ms)
