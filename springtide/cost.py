"""Cost models: how long a prefill or a decode step takes. Fitted to measurements, used by the nodes, the Conductor and the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """`fixed + per_token * new + per_pair * pairs`, where pairs = new * (cached + new / 2) counts the attention of every new token
    to all before it. Milliseconds."""

    fixed_ms: float
    per_token_ms: float
    per_pair_ms: float

    def predict_ms(self, new_tokens: int, cached_tokens: int = 0) -> float:
        return self.fixed_ms + self.per_token_ms * new_tokens + self.per_pair_ms * pairs(new_tokens, cached_tokens)

    @classmethod
    def fit(cls, samples: Sequence[tuple[int, int, float]]) -> PrefillCost:
        """From (new tokens, cached tokens, milliseconds); see `_fit`."""
        rows = [(1.0, float(new), pairs(new, cached)) for new, cached, _ in samples]
        return cls(*_fit(rows, [ms for *_, ms in samples]))


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Time of a decode step: `fixed + per_sequence * batch + per_context_token * context`, context summed over the batch. Milliseconds."""

    fixed_ms: float
    per_sequence_ms: float
    per_context_token_ms: float

    def predict_ms(self, batch: int, context_tokens: int) -> float:
        return self.fixed_ms + self.per_sequence_ms * batch + self.per_context_token_ms * context_tokens

    @classmethod
    def fit(cls, samples: Sequence[tuple[int, int, float]]) -> DecodeCost:
        """From (batch, context tokens in the batch, milliseconds); see `_fit`."""
        rows = [(1.0, float(batch), float(context)) for batch, context, _ in samples]
        return cls(*_fit(rows, [ms for *_, ms in samples]))


def pairs(new_tokens: int, cached_tokens: int) -> float:
    return new_tokens * (cached_tokens + new_tokens / 2)


def _fit(rows: Sequence[Sequence[float]], times_ms: Sequence[float]) -> list[float]:
    """Least squares of the relative error with coefficients >= 0: those that come out negative are dropped, one after another.

    Raises ValueError when there are fewer samples than coefficients.
    """
    if len(rows) < 3:
        raise ValueError(f"a cost model needs at least 3 samples, not {len(rows)}")
    design = np.asarray(rows, dtype=np.float64)
    observed = np.asarray(times_ms, dtype=np.float64)
    weights = 1.0 / np.maximum(observed, 1e-6)
    active = list(range(design.shape[1]))
    coefficients = np.zeros(design.shape[1])
    while active:
        columns = design[:, active] * weights[:, None]
        scale = np.maximum(np.abs(columns).max(axis=0), 1e-30)
        solution = np.linalg.lstsq(columns / scale, observed * weights, rcond=None)[0] / scale
        if (solution >= 0).all():
            coefficients[active] = solution
            break
        active.pop(int(np.argmin(solution * scale)))
    return [float(c) for c in coefficients]
