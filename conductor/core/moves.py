"""Which attempts had better go on decoding at another node.

What is decided here is that one should leave, and why; where it goes is a placement like any other (`scheduler.place`), when its gateway
asks for a successor. Of one instance few move at a time, so that what they leave behind is seen before more do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from conductor.core.placement.instance_columns import DecodeColumns
from conductor.core.placement.scheduler import ROOM_LEFT, SETTLED
from conductor.core.state import ClusterState, Instance, PlacedAttempt
from conductor.core.types.decision import MoveReason
from conductor.core.types.events import MoveAttempts
from springtide.ids import AttemptId, InstanceId
from springtide.protocol.attempts import Phase
from springtide.protocol.instances import Role

MOST_AT_ONCE = 4
"""Attempts of one instance that leaves, or that an operator empties, that are on their way."""
PATIENCE_S = 10.0
"""After which a move of which nothing was heard counts no more."""
REST_S = 10.0
"""An attempt that has moved stays so long, unless its node leaves."""
REFUSED_REST_S = 4.0
"""One that could not, for nobody had room for it."""


@dataclass(slots=True)
class _UnderWay:
    source: InstanceId
    reason: MoveReason
    since: float


class MovePlanner:
    """Says which attempts are to move, and follows them until they have, or could not."""

    def __init__(self, state: ClusterState, tbt_slo_ms: float) -> None:
        self._state = state
        self._tbt_slo_ms = tbt_slo_ms
        self._under_way: dict[AttemptId, _UnderWay] = {}
        self._successors: dict[AttemptId, AttemptId] = {}
        """Those that are to take the place of another, which runs, with that one."""
        self._asked: dict[InstanceId, int] = {}
        """How many more an operator wants to leave an instance."""
        self._rest_until: dict[AttemptId, float] = {}
        """Of those that have moved."""
        self._refused_until: dict[AttemptId, float] = {}
        """Of those that could not."""

    def reason(self, attempt_id: AttemptId) -> MoveReason:
        """Why an attempt is to move. Of one that another Conductor has told to, nobody knows: it leaves."""
        under_way = self._under_way.get(attempt_id)
        return under_way.reason if under_way is not None else MoveReason.LEAVING

    def succeeds(self, successor_id: AttemptId, attempt_id: AttemptId, now: float) -> None:
        """The one is to take the place of the other, which runs."""
        self._successors[successor_id] = attempt_id
        self._rest_until[successor_id] = now + REST_S

    def refused(self, attempt_id: AttemptId, now: float) -> None:
        """It could not: nobody had room for it, or who was to take it has failed."""
        if self._under_way.pop(attempt_id, None) is not None:
            self._refused_until[attempt_id] = now + REFUSED_REST_S

    def ended(self, attempt_id: AttemptId, now: float) -> list[MoveAttempts]:
        """An attempt is over: one that was under way makes room for another; if it was a successor, it may have been the last one that was
        to take the place of one that runs."""
        moved = self._under_way.pop(attempt_id, None)
        if moved is not None:
            self._successors = {one: other for one, other in self._successors.items() if other != attempt_id}
        elif (other := self._successors.pop(attempt_id, None)) is not None and other not in self._successors.values():
            moved = self._under_way.get(other)
            self.refused(other, now)
        source = None if moved is None else self._state.instances.get(moved.source)
        return [] if source is None else self._next(source, now)

    def leaving(self, instance: Instance, now: float) -> list[MoveAttempts]:
        """What of an instance that leaves is to move next."""
        if not instance.leaving or instance.ref.role is not Role.DECODE:
            return []
        return self._ordered(instance, MoveReason.LEAVING, now, MOST_AT_ONCE)

    def asked(self, instance_id: InstanceId, most: int, now: float) -> list[MoveAttempts]:
        """So many that decode at the instance are to leave it, for its operator wants it: the first ones of them now."""
        instance = self._state.instances.get(instance_id)
        if instance is None:
            return []
        self._asked[instance_id] = min(most, sum(self._may_move(one, MoveReason.ASKED, now) for one in self._decoding(instance)))
        return self._next(instance, now)

    def still_asked(self, instance_id: InstanceId) -> int:
        """How many of those are still to be told."""
        return self._asked.get(instance_id, 0)

    def _next(self, instance: Instance, now: float) -> list[MoveAttempts]:
        """Of one that is to be emptied, or to have less."""
        name = instance.ref.instance_id
        if instance.leaving:
            return self.leaving(instance, now)
        if not (wanted := self._asked.pop(name, 0)):
            return []
        ordered = self._ordered(instance, MoveReason.ASKED, now, MOST_AT_ONCE, wanted)
        if len(ordered) < wanted and any(move.source == name for move in self._under_way.values()):
            self._asked[name] = wanted - len(ordered)
        return ordered

    def orders(self, decodes: DecodeColumns, now: float) -> Iterator[list[MoveAttempts]]:
        """What is to move now, in parts. `decodes`: the decode instances that are ready."""
        for attempt_id in [key for key, move in self._under_way.items() if now - move.since > PATIENCE_S]:
            del self._under_way[attempt_id]
        self._rest_until = {key: until for key, until in self._rest_until.items() if until > now}
        self._refused_until = {key: until for key, until in self._refused_until.items() if until > now}
        self._successors = {one: other for one, other in self._successors.items() if one in self._state.attempts}
        # By name: between two parts the columns may have become others.
        chosen = self._worst(decodes)
        for instance in [one for one in self._state.instances.values() if one.leaving]:
            yield self.leaving(instance, now)
        for instance_id, reason in chosen:
            if (worst := self._state.instances.get(instance_id)) is not None:
                yield self._ordered(worst, reason, now, 1)

    def _worst(self, decodes: DecodeColumns) -> list[tuple[InstanceId, MoveReason]]:
        """The instances that are to have less, and why."""
        if len(decodes.instance_ids) < 2:
            return []
        chosen = []
        columns, tbt_ms = decodes.instances, decodes.step_ms()
        slow = np.where(columns.attempts > 1, tbt_ms - self._tbt_slo_ms, 0.0)
        if slow.max() > 0 and tbt_ms.min() <= SETTLED * self._tbt_slo_ms:
            chosen.append((decodes.instance_ids[int(slow.argmax())], MoveReason.SLOW))
        left = columns.slots_free / np.maximum(columns.slots_total, 1)
        if left.min() < 0 and left.max() >= ROOM_LEFT:
            chosen.append((decodes.instance_ids[int(left.argmin())], MoveReason.ROOM))
        return chosen

    def _ordered(self, instance: Instance, reason: MoveReason, now: float, at_once: int, wanted: int | None = None) -> list[MoveAttempts]:
        """Those that have not moved yet go first, and of these who began last: they have most to come. `at_once`: are under way at most.
        `wanted`: no more than so many."""
        source = instance.ref.instance_id
        places = at_once - sum(move.source == source for move in self._under_way.values())
        places = places if wanted is None else min(places, wanted)
        if places <= 0:
            return []
        able = [one for one in self._decoding(instance) if self._may_move(one, reason, now)]
        able.sort(key=lambda one: (one.earlier_tokens > 0, -(one.first_token_at or 0.0)))
        chosen = able[:places]
        for attempt in chosen:
            self._under_way[attempt.attempt_id] = _UnderWay(source, reason, now)
        return [MoveAttempts(attempt.gateway_id, (attempt.attempt_id,)) for attempt in chosen]

    def _may_move(self, attempt: PlacedAttempt, reason: MoveReason, now: float) -> bool:
        attempt_id = attempt.attempt_id
        if attempt_id in self._under_way or self._refused_until.get(attempt_id, now) > now:
            return False
        return reason in (MoveReason.LEAVING, MoveReason.ASKED) or self._rest_until.get(attempt_id, now) <= now

    def _decoding(self, instance: Instance) -> Collection[PlacedAttempt]:
        """What decodes there, whether it has said so or not; those in idle capacity apart, which give way to all others in any case."""
        attempts, name = self._state.attempts, instance.ref.instance_id
        known = [attempts[key] for key in instance.load.attempt_ids | instance.unreported.keys() if key in attempts]
        return [one for one in known if one.decode_id == name and one.phase is Phase.DECODE and not one.idle]
