"""The decode pool's batches at a moment to come, with numpy."""

from __future__ import annotations

import math

import numpy as np

from conductor.core.types.arrays import Floats, Ints, Rows

BINS_PER_ROOT = 4.0


def share_longer(survival: Floats, laws: Ints, tokens: Floats) -> Floats:
    """The share of outputs under each law that are longer than so many tokens, [..., attempts] and not negative."""
    bins = np.minimum(np.sqrt(tokens) * BINS_PER_ROOT, survival.shape[1] - 1).astype(np.int64)
    shares: Floats = survival[laws, bins]
    return shares


def expected(instances: Rows, attempts: Rows, survival: Floats, now: float, at: Floats, joining: bool) -> tuple[Floats, Floats]:
    """[..., attempts]: with what probability each is in the batch at `at`, and its context tokens if it is."""
    waiting, laws, own = attempts["in_prefill"] > 0, attempts["law"], instances[attempts["place"]]
    produced = own["produced"] + (now - own["paced_at"]) / own["pace_s"]
    done = np.where(waiting, 0.0, np.maximum(produced - attempts["joined"], 0.0))
    more = np.maximum(at - np.where(waiting, np.maximum(attempts["joins_at"], now), now), 0.0) / own["pace_s"]
    length = done + more
    stay = share_longer(survival, laws, length) / share_longer(survival, laws, done)
    absent = (attempts["joins_at"] > at) if joining else True
    stay = np.where((waiting & absent) | ((length >= attempts["most_tokens"]) & (more > 0)), 0.0, stay)
    return stay, attempts["prompt_tokens"] + length


def step_variance_ms2(own: Rows, stay: Floats, context_tokens: Floats) -> Floats:
    """What each attempt adds to the variance of its instance's step."""
    step_ms = own["per_sequence_ms"] + own["per_context_token_ms"] * context_tokens
    return np.asarray(stay * (1.0 - stay) * (step_ms * step_ms))


def unknown(instances: Rows) -> tuple[Floats, Floats]:
    """Attempts and context tokens that instances report beyond the attempts that are known here."""
    attempts = np.maximum(instances["running"] - instances["decoding"], 0.0)
    return attempts, attempts * instances["context_tokens"] / np.maximum(instances["running"], 1.0)


def step_ms(own: Rows, attempts: Floats, context_tokens: Floats) -> Floats:
    turns = np.maximum(attempts / own["max_batch"], 1.0)
    return np.asarray(own["fixed_ms"] + (own["per_sequence_ms"] * attempts + own["per_context_token_ms"] * context_tokens) / turns)


def expect_batches(instances: Rows, attempts: Rows, survival: Floats, into: Rows, *, now: float, at: float, joining: bool) -> None:
    places, count = attempts["place"], len(instances)
    stay, context_tokens = expected(instances, attempts, survival, now, np.array(at), joining)
    more, more_tokens = unknown(instances)
    into["attempts"] = np.bincount(places, stay, count) + more
    into["context_tokens"] = np.bincount(places, stay * context_tokens, count) + more_tokens
    into["step_variance_ms2"] = np.bincount(places, step_variance_ms2(instances[places], stay, context_tokens), count)


def step_times_ms(instances: Rows, batches: Rows) -> list[float]:
    steps_ms = step_ms(instances, batches["attempts"], batches["context_tokens"])
    return np.where(batches["attempts"] > 0, steps_ms, 0.0).tolist()  # type: ignore[no-any-return]


def look_at_pool(instances: Rows, batches: Rows, *, place: int, num_tokens: int) -> tuple[float, float, float]:
    attempts, context_tokens = batches["attempts"].copy(), batches["context_tokens"].copy()
    attempts[place] += 1
    context_tokens[place] += num_tokens
    steps_ms, ready, joined = step_ms(instances, attempts, context_tokens), instances["ready"] > 0, instances[place]
    count = max(int(np.count_nonzero(ready)), 1)
    deviation_ms = math.sqrt(_sum(batches["step_variance_ms2"][ready])) / count
    own_ms = joined["per_sequence_ms"] + joined["per_context_token_ms"] * num_tokens
    idle_ms = (_sum(instances["fixed_ms"][ready]) + own_ms) / count
    return float(steps_ms[place]), _sum(steps_ms[ready]) / count + deviation_ms, float(idle_ms)


def look_at_instance(
    instances: Rows, attempts: Rows, survival: Floats, moments: Floats, *, place: int, num_tokens: int, now: float
) -> tuple[float, float]:
    attempts, own = attempts[attempts["place"] == place], instances[place]
    stay, context_tokens = expected(instances, attempts, survival, now, moments[:, None], joining=True)
    more, more_tokens = (column[place] for column in unknown(instances))
    in_batch, tokens = 1 + stay.sum(axis=1) + more, num_tokens + (stay * context_tokens).sum(axis=1) + more_tokens
    expected_ms = step_ms(own, in_batch, tokens)
    deviation_ms = np.sqrt(step_variance_ms2(own, stay, context_tokens).sum(axis=1))
    return float(expected_ms[0]), float((expected_ms + deviation_ms).max())


def _sum(values: Floats) -> float:
    """One after another, as in C."""
    return float(np.add.accumulate(values)[-1]) if len(values) else 0.0
