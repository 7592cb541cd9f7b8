"""The decode pool's load at a later moment (arXiv 2407.00079, section 7.4): who will have joined it by then, and who will have left.

The paper lets every request decode for the same time. Here each attempt still counts at the later moment with the probability that its
output goes on until then, given how far it is: by the lengths of recent outputs, at its instance's pace.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Set

import numpy as np

from conductor import _native
from conductor.core.forecast.output_lengths import OutputLengths
from conductor.core.types.arrays import Floats, Ints, Rows, StructuredArray
from springtide.cost import DecodeCost
from springtide.ids import AttemptId, InstanceId

_NEVER_S = 1e9
"""Pace of an instance of which nothing is known yet: no token comes."""
_MOST_MOMENTS = 16
"""At which one instance's load is looked at."""
_ATTEMPTS_AT_ONCE = 2048
"""Of all that live, those that a part of a look at them is at: some .1 ms."""


class ForecastInstances(StructuredArray):
    """Decode instances, as the forecast knows them."""

    ready: Ints
    """1 or 0."""
    running: Ints
    """In its batch, by the latest report."""
    decoding: Ints
    """Of the attempts that are known here, those in its batch."""
    context_tokens: Floats
    """Of its batch, by the latest report."""
    fixed_ms: Floats
    per_sequence_ms: Floats
    per_context_token_ms: Floats
    """As of DecodeCost."""
    max_batch: Floats
    """Infinite: not limited."""
    pace_s: Floats
    """Between tokens at present."""
    produced: Floats
    """Tokens that an attempt in the batch all the time would have had by `paced_at` (s)."""
    paced_at: Floats


class ForecastAttempts(StructuredArray):
    """Live attempts, as the forecast knows them."""

    place: Ints
    """Row of its instance."""
    law: Ints
    """See OutputLengths.law."""
    in_prefill: Ints
    """1 or 0."""
    joins_at: Floats
    """Predicted end of its prefill (s)."""
    joined: Floats
    """Its instance's `produced` when it joined."""
    prompt_tokens: Floats
    most_tokens: Floats
    """Upper bound of its output."""


class ExpectedBatches(StructuredArray):
    """What each instance is expected to have in its batch."""

    attempts: Floats
    context_tokens: Floats
    step_variance_ms2: Floats
    """Of a step's time, for it is not certain who will be in the batch."""


class DecodeForecast:
    """Live attempts and decode instances, as rows that C looks ahead over: some 10 us for 1,000 attempts on 16 instances."""

    def __init__(self, lengths: OutputLengths) -> None:
        self._lengths = lengths
        # Instances.
        self._places: dict[InstanceId, int] = {}
        """Rows of `_instances`."""
        self._gone: set[int] = set()
        """Places whose instance was forgotten while attempts still name it."""
        self._free_places: list[int] = []
        self._instances = ForecastInstances(_unused(8))
        self._batches = ExpectedBatches.zeros(8)
        """Of these instances, as they were expected last."""
        self._members = np.zeros(8, dtype=np.intp)
        # Attempts.
        self._row_of: dict[AttemptId, int] = {}
        self._ids: list[AttemptId] = []
        self._attempts = ForecastAttempts.zeros(64)
        """Of which the first `len(_ids)` are there."""

    # ---- instances ----

    def report(
        self, instance_id: InstanceId, cost: DecodeCost, max_batch: int, running: int, tokens: int, step_ms: float, now: float
    ) -> None:
        """The instance is ready, and its batch was this. `step_ms`: measured time between tokens, 0 when there is none."""
        place = self._place_of(instance_id)
        pace_ms = step_ms if running and step_ms > 0 else cost.predict_ms(max(running, 1), tokens)
        instances = self._instances
        instances.produced[place] = self._produced(place, now)
        instances.paced_at[place] = now
        instances.pace_s[place] = max(pace_ms / 1000.0, 1e-6)
        instances.ready[place] = 1
        instances.running[place] = running
        instances.context_tokens[place] = tokens
        instances.fixed_ms[place] = cost.fixed_ms
        instances.per_sequence_ms[place] = cost.per_sequence_ms
        instances.per_context_token_ms[place] = cost.per_context_token_ms
        instances.max_batch[place] = max_batch or np.inf

    def down(self, instance_id: InstanceId) -> None:
        """Takes the instance out of the pool until it reports again."""
        place = self._places.get(instance_id)
        if place is not None:
            self._instances.ready[place] = 0

    def forget(self, instance_id: InstanceId) -> None:
        place = self._places.pop(instance_id, None)
        if place is not None:
            self._instances.ready[place] = 0
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
        row = len(self._ids)
        if row == len(self._attempts):
            self._attempts = self._attempts.extended(np.zeros_like(self._attempts.rows))
        self._row_of[attempt_id] = row
        self._ids.append(attempt_id)
        in_prefill, joined = 1, 0.0
        self._attempts.rows[row] = place, law, in_prefill, joins_at, joined, num_tokens, most_tokens
        self._members[place] += 1

    def join(self, attempt_id: AttemptId, now: float, earlier_tokens: int = 0) -> None:
        """Notes that its first token is out: from now on it is in its decode instance's batch. Of its output, so many tokens were made by
        earlier attempts."""
        row, attempts = self._row_of.get(attempt_id), self._attempts
        if row is not None and attempts.in_prefill[row]:
            place = int(attempts.place[row])
            attempts.in_prefill[row] = 0
            attempts.joined[row] = self._produced(place, now) - earlier_tokens
            attempts.prompt_tokens[row] -= earlier_tokens
            attempts.most_tokens[row] += earlier_tokens
            self._instances.decoding[place] += 1

    def remove(self, attempt_id: AttemptId) -> None:
        row, attempts = self._row_of.pop(attempt_id, None), self._attempts
        if row is None:
            return
        place = int(attempts.place[row])
        self._members[place] -= 1
        if not attempts.in_prefill[row]:
            self._instances.decoding[place] -= 1
        last = self._ids.pop()
        if last != attempt_id:
            self._row_of[last] = row
            self._ids[row] = last
            attempts.rows[row] = attempts.rows[len(self._ids)]
        self._free(place)

    def running_tokens(self, now: float) -> Iterator[Floats]:
        """How many tokens each attempt that decodes has had by now: some at a time, between which others may come and go."""
        first = 0
        while len(attempts := self._live()[first : first + _ATTEMPTS_AT_ONCE]):
            instances = self._instances
            produced = instances.produced + (now - instances.paced_at) / instances.pace_s
            yield np.maximum(produced[attempts["place"]] - attempts["joined"], 0.0)[attempts["in_prefill"] == 0]
            first += _ATTEMPTS_AT_ONCE

    def _live(self) -> Rows:
        """The live attempts' rows."""
        return self._attempts.rows[: len(self._ids)]

    def _produced(self, place: int, now: float) -> float:
        """Tokens that an attempt in the batch all the time would have had by now."""
        instances = self._instances
        return float(instances.produced[place] + (now - instances.paced_at[place]) / instances.pace_s[place])

    # ---- looking ahead ----

    def pool(self, now: float, at: float, *, joining: bool) -> ExpectedBatches:
        """The batches at `at` (s, not before `now`), until they are asked for again. Without `joining`, of those only who are in them
        now."""
        live, survival = self._attempts.view[: len(self._ids)], self._lengths.survival
        _native.expect_batches(self._instances.view, live, survival, self._batches.view, now=now, at=at, joining=joining)
        return self._batches

    def outlook(self, batches: ExpectedBatches, joined: InstanceId, num_tokens: int) -> _native.PoolOutlook:
        """The outlook of the pool, once an attempt of `num_tokens` has joined one of its instances."""
        return _native.look_at_pool(self._instances.view, batches.view, place=self._places[joined], num_tokens=num_tokens)

    def instance(self, instance_id: InstanceId, num_tokens: int, now: float, start: float, end: float) -> _native.InstanceOutlook:
        """The outlook of one instance from `start` (s, not before `now`) to `end`, once an attempt of `num_tokens` has joined it."""
        place, attempts, survival = self._places[instance_id], self._live(), self._lengths.survival
        # A batch grows when somebody joins: it is looked at then, and at the start.
        joins_at = attempts["joins_at"]
        joins_at = np.sort(joins_at[(attempts["place"] == place) & (attempts["in_prefill"] > 0) & (joins_at > start) & (joins_at < end)])
        moments = np.concatenate([[start], joins_at[:: len(joins_at) // _MOST_MOMENTS + 1]])
        return _native.look_at_instance(self._instances.view, attempts, survival, moments, place=place, num_tokens=num_tokens, now=now)

    def idle_tbt_ms(self, instance_id: InstanceId, num_tokens: int) -> float:
        """The time between tokens of one instance with nothing but an attempt of `num_tokens`."""
        place, instances = self._places[instance_id], self._instances
        alone_ms = instances.fixed_ms[place] + instances.per_sequence_ms[place] + instances.per_context_token_ms[place] * num_tokens
        return float(alone_ms)

    def tbts_ms(self, batches: ExpectedBatches) -> dict[InstanceId, float]:
        """Time between tokens of each instance that is ready; of an empty one, 0."""
        steps_ms, ready = _native.step_times_ms(self._instances.view, batches.view), self._instances.ready.tolist()
        return {instance_id: steps_ms[place] for instance_id, place in self._places.items() if ready[place]}

    def validate(self, live_ids: Set[AttemptId]) -> None:
        """Asserts that the rows are one for each of `live_ids`, and the counts those of the rows."""
        assert self._row_of.keys() == live_ids, "the forecast counts other attempts than those that live"
        assert len(self._row_of) == len(self._ids)
        assert all(self._ids[row] == attempt_id for attempt_id, row in self._row_of.items())
        attempts, num_places = self._live(), len(self._members)
        places, decoding = attempts["place"], attempts["in_prefill"] == 0
        assert (np.bincount(places, minlength=num_places) == self._members).all()
        assert (np.bincount(places[decoding], minlength=num_places) == self._instances.decoding).all()
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
            self._instances = self._instances.extended(_unused(place))
            self._batches = ExpectedBatches.zeros(len(self._instances))
            self._members = np.concatenate([self._members, np.zeros_like(self._members)])
        self._instances.rows[place] = _unused(1)[0]
        self._places[instance_id] = place
        return place

    def _free(self, place: int) -> None:
        """The place of a forgotten instance is free once no attempt names it."""
        if place in self._gone and not self._members[place]:
            self._gone.remove(place)
            self._free_places.append(place)


def _unused(count: int) -> Rows:
    """Rows of instances of which nothing is known yet."""
    instances = ForecastInstances.zeros(count)
    instances.max_batch[:], instances.pace_s[:] = np.inf, _NEVER_S
    return instances.rows
