"""The decode pool's batches at a moment to come, with numpy.

`conductor._native` does the same attempt by attempt in C, to the same digit, in a tenth of the time.
"""

from __future__ import annotations

import math

import numpy as np

from conductor.core.types.estimates import Floats, Ints

INSTANCE_FIGURES = 11
(
    READY,
    RUNNING,
    CONTEXT_TOKENS,
    FIXED_MS,
    PER_SEQUENCE_MS,
    PER_CONTEXT_TOKEN_MS,
    MAX_BATCH,
    PACE_S,
    PRODUCED,
    PACED_AT,
    DECODING,
) = range(INSTANCE_FIGURES)
"""Rows of `instances`. READY: 1 or 0. RUNNING and CONTEXT_TOKENS: of the batch, by the latest report. Then the cost model. PACE_S: seconds
between tokens at present. PRODUCED: tokens that an attempt in the batch all the time would have had by PACED_AT (s). DECODING: the attempts
that are known here and in the batch."""

ATTEMPT_FIGURES = 5
JOINS_AT, JOINED, PROMPT_TOKENS, MOST_TOKENS, IN_PREFILL = range(ATTEMPT_FIGURES)
"""Rows of `attempts`. JOINS_AT: predicted end of the prefill (s). JOINED: its instance's PRODUCED when it joined. IN_PREFILL: 1 or 0."""

BATCH_FIGURES = 3
ATTEMPTS, BATCH_TOKENS, STEP_VARIANCE_MS2 = range(BATCH_FIGURES)
"""Rows of `batches`. ATTEMPTS and BATCH_TOKENS (of context): expected. STEP_VARIANCE_MS2: of a step's time, for it is not certain who will
be in the batch."""

BINS_PER_ROOT = 4.0
"""Bins of `survival` grow with the square root of the length."""


def expected(
    instances: Floats, attempts: Floats, places: Ints, laws: Ints, survival: Floats, now: float, at: Floats, joining: bool
) -> tuple[Floats, Floats]:
    """[..., attempts]: with what probability each is in the batch at `at` (s, not before `now`), and its context tokens if it is. Without
    `joining`, of those only that are in it now.

    `instances` [INSTANCE_FIGURES, instances], `attempts` [ATTEMPT_FIGURES, attempts], `places` and `laws` [attempts]: each one's column of
    the instances and row of `survival` [laws, bins].
    """
    joins_at, joined, prompt, most, in_prefill = attempts
    waiting = in_prefill > 0
    pace_s = instances[PACE_S, places]
    produced = instances[PRODUCED, places] + (now - instances[PACED_AT, places]) / pace_s
    done = np.where(waiting, 0.0, np.maximum(produced - joined, 0.0))
    more = np.maximum(at - np.where(waiting, np.maximum(joins_at, now), now), 0.0) / pace_s
    length = done + more
    stay = share_longer(survival, laws, length) / share_longer(survival, laws, done)
    absent = (joins_at > at) if joining else True
    stay = np.where((waiting & absent) | ((length >= most) & (more > 0)), 0.0, stay)
    return stay, prompt + length


def share_longer(survival: Floats, laws: Ints, tokens: Floats) -> Floats:
    """The share of outputs under each law that are longer than so many tokens, [..., attempts] and not negative."""
    bins = np.minimum(np.sqrt(tokens) * BINS_PER_ROOT, survival.shape[1] - 1).astype(np.int64)
    shares: Floats = survival[laws, bins]
    return shares


def step_variance_ms2(instances: Floats, places: Ints | int, stay: Floats, context_tokens: Floats) -> Floats:
    """What each attempt adds to the variance of its instance's step."""
    per_sequence, per_context_token = instances[PER_SEQUENCE_MS, places], instances[PER_CONTEXT_TOKEN_MS, places]
    step_ms = per_sequence + per_context_token * context_tokens
    return np.asarray(stay * (1.0 - stay) * (step_ms * step_ms))


def unknown(instances: Floats) -> tuple[Floats, Floats]:
    """Attempts and context tokens that instances report beyond the attempts that are known here, such as those of a Conductor before
    this one."""
    attempts = np.maximum(instances[RUNNING] - instances[DECODING], 0.0)
    return attempts, attempts * instances[CONTEXT_TOKENS] / np.maximum(instances[RUNNING], 1.0)


def step_ms(instances: Floats, columns: slice | int, attempts: Floats, context_tokens: Floats) -> Floats:
    """Attempts beyond the largest batch wait for a place in it."""
    own = instances[:, columns]
    turns = np.maximum(attempts / own[MAX_BATCH], 1.0)
    return np.asarray(own[FIXED_MS] + (own[PER_SEQUENCE_MS] * attempts + own[PER_CONTEXT_TOKEN_MS] * context_tokens) / turns)


def pool(
    instances: Floats,
    attempts: Floats,
    places: Ints,
    laws: Ints,
    survival: Floats,
    batches: Floats,
    count: int,
    now: float,
    at: float,
    joining: bool,
) -> None:
    """Fills `batches` [BATCH_FIGURES, instances] with what each instance is expected to have in its batch at `at`. Of the attempts, the
    first `count` are there; the rest as `expected`."""
    places, num_instances = places[:count], instances.shape[1]
    stay, length = expected(instances, attempts[:, :count], places, laws[:count], survival, now, np.array(at), joining)
    more, more_tokens = unknown(instances)
    batches[ATTEMPTS] = np.bincount(places, stay, num_instances) + more
    batches[BATCH_TOKENS] = np.bincount(places, stay * length, num_instances) + more_tokens
    batches[STEP_VARIANCE_MS2] = np.bincount(places, step_variance_ms2(instances, places, stay, length), num_instances)


def with_one_more(instances: Floats, batches: Floats, place: int, num_tokens: int) -> tuple[float, float, float]:
    """Milliseconds between tokens once an attempt of `num_tokens` has joined the instance at `place`: expected there; in the mean over the
    instances that are ready, a standard deviation above what is expected; and in the mean with nobody else anywhere."""
    attempts, context_tokens = batches[ATTEMPTS].copy(), batches[BATCH_TOKENS].copy()
    attempts[place] += 1
    context_tokens[place] += num_tokens
    steps_ms = step_ms(instances, slice(None), attempts, context_tokens)
    ready = instances[READY] > 0
    count = max(int(np.count_nonzero(ready)), 1)
    deviation_ms = math.sqrt(_sum(batches[STEP_VARIANCE_MS2][ready])) / count
    own_ms = instances[PER_SEQUENCE_MS, place] + instances[PER_CONTEXT_TOKEN_MS, place] * num_tokens
    idle_ms = (_sum(instances[FIXED_MS][ready]) + own_ms) / count
    return float(steps_ms[place]), _sum(steps_ms[ready]) / count + deviation_ms, float(idle_ms)


def _sum(values: Floats) -> float:
    """One after another, as in C."""
    return float(np.add.accumulate(values)[-1]) if len(values) else 0.0
