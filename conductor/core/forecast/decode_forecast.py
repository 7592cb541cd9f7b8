"""The decode pool's load at a later moment (arXiv 2407.00079, section 7.4): who will have joined it by then, and who will have left.

The paper lets every request decode for the same time. Here each attempt still counts at the later moment with the probability that its
output goes on until then, given how far it is: by the lengths of recent outputs, at its instance's pace.
"""

from __future__ import annotations

from collections.abc import Container, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conductor.core.forecast.output_lengths import OutputLengths
from conductor.core.kernels import plain_forecasting as plain
from conductor.core.kernels.forecasting import pool, with_one_more
from conductor.core.types.estimates import Floats
from springtide.cost import DecodeCost
from springtide.ids import AttemptId, InstanceId

_NEVER_S = 1e9
"""Pace of an instance of which nothing is known yet: no token comes."""
_MOST_MOMENTS = 16
"""At which one instance's load is looked at."""


@dataclass(frozen=True, slots=True)
class Batches:
    """What each decode instance of the pool is expected to have in its batch."""

    table: Floats
    """[BATCH_FIGURES, instances]"""

    @property
    def attempts(self) -> Floats:
        return np.asarray(self.table[plain.ATTEMPTS])

    @property
    def context_tokens(self) -> Floats:
        return np.asarray(self.table[plain.BATCH_TOKENS])


@dataclass(frozen=True, slots=True)
class PoolOutlook:
    """Times between tokens once one more attempt has joined."""

    expected_ms: float
    """Of the instance that it joins."""
    mean_ms: float
    """Over the instances that are ready; a standard deviation above what is expected, as half of the requests would miss an objective that
    is expected to be just met."""
    idle_mean_ms: float
    """The same with nobody else there."""


@dataclass(frozen=True, slots=True)
class InstanceOutlook:
    """Times between tokens of one instance."""

    first_ms: float
    """Expected at the beginning."""
    worst_ms: float
    """The greatest, as in `PoolOutlook.mean_ms`."""


class DecodeForecast:
    """Live attempts and instances as columns of two tables (plain_forecasting.py says of what). Looking ahead costs some 10 us for 1,000
    attempts on 16 instances."""

    def __init__(self, lengths: OutputLengths) -> None:
        self._lengths = lengths
        # Instances.
        self._places: dict[InstanceId, int] = {}
        """Columns of `_instances`."""
        self._gone: set[int] = set()
        """Places whose instance was forgotten while attempts still name it."""
        self._free_places: list[int] = []
        self._instances = _unused(8)
        self._members = np.zeros(8, dtype=np.intp)
        # Attempts.
        self._columns: dict[AttemptId, int] = {}
        self._ids: list[AttemptId] = []
        self._attempts = np.zeros((plain.ATTEMPT_FIGURES, 64))
        self._place = np.zeros(64, dtype=np.int64)
        self._law = np.zeros(64, dtype=np.int64)

    # ---- instances ----

    def report(
        self, instance_id: InstanceId, cost: DecodeCost, max_batch: int, running: int, tokens: int, step_ms: float, now: float
    ) -> None:
        """The instance is ready, and its batch was this. `step_ms`: measured time between tokens, 0 when there is none."""
        place = self._place_of(instance_id)
        own = self._instances[:, place]
        pace_ms = step_ms if running and step_ms > 0 else cost.predict_ms(max(running, 1), tokens)
        own[plain.PRODUCED] += (now - own[plain.PACED_AT]) / own[plain.PACE_S]
        own[plain.PACED_AT] = now
        own[plain.PACE_S] = max(pace_ms / 1000.0, 1e-6)
        own[: plain.MAX_BATCH + 1] = (
            1.0,
            running,
            tokens,
            cost.fixed_ms,
            cost.per_sequence_ms,
            cost.per_context_token_ms,
            max_batch or np.inf,
        )

    def down(self, instance_id: InstanceId) -> None:
        """No member of the pool until it reports again."""
        place = self._places.get(instance_id)
        if place is not None:
            self._instances[plain.READY, place] = 0.0

    def forget(self, instance_id: InstanceId) -> None:
        place = self._places.pop(instance_id, None)
        if place is not None:
            self._instances[plain.READY, place] = 0.0
            self._gone.add(place)
            self._free(place)

    def keep_only(self, known: Container[InstanceId]) -> None:
        """Forgets the others that no attempt names: attempts were placed on them, but they never came up, so nobody tells of their end."""
        for instance_id in [name for name, place in self._places.items() if name not in known and not self._members[place]]:
            self.forget(instance_id)

    # ---- attempts ----

    def place(self, attempt_id: AttemptId, instance_id: InstanceId, num_tokens: int, most_tokens: float, law: int, joins_at: float) -> None:
        """An attempt is in prefill, and predicted to join its decode instance at `joins_at` (s). `law`: see OutputLengths.law."""
        place = self._place_of(instance_id)
        column = len(self._ids)
        if column == len(self._place):
            self._place, self._law, self._attempts = _doubled(self._place), _doubled(self._law), _doubled(self._attempts)
        self._columns[attempt_id] = column
        self._ids.append(attempt_id)
        self._place[column], self._law[column] = place, law
        self._attempts[:, column] = joins_at, 0.0, num_tokens, most_tokens, 1.0
        self._members[place] += 1

    def join(self, attempt_id: AttemptId, now: float) -> None:
        """Its first token is out: from now on it is in its decode instance's batch."""
        column = self._columns.get(attempt_id)
        if column is not None and self._attempts[plain.IN_PREFILL, column]:
            own = self._instances[:, self._place[column]]
            self._attempts[plain.IN_PREFILL, column] = 0.0
            self._attempts[plain.JOINED, column] = own[plain.PRODUCED] + (now - own[plain.PACED_AT]) / own[plain.PACE_S]
            own[plain.DECODING] += 1

    def remove(self, attempt_id: AttemptId) -> None:
        column = self._columns.pop(attempt_id, None)
        if column is None:
            return
        place = int(self._place[column])
        self._members[place] -= 1
        if not self._attempts[plain.IN_PREFILL, column]:
            self._instances[plain.DECODING, place] -= 1
        last = self._ids.pop()
        if last != attempt_id:
            end = len(self._ids)
            self._columns[last] = column
            self._ids[column] = last
            self._place[column], self._law[column] = self._place[end], self._law[end]
            self._attempts[:, column] = self._attempts[:, end]
        self._free(place)

    def running_tokens(self, now: float) -> Floats:
        """How many tokens each attempt that decodes has had by now."""
        count, instances = len(self._ids), self._instances
        decoding, places = self._attempts[plain.IN_PREFILL, :count] == 0, self._place[:count]
        produced = instances[plain.PRODUCED] + (now - instances[plain.PACED_AT]) / instances[plain.PACE_S]
        return np.asarray(np.maximum(produced[places] - self._attempts[plain.JOINED, :count], 0.0)[decoding])

    # ---- looking ahead ----

    def pool(self, now: float, at: float, *, joining: bool) -> Batches:
        """Every instance's batch at `at` (s, not before `now`). Without `joining`, of those only that are in it now."""
        batches = np.empty((plain.BATCH_FIGURES, self._instances.shape[1]))
        survival = self._lengths.survival
        pool(self._instances, self._attempts, self._place, self._law, survival, batches, len(self._ids), now, at, joining)
        return Batches(batches)

    def outlook(self, batches: Batches, joined: InstanceId, num_tokens: int) -> PoolOutlook:
        """Of the pool, once an attempt of `num_tokens` has joined one of its instances."""
        return PoolOutlook(*with_one_more(self._instances, batches.table, self._places[joined], num_tokens))

    def instance(self, instance_id: InstanceId, num_tokens: int, now: float, start: float, end: float) -> InstanceOutlook:
        """Of one instance from `start` (s, not before `now`) to `end`, once an attempt of `num_tokens` has joined it."""
        place, instances = self._places[instance_id], self._instances
        columns = np.flatnonzero(self._place[: len(self._ids)] == place)
        attempts, places, laws = self._attempts[:, columns], self._place[columns], self._law[columns]
        # A batch grows when somebody joins: it is looked at then, and at the start.
        joins_at = np.sort(attempts[plain.JOINS_AT, attempts[plain.IN_PREFILL] > 0])
        joins_at = joins_at[(joins_at > start) & (joins_at < end)]
        at = np.concatenate([[start], joins_at[:: len(joins_at) // _MOST_MOMENTS + 1]])[:, None]
        stay, context = plain.expected(instances, attempts, places, laws, self._lengths.survival, now, at, joining=True)
        unknown, unknown_context = plain.unknown(instances)
        in_batch, tokens = 1 + stay.sum(axis=1) + unknown[place], num_tokens + (stay * context).sum(axis=1) + unknown_context[place]
        expected_ms = plain.step_ms(instances, place, in_batch, tokens)
        deviation_ms = np.sqrt(plain.step_variance_ms2(instances, place, stay, context).sum(axis=1))
        return InstanceOutlook(float(expected_ms[0]), float((expected_ms + deviation_ms).max()))

    def idle_tbt_ms(self, instance_id: InstanceId, num_tokens: int) -> float:
        """Of one instance with nothing but an attempt of `num_tokens`."""
        fixed, per_sequence, per_context_token = self._instances[plain.FIXED_MS : plain.MAX_BATCH, self._places[instance_id]]
        return float(fixed + per_sequence + per_context_token * num_tokens)

    def tbts_ms(self, batches: Batches) -> dict[InstanceId, float]:
        """Time between tokens of each instance that is ready; of an empty one, 0."""
        steps_ms = plain.step_ms(self._instances, slice(None), batches.attempts, batches.context_tokens)
        found = np.where(batches.attempts > 0, steps_ms, 0.0).tolist()
        ready = self._instances[plain.READY].tolist()
        return {instance_id: found[place] for instance_id, place in self._places.items() if ready[place]}

    def validate(self, live_ids: Set[AttemptId]) -> None:
        """Asserts that the columns are one for each of `live_ids`, and the counts those of the columns."""
        assert self._columns.keys() == live_ids, "the forecast counts other attempts than those that live"
        assert len(self._columns) == len(self._ids)
        assert all(self._ids[column] == attempt_id for attempt_id, column in self._columns.items())
        count, num_places = len(self._ids), len(self._members)
        places, decoding = self._place[:count], self._attempts[plain.IN_PREFILL, :count] == 0
        assert (np.bincount(places, minlength=num_places) == self._members).all()
        assert (np.bincount(places[decoding], minlength=num_places) == self._instances[plain.DECODING]).all()
        told = [*self._places.values(), *self._gone, *self._free_places]
        assert sorted(told) == list(range(len(told)))

    # ---- places ----

    def _place_of(self, instance_id: InstanceId) -> int:
        place = self._places.get(instance_id)
        if place is not None:
            return place
        # Places in use and free ones are all there are: without a free one, the next is a new one.
        place = self._free_places.pop() if self._free_places else len(self._places) + len(self._gone)
        if place == len(self._members):
            self._instances = np.concatenate([self._instances, _unused(place)], axis=1)
            self._members = _doubled(self._members)
        self._instances[:, place] = _unused(1)[:, 0]
        self._places[instance_id] = place
        return place

    def _free(self, place: int) -> None:
        """The place of a forgotten instance is free once no attempt names it."""
        if place in self._gone and not self._members[place]:
            self._gone.remove(place)
            self._free_places.append(place)


def _unused(count: int) -> Floats:
    """Columns of instances of which nothing is known yet."""
    columns = np.zeros((plain.INSTANCE_FIGURES, count))
    columns[plain.MAX_BATCH], columns[plain.PACE_S] = np.inf, _NEVER_S
    return columns


def _doubled(array: NDArray[Any]) -> NDArray[Any]:
    """Twice as long in its last dimension, with zeros behind."""
    return np.concatenate([array, np.zeros_like(array)], axis=-1)
