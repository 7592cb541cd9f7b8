"""Cost models: how long a prefill or a decode step takes. Fitted to measurements, used by the nodes, the Conductor and the simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from springtide.values import value_class

IDLE_STEP_SHARE = 1 / 8
"""Of the objective for the time between tokens: the most that a step with none but sequences in idle capacity takes. Whoever comes in the
middle of one waits for its end."""
_WEIGHT_ABOVE = 0.05
_MOST_ROUNDS = 50


@value_class(frozen=True, slots=True)
class PrefillCost:
    """`fixed + per_token * new + per_pair * pairs`, where pairs = new * (cached + new / 2) counts the attention of every new token
    to all before it. Milliseconds. Raises ValueError, naming the field, when one is no amount."""

    fixed_ms: float
    per_token_ms: float
    per_pair_ms: float
    slowest_share: float = 1.0
    """Of a pass's time, in the slowest of the stages that it goes through one after another; 1 where there is one."""

    def __post_init__(self) -> None:
        _check_amounts(self)
        if not 0 < self.slowest_share <= 1:
            raise ValueError(f"PrefillCost.slowest_share must be above 0 and at most 1, not {self.slowest_share}")

    def predict_ms(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """The time of one pass, through all stages."""
        return self.fixed_ms + self.per_token_ms * new_tokens + self.per_pair_ms * pairs(new_tokens, cached_tokens)

    def scaled(self, factor: float) -> PrefillCost:
        return PrefillCost(factor * self.fixed_ms, factor * self.per_token_ms, factor * self.per_pair_ms, self.slowest_share)

    @classmethod
    def fit(cls, samples: Sequence[tuple[int, int, float]]) -> PrefillCost:
        """The model fitted to (new tokens, cached tokens, milliseconds); see `_fit`."""
        rows = [(1.0, float(new), pairs(new, cached)) for new, cached, _ in samples]
        return cls(*_fit(rows, [ms for *_, ms in samples]))


@value_class(frozen=True, slots=True)
class DecodeCost:
    """Time of a decode step: `fixed + per_sequence * batch + per_context_token * context`, context summed over the batch. Milliseconds.
    Raises ValueError, naming the field, when one is no amount."""

    fixed_ms: float
    per_sequence_ms: float
    per_context_token_ms: float

    def __post_init__(self) -> None:
        _check_amounts(self)

    def predict_ms(self, batch: int, context_tokens: int) -> float:
        return self.fixed_ms + self.per_sequence_ms * batch + self.per_context_token_ms * context_tokens

    def scaled(self, factor: float) -> DecodeCost:
        return DecodeCost(factor * self.fixed_ms, factor * self.per_sequence_ms, factor * self.per_context_token_ms)

    @classmethod
    def fit(cls, samples: Sequence[tuple[int, int, float]]) -> DecodeCost:
        """The model fitted to (batch, context tokens in the batch, milliseconds); see `_fit`."""
        rows = [(1.0, float(batch), float(context)) for batch, context, _ in samples]
        return cls(*_fit(rows, [ms for *_, ms in samples]))


def _check_amounts(cost: PrefillCost | DecodeCost) -> None:
    for name in cost.__dataclass_fields__:
        if not 0 <= getattr(cost, name) < math.inf:
            raise ValueError(f"{type(cost).__name__}.{name} must be finite and not negative, not {getattr(cost, name)}")


def pairs(new_tokens: int, cached_tokens: int) -> float:
    return new_tokens * (cached_tokens + new_tokens / 2)


def _fit(rows: Sequence[Sequence[float]], times_ms: Sequence[float]) -> list[float]:
    """Coefficients >= 0 from least squares of the relative error, in which a sample above the fit hardly counts beside one below it:
    whatever else the machine does makes a measurement longer, never shorter (expectile regression, Newey and Powell 1987).

    Raises ValueError when there are fewer samples than coefficients.
    """
    if len(rows) < 3:
        raise ValueError(f"a cost model needs at least 3 samples, not {len(rows)}")
    design = np.asarray(rows, dtype=np.float64)
    observed = np.maximum(np.asarray(times_ms, dtype=np.float64), 1e-6)
    design = design / observed[:, None]
    weights = np.ones(len(rows))
    for _ in range(_MOST_ROUNDS):
        coefficients = _least_squares(design, weights)
        before, weights = weights, np.where(design @ coefficients < 1.0, _WEIGHT_ABOVE, 1.0)
        if (weights == before).all():
            break
    return [float(c) for c in coefficients]


def _least_squares(design: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The coefficients >= 0 with which `design` [samples, coefficients] comes closest to 1, each sample's square of the error counting by
    its weight. Those that come out negative are dropped, one after another."""
    roots = np.sqrt(weights)
    active = list(range(design.shape[1]))
    coefficients = np.zeros(design.shape[1])
    while active:
        columns = design[:, active] * roots[:, None]
        scale = np.maximum(np.abs(columns).max(axis=0), 1e-30)
        solution = np.linalg.lstsq(columns / scale, roots, rcond=None)[0] / scale
        if (solution >= 0).all():
            coefficients[active] = solution
            break
        active.pop(int(np.argmin(solution * scale)))
    return coefficients


def most_with_idle_ms(others_ms: float, objective_ms: float, slowdown: float) -> float:
    """The most that a step may take with sequences in idle capacity (Terms.idle) in it, which would take `others_ms` without them, 0 when
    there are no others. `objective_ms`: for the time between tokens, 0 for none. `slowdown`: by how much the others may be slower for
    them."""
    objective_ms = objective_ms or math.inf
    return min(others_ms * (1.0 + slowdown), objective_ms) if others_ms > 0 else objective_ms * IDLE_STEP_SHARE
