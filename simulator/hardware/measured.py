"""The machine that `springtide profile` measured, as hardware of the simulator."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from simulator.hardware.hardware import Hardware, p90_error
from simulator.hardware.times import PassTimes, StepTimes
from springtide.cost import DecodeCost, PrefillCost, pairs
from springtide.errors import ConfigError
from springtide.modelinfo import KVSpec

Samples = Sequence[tuple[int, int, float]]
"""(new tokens, cached tokens, ms) of passes, (batch, context tokens of all of it, ms) of steps."""
_ROUNDS = 50


def from_profile(path: Path, *, spec: KVSpec, link_bytes_per_s: float, arena_tokens: int, max_batch: int) -> Hardware:
    """The hardware by the file of `springtide profile`; what it has no word of, the caller says. `spec`: the model's KV.

    The nodes' cost models are those that the file's own coefficients are: fitted to all samples alike. The times follow the samples
    closer: a level for each chunk size and batch, and one slope for the attention. An engine on a CPU computes on the arena itself, so
    it holds as many tokens.

    Raises ConfigError when the file cannot be read or has fewer samples than a fit needs.
    """
    name, prefill, decode = _read(path)
    prefill_cost, decode_cost = PrefillCost.fit(prefill), DecodeCost.fit(decode)
    by_tokens_ms, per_pair_ms = _levels([(new, pairs(new, cached), ms) for new, cached, ms in prefill])
    by_batch_ms, per_context_token_ms = _levels([(batch, float(context), ms) for batch, context, ms in decode])
    return Hardware(
        name=name,
        num_layers=spec.layers,
        kv_bytes_per_token=spec.bytes_per_token,
        link_bytes_per_s=link_bytes_per_s,
        arena_tokens=arena_tokens,
        device_tokens=arena_tokens,
        max_batch=max_batch,
        prefill_cost=prefill_cost,
        decode_cost=decode_cost,
        prefill_error=p90_error(prefill, prefill_cost),
        decode_error=p90_error(decode, decode_cost),
        passes=PassTimes(by_tokens_ms, per_pair_ms, per_read_token_ms=0.0),
        steps=StepTimes(by_batch_ms, per_context_token_ms),
    )


def _levels(samples: Sequence[tuple[int, float, float]]) -> tuple[tuple[float, ...], float]:
    """From (size, work, ms): a table of levels by size and the slope with which `level[size] + slope * work` has the least sum of
    relative errors, not of their squares, so that a sample which something else on the machine disturbed does not draw it along (by
    reweighted least squares, Schlossmacher 1973). Between sizes it is interpolated, below the least it stays level, and it never falls.
    """
    sizes = sorted({size for size, *_ in samples})
    ms = np.array([sample[2] for sample in samples])
    design = np.zeros((len(samples), len(sizes) + 1))
    for row, (size, work, _) in enumerate(samples):
        design[row, sizes.index(size)], design[row, -1] = 1.0, work
    design /= ms[:, None]
    scale = np.abs(design).max(axis=0)
    weights = np.ones(len(samples))
    solution = np.zeros(len(sizes) + 1)
    for _ in range(_ROUNDS):
        solution = np.linalg.lstsq(design / scale * weights[:, None], weights, rcond=None)[0] / scale
        weights = 1.0 / np.sqrt(np.maximum(np.abs(design @ solution - 1.0), 1e-4))
    levels = np.maximum.accumulate(np.maximum(solution[:-1], 0.0))
    table = np.interp(np.arange(1, sizes[-1] + 1), sizes, levels)
    return (0.0, *table.tolist()), max(0.0, float(solution[-1]))


def _read(path: Path) -> tuple[str, Samples, Samples]:
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"profile: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"profile: {path} is not JSON: {error}") from None
    try:
        prefill, decode = ([_sample(sample) for sample in document["samples"][phase]] for phase in ("prefill", "decode"))
        name = str(document["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"profile: {path} is not what `springtide profile` writes: {error!r}") from None
    for phase, samples in (("prefill", prefill), ("decode", decode)):
        if len({size for size, *_ in samples}) < 2 or len(samples) < 3:
            raise ConfigError(f"profile: {phase!r} in {path} needs at least 3 samples of at least 2 sizes, not {len(samples)} in all")
    return name, prefill, decode


def _sample(document: dict[str, float]) -> tuple[int, int, float]:
    tokens, context, ms = int(document["tokens"]), int(document["context"]), float(document["median_ms"])
    if tokens < 1 or context < 0 or not (math.isfinite(ms) and ms > 0):
        raise ValueError(f"{document} is no sample")
    return tokens, context, ms
