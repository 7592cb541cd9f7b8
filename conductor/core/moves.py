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
from conductor.core.types.arrays import Floats
from conductor.core.types.decision import MoveReason
from conductor.core.types.events import MoveAttempts
from springtide.ids import AttemptId, InstanceId
from springtide.protocol.attempts import Phase
from springtide.protocol.instances import Role

MOST_AT_ONCE = 4
"""Attempts of one instance that are on their way, all others' prefixes being as long as they are."""
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
    """Says which attempts are to move."""

    def __init__(self, state: ClusterState, tbt_slo_ms: float) -> None:
        self._state = state
        self._tbt_slo_ms = tbt_slo_ms
        self._under_way: dict[AttemptId, _UnderWay] = {}
        self._rest_until: dict[AttemptId, float] = {}
        """Of those that have moved."""
        self._refused_until: dict[AttemptId, float] = {}
        """Of those that could not."""

    def reason(self, attempt_id: AttemptId) -> MoveReason:
        """Why an attempt is to move. Of one that another Conductor has told to, nobody knows: it leaves."""
        under_way = self._under_way.get(attempt_id)
        return under_way.reason if under_way is not None else MoveReason.LEAVING

    def answered(self, attempt_id: AttemptId, successor_id: AttemptId | None, now: float) -> None:
        """Its successor has been placed, or could not be (None)."""
        if successor_id is not None:
            self._rest_until[successor_id] = now + REST_S
        elif self._under_way.pop(attempt_id, None) is not None:
            self._refused_until[attempt_id] = now + REFUSED_REST_S

    def ended(self, attempt_id: AttemptId, now: float) -> list[MoveAttempts]:
        """An attempt is over; if it has moved away from where others are to leave, it is their turn."""
        under_way = self._under_way.pop(attempt_id, None)
        if under_way is None or under_way.reason is not MoveReason.LEAVING:
            return []
        source = self._state.instances.get(under_way.source)
        return [] if source is None else self.leaving(source, now)

    def leaving(self, instance: Instance, now: float) -> list[MoveAttempts]:
        """What of an instance that leaves is to move next."""
        if not instance.leaving or instance.ref.role is not Role.DECODE:
            return []
        return self._ordered(instance, MoveReason.LEAVING, now, MOST_AT_ONCE)

    def asked(self, instance_id: InstanceId, most: int, now: float) -> list[MoveAttempts]:
        """So many that decode at the instance are to leave it, for its operator wants it."""
        instance = self._state.instances.get(instance_id)
        return [] if instance is None else self._ordered(instance, MoveReason.ASKED, now, most)

    def orders(self, decodes: DecodeColumns, now: float) -> Iterator[list[MoveAttempts]]:
        """What is to move now, in parts. `decodes`: the decode instances that are ready."""
        for attempt_id in [key for key, move in self._under_way.items() if now - move.since > PATIENCE_S]:
            del self._under_way[attempt_id]
        self._rest_until = {key: until for key, until in self._rest_until.items() if until > now}
        self._refused_until = {key: until for key, until in self._refused_until.items() if until > now}
        for instance in [one for one in self._state.instances.values() if one.leaving]:
            yield self.leaving(instance, now)
        if len(decodes.instance_ids) < 2:
            return
        columns = decodes.instances
        tbt_ms = _tbt_ms(decodes)
        slow = np.where(columns.attempts > 1, tbt_ms - self._tbt_slo_ms, 0.0)
        if slow.max() > 0 and tbt_ms.min() <= SETTLED * self._tbt_slo_ms:
            yield self._ordered_by_name(decodes.instance_ids[int(slow.argmax())], MoveReason.SLOW, now)
        left = columns.slots_free / np.maximum(columns.slots_total, 1)
        if left.min() < 0 and left.max() >= ROOM_LEFT:
            yield self._ordered_by_name(decodes.instance_ids[int(left.argmin())], MoveReason.ROOM, now)

    def _ordered_by_name(self, instance_id: InstanceId, reason: MoveReason, now: float) -> list[MoveAttempts]:
        instance = self._state.instances.get(instance_id)
        return [] if instance is None else self._ordered(instance, reason, now)

    def _ordered(self, instance: Instance, reason: MoveReason, now: float, most: int = 1) -> list[MoveAttempts]:
        """Those that began last go first: they have most to come. `most`: are to be under way then."""
        source = instance.ref.instance_id
        places = most - sum(move.source == source for move in self._under_way.values())
        if places <= 0:
            return []
        able = [one for one in self._decoding(instance) if self._may_move(one, reason)]
        able.sort(key=lambda one: one.first_token_at or 0.0)
        chosen = able[-places:]
        for attempt in chosen:
            self._under_way[attempt.attempt_id] = _UnderWay(source, reason, now)
        return [MoveAttempts(attempt.gateway_id, (attempt.attempt_id,)) for attempt in chosen]

    def _may_move(self, attempt: PlacedAttempt, reason: MoveReason) -> bool:
        attempt_id = attempt.attempt_id
        rests = attempt_id in self._rest_until and reason not in (MoveReason.LEAVING, MoveReason.ASKED)
        return not (rests or attempt_id in self._refused_until or attempt_id in self._under_way)

    def _decoding(self, instance: Instance) -> Collection[PlacedAttempt]:
        """What decodes there, those in idle capacity apart, which give way to all others in any case."""
        attempts = self._state.attempts
        known = [attempts[key] for key in instance.load.attempt_ids if key in attempts]
        name = instance.ref.instance_id
        return [one for one in known if one.decode_id == name and one.phase is Phase.DECODE and not one.idle]


def _tbt_ms(decodes: DecodeColumns) -> Floats:
    """[instances] what their steps are predicted to take."""
    columns = decodes.instances
    at_once = np.where(columns.max_batch > 0, np.minimum(columns.attempts, columns.max_batch), columns.attempts)
    predicted = columns.fixed_ms + columns.per_sequence_ms * at_once + columns.per_context_token_ms * columns.context_tokens
    return np.asarray(np.where(columns.attempts > 0, predicted, 0.0))
