"""Constants of a model from measurements, by least squares of the logarithm of predicted / measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from simulator.hardware.roofline import Floats

_MOST_ROUNDS = 500
_STEP = 1e-6


def fit(model: Callable[[Floats], Floats], start: Sequence[float], measured: Floats) -> Floats:
    """The positive constants with which `model(constants)` comes closest to `measured`, from `start` on (Levenberg 1944, Marquardt 1963).

    Logarithms on both sides: errors count relative to what is measured, and constants of any magnitude are sought alike.
    Raises ValueError when there are fewer measurements than constants, or one is not positive.
    """
    if len(measured) < len(start) or not (measured > 0).all():
        raise ValueError(
            f"{len(start)} constants need as many positive measurements, not {len(measured)} down to {measured.min(initial=0)}"
        )

    def residuals(logs: Floats) -> Floats:
        return np.asarray(np.log(model(np.exp(logs)) / measured))

    logs = np.log(np.asarray(start, dtype=np.float64))
    now = residuals(logs)
    damping = 1e-2
    for _ in range(_MOST_ROUNDS):
        slopes = np.stack([(residuals(logs + _STEP * unit) - now) / _STEP for unit in np.eye(len(logs))], axis=1)
        normal = slopes.T @ slopes
        # At most a factor of e a round: a constant that hardly matters yet would else run away.
        step = np.clip(np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -slopes.T @ now), -1.0, 1.0)
        then = residuals(logs + step)
        gain = now @ now - then @ then
        if gain > 0:
            logs, now, damping = logs + step, then, damping / 3
            if gain < 1e-12 * (now @ now):
                break
        else:
            damping *= 4
            if damping > 1e12:
                break
    return np.exp(logs)


def relative_errors(predicted: Floats, measured: Floats) -> dict[str, float]:
    """Median and 90th percentile of |predicted / measured - 1|."""
    errors = np.abs(predicted / measured - 1.0)
    return {"median": round(float(np.median(errors)), 4), "p90": round(float(np.quantile(errors, 0.9)), 4)}
