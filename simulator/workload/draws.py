"""Random times and lengths, from a numpy Generator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def arrival_times(rng: np.random.Generator, edges_s: Sequence[float], rates_per_s: Sequence[float]) -> list[float]:
    """Of a Poisson process whose rate is `rates_per_s[i]` from `edges_s[i]` to `edges_s[i + 1]`, in order."""
    expected = np.concatenate(([0.0], np.cumsum(np.diff(edges_s) * rates_per_s)))
    number = rng.poisson(expected[-1])
    # Given their number, the arrivals are independent and spread as the rate is: uniform in the expected number so far.
    times: list[float] = np.interp(np.sort(rng.uniform(0.0, expected[-1], number)), expected, edges_s).tolist()
    return times


def positive(rng: np.random.Generator, mean: float, cv: float, number: int) -> NDArray[np.float64]:
    """Log-normal, with this mean and coefficient of variation; all equal to the mean for a `cv` of 0."""
    variance = np.log1p(cv * cv)
    return rng.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), number)


def lengths(rng: np.random.Generator, mean: float, cv: float, number: int, longest: int) -> NDArray[np.int64]:
    """Numbers of tokens from 1 to `longest`, before that limit with this mean and coefficient of variation."""
    return np.clip(np.rint(positive(rng, mean, cv, number)), 1, longest).astype(np.int64)
