"""The decode pool's load at a later moment (arXiv 2407.00079, section 7.4): who will have joined it by then, and who will have left.

The paper lets every request decode for the same time. Here each attempt still counts at the later moment with the probability that its
output goes on until then, given how far it is: by the lengths of recent outputs, at its instance's pace.
"""

from __future__ import annotations

import math
from collections.abc import Container, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conductor.core.output_lengths import OutputLengths
from springtide.cost import DecodeCost
from springtide.ids import AttemptId, InstanceId

Floats = NDArray[np.float64]

_NEVER_S = 1e9
"""Pace of an instance of which nothing is known yet: no token comes."""
_MOST_MOMENTS = 16
"""At which one instance's load is looked at."""


@dataclass(frozen=True, slots=True)
class Batches:
    """What each decode instance of the pool (a row) is expected to have in its batch."""

    attempts: Floats
    context_tokens: Floats
    step_variance_ms2: Floats
    """Of a step's time, for it is not certain who will be in the batch."""


@dataclass(frozen=True, slots=True)
class InstanceOutlook:
    """Times between tokens of one instance."""

    first_ms: float
    """Expected at the beginning."""
    worst_ms: float
    """The greatest, as in `DecodeForecast.mean_tbt_ms`."""


class DecodeForecast:
    """Live attempts as columns, instances as rows. Looking ahead costs some 40 us for 1,000 attempts on 16 instances."""

    def __init__(self, lengths: OutputLengths) -> None:
        self._lengths = lengths
        # Instances.
        self._rows: dict[InstanceId, int] = {}
        self._gone: set[int] = set()
        """Rows whose instance was forgotten while attempts still name it."""
        self._free_rows: list[int] = []
        self._ready = np.zeros(8, dtype=bool)
        self._reported = np.zeros((2, 8))
        """Attempts in the batch, and their context tokens, by the instance's latest report."""
        self._cost = np.zeros((3, 8))
        self._max_batch = np.full(8, np.inf)
        self._pace_s = np.full(8, _NEVER_S)
        """Seconds between tokens at present."""
        self._produced = np.zeros(8)
        """Tokens that an attempt in the batch all the time would have had by `_paced_at`."""
        self._paced_at = np.zeros(8)
        self._decoding = np.zeros(8, dtype=np.intp)
        self._members = np.zeros(8, dtype=np.intp)
        # Attempts.
        self._columns: dict[AttemptId, int] = {}
        self._ids: list[AttemptId] = []
        self._row = np.zeros(64, dtype=np.intp)
        self._law = np.zeros(64, dtype=np.intp)
        self._in_prefill = np.zeros(64, dtype=bool)
        self._numbers = np.zeros((4, 64))
        """Predicted end of the prefill (s); `_produced` of its instance when it joined; tokens of the prompt; most output tokens."""

    # ---- instances ----

    def report(
        self, instance_id: InstanceId, cost: DecodeCost, max_batch: int, running: int, tokens: int, step_ms: float, now: float
    ) -> None:
        """The instance is ready, and its batch was this. `step_ms`: measured time between tokens, 0 when there is none."""
        row = self._row_of(instance_id)
        self._produced[row] += (now - self._paced_at[row]) / self._pace_s[row]
        self._paced_at[row] = now
        self._reported[:, row] = running, tokens
        self._cost[:, row] = cost.fixed_ms, cost.per_sequence_ms, cost.per_context_token_ms
        self._max_batch[row] = max_batch or np.inf
        pace_ms = step_ms if running and step_ms > 0 else cost.predict_ms(max(running, 1), tokens)
        self._pace_s[row] = max(pace_ms / 1000.0, 1e-6)
        self._ready[row] = True

    def down(self, instance_id: InstanceId) -> None:
        """No member of the pool until it reports again."""
        row = self._rows.get(instance_id)
        if row is not None:
            self._ready[row] = False

    def forget(self, instance_id: InstanceId) -> None:
        row = self._rows.pop(instance_id, None)
        if row is not None:
            self._ready[row] = False
            self._gone.add(row)
            self._free(row)

    def keep_only(self, known: Container[InstanceId]) -> None:
        """Forgets the others that no attempt names: attempts were placed on them, but they never came up, so nobody tells of their end."""
        for instance_id in [name for name, row in self._rows.items() if name not in known and not self._members[row]]:
            self.forget(instance_id)

    # ---- attempts ----

    def place(self, attempt_id: AttemptId, instance_id: InstanceId, num_tokens: int, most_tokens: float, law: int, joins_at: float) -> None:
        """An attempt is in prefill, and predicted to join its decode instance at `joins_at` (s). `law`: see OutputLengths.law."""
        row = self._row_of(instance_id)
        column = len(self._ids)
        if column == len(self._row):
            self._row, self._law, self._in_prefill = (_doubled(a) for a in (self._row, self._law, self._in_prefill))
            self._numbers = _doubled(self._numbers)
        self._columns[attempt_id] = column
        self._ids.append(attempt_id)
        self._row[column], self._law[column], self._in_prefill[column] = row, law, True
        self._numbers[:, column] = joins_at, 0.0, num_tokens, most_tokens
        self._members[row] += 1

    def join(self, attempt_id: AttemptId, now: float) -> None:
        """Its first token is out: from now on it is in its decode instance's batch."""
        column = self._columns.get(attempt_id)
        if column is not None and self._in_prefill[column]:
            row = self._row[column]
            self._in_prefill[column] = False
            self._numbers[1, column] = self._produced[row] + (now - self._paced_at[row]) / self._pace_s[row]
            self._decoding[row] += 1

    def remove(self, attempt_id: AttemptId) -> None:
        column = self._columns.pop(attempt_id, None)
        if column is None:
            return
        row = int(self._row[column])
        self._members[row] -= 1
        if not self._in_prefill[column]:
            self._decoding[row] -= 1
        last = self._ids.pop()
        if last != attempt_id:
            end = len(self._ids)
            self._columns[last] = column
            self._ids[column] = last
            for array in (self._row, self._law, self._in_prefill):
                array[column] = array[end]
            self._numbers[:, column] = self._numbers[:, end]
        self._free(row)

    def running_tokens(self, now: float) -> Floats:
        """How many tokens each attempt that decodes has had by now."""
        live = slice(0, len(self._ids))
        decoding, row = ~self._in_prefill[live], self._row[live]
        produced = self._produced + (now - self._paced_at) / self._pace_s
        return np.asarray(np.maximum(produced[row] - self._numbers[1, live], 0.0)[decoding])

    # ---- looking ahead ----

    def pool(self, now: float, at: float, *, joining: bool) -> Batches:
        """Every row's batch at `at` (s, not before `now`). Without `joining`, of those only that are in it now."""
        columns = slice(0, len(self._ids))
        stay, length = self._expected(columns, now, np.array(at), joining)
        row, rows = self._row[columns], len(self._ready)
        attempts = np.bincount(row, stay, minlength=rows)
        context = np.bincount(row, stay * length, minlength=rows)
        variance = np.bincount(row, self._variance_ms2(row, stay, length), minlength=rows)
        unknown, unknown_context = self._unknown()
        return Batches(attempts + unknown, context + unknown_context, np.asarray(variance, np.float64))

    def mean_tbt_ms(self, batches: Batches, joined: InstanceId, num_tokens: int) -> float:
        """Mean time between tokens over the instances that are ready, once an attempt of `num_tokens` has joined one of them; a standard
        deviation above what is expected, as half of the requests would miss an objective that is expected to be just met."""
        row = self._rows[joined]
        step_ms = self._step_ms(slice(None), batches.attempts, batches.context_tokens)
        step_ms[row] = self._step_ms(row, batches.attempts[row] + 1, batches.context_tokens[row] + num_tokens)
        deviation_ms = math.sqrt(batches.step_variance_ms2[self._ready].sum()) / np.count_nonzero(self._ready)
        return float(step_ms[self._ready].mean()) + deviation_ms

    def expected_tbt_ms(self, batches: Batches, joined: InstanceId, num_tokens: int) -> float:
        """Time between tokens of one instance once an attempt of `num_tokens` has joined it."""
        row = self._rows[joined]
        return float(self._step_ms(row, batches.attempts[row] + 1, batches.context_tokens[row] + num_tokens))

    def mean_idle_tbt_ms(self, joined: InstanceId, num_tokens: int) -> float:
        """The same with nobody else there."""
        more_ms = self.idle_tbt_ms(joined, num_tokens) - self._cost[0, self._rows[joined]]
        return float(self._cost[0, self._ready].mean() + more_ms / self._ready.sum())

    def instance(self, instance_id: InstanceId, num_tokens: int, now: float, start: float, end: float) -> InstanceOutlook:
        """Of one instance from `start` (s, not before `now`) to `end`, once an attempt of `num_tokens` has joined it."""
        row = self._rows[instance_id]
        columns = np.flatnonzero(self._row[: len(self._ids)] == row)
        # A batch grows when somebody joins: it is looked at then, and at the start.
        joins_at = np.sort(self._numbers[0, columns[self._in_prefill[columns]]])
        joins_at = joins_at[(joins_at > start) & (joins_at < end)]
        at = np.concatenate([[start], joins_at[:: len(joins_at) // _MOST_MOMENTS + 1]])
        stay, length = self._expected(columns, now, at[:, None], joining=True)
        unknown, unknown_context = self._unknown()
        attempts = 1 + stay.sum(axis=1) + unknown[row]
        context = num_tokens + (stay * length).sum(axis=1) + unknown_context[row]
        expected_ms = self._step_ms(row, attempts, context)
        deviation_ms = np.sqrt(self._variance_ms2(row, stay, length).sum(axis=1))
        return InstanceOutlook(float(expected_ms[0]), float((expected_ms + deviation_ms).max()))

    def idle_tbt_ms(self, instance_id: InstanceId, num_tokens: int) -> float:
        """Of one instance with nothing but an attempt of `num_tokens`."""
        fixed, per_sequence, per_context_token = self._cost[:, self._rows[instance_id]]
        return float(fixed + per_sequence + per_context_token * num_tokens)

    def tbts_ms(self, batches: Batches) -> dict[InstanceId, float]:
        """Time between tokens of each instance that is ready; of an empty one, 0."""
        step_ms = np.where(batches.attempts > 0, self._step_ms(slice(None), batches.attempts, batches.context_tokens), 0.0)
        return {instance_id: float(step_ms[row]) for instance_id, row in self._rows.items() if self._ready[row]}

    def validate(self, live_ids: Set[AttemptId]) -> None:
        """Asserts that the columns are one for each of `live_ids`, and the counts those of the columns."""
        assert self._columns.keys() == live_ids, "the forecast counts other attempts than those that live"
        assert len(self._columns) == len(self._ids)
        assert all(self._ids[column] == attempt_id for attempt_id, column in self._columns.items())
        live, rows = slice(0, len(self._ids)), len(self._ready)
        assert (np.bincount(self._row[live], minlength=rows) == self._members).all()
        assert (np.bincount(self._row[live][~self._in_prefill[live]], minlength=rows) == self._decoding).all()
        rows_told = [*self._rows.values(), *self._gone, *self._free_rows]
        assert sorted(rows_told) == list(range(len(rows_told)))

    def _expected(self, columns: slice | NDArray[np.intp], now: float, at: Floats, joining: bool) -> tuple[Floats, Floats]:
        """[..., columns]: with what probability each attempt is in the batch at `at`, and its context tokens if it is."""
        row, law, in_prefill = self._row[columns], self._law[columns], self._in_prefill[columns]
        joins_at, joined, prompt, most = self._numbers[:, columns]
        pace_s = self._pace_s[row]
        produced = (self._produced + (now - self._paced_at) / self._pace_s)[row]
        done = np.where(in_prefill, 0.0, np.maximum(produced - joined, 0.0))
        more = np.maximum(at - np.where(in_prefill, np.maximum(joins_at, now), now), 0.0) / pace_s
        length = done + more
        stay = self._lengths.survival(law, length) / self._lengths.survival(law, done)
        absent = (joins_at > at) if joining else True
        stay = np.where((in_prefill & absent) | ((length >= most) & (more > 0)), 0.0, stay)
        return stay, prompt + length

    def _variance_ms2(self, row: NDArray[np.intp] | int, stay: Floats, length: Floats) -> Floats:
        """What each attempt adds to the variance of its instance's step."""
        _, per_sequence, per_context_token = self._cost[:, row]
        return np.asarray(stay * (1.0 - stay) * (per_sequence + per_context_token * length) ** 2)

    def _unknown(self) -> tuple[Floats, Floats]:
        """What instances report beyond the attempts that are known here, such as those of a Conductor before this one."""
        running, tokens = self._reported
        unknown = np.maximum(running - self._decoding, 0.0)
        return unknown, unknown * tokens / np.maximum(running, 1.0)

    def _step_ms(self, rows: slice | int, attempts: Floats, context_tokens: Floats) -> Floats:
        """Beyond the largest batch, attempts take turns with the others, which stretches everybody's mean."""
        fixed, per_sequence, per_context_token = self._cost[:, rows]
        turns = np.maximum(attempts / self._max_batch[rows], 1.0)
        return np.asarray(fixed * turns + per_sequence * attempts + per_context_token * context_tokens)

    # ---- rows ----

    def _row_of(self, instance_id: InstanceId) -> int:
        row = self._rows.get(instance_id)
        if row is not None:
            return row
        # Rows in use and free ones are all there are: without a free one, the next row is a new one.
        row = self._free_rows.pop() if self._free_rows else len(self._rows) + len(self._gone)
        if row == len(self._ready):
            self._ready, self._decoding, self._members = (_doubled(a) for a in (self._ready, self._decoding, self._members))
            self._reported, self._cost = _doubled(self._reported), _doubled(self._cost)
            self._max_batch, self._pace_s = _doubled(self._max_batch), _doubled(self._pace_s)
            self._produced, self._paced_at = _doubled(self._produced), _doubled(self._paced_at)
            self._max_batch[row:], self._pace_s[row:] = np.inf, _NEVER_S
        self._ready[row] = False
        self._reported[:, row] = 0.0
        self._cost[:, row] = 0.0
        self._max_batch[row], self._pace_s[row] = np.inf, _NEVER_S
        self._produced[row] = self._paced_at[row] = 0.0
        self._rows[instance_id] = row
        return row

    def _free(self, row: int) -> None:
        """The row of a forgotten instance is free once no attempt names it."""
        if row in self._gone and not self._members[row]:
            self._gone.remove(row)
            self._free_rows.append(row)


def _doubled(array: NDArray[Any]) -> NDArray[Any]:
    """Twice as long in its last dimension, with zeros behind."""
    return np.concatenate([array, np.zeros_like(array)], axis=-1)
