"""Measures this machine for the cost models (springtide.cost): a few forward passes on slots that the caller lends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from engine.base import SequenceChunk
from engine.runner import ModelRunner

_LEAST_SAMPLES = 4
"""Taken whatever the budget: one more than the coefficients of a cost model."""
_PREFILL_HALVINGS = 6
_DECODE_STEPS = ((1, 64), (1, 1024), (4, 256), (16, 64), (8, 512), (32, 128), (16, 512))
"""(sequences, context of each)."""


def measure_prefill(runner: ModelRunner, slots: Sequence[int], max_tokens: int, budget_s: float = 2.0) -> list[tuple[int, int, float]]:
    """(new tokens, cached tokens before them, milliseconds) of prefill passes of at most `max_tokens`.

    `slots` are scratch, the caller's before and after, and hold all that is measured. Ends when the next pass would exceed `budget_s`.
    """
    capacity = _capacity(runner, slots)
    most = min(max_tokens, capacity)
    news = sorted({max(1, most >> halvings) for halvings in range(_PREFILL_HALVINGS)})
    fresh = [(new, 0) for new in news]
    cached = [(new, (capacity - new) * share // 4) for new in news for share in (1, 3)]
    candidates = sorted(dict.fromkeys(fresh + cached), key=lambda sample: sample[0] * (sample[0] + sample[1] + 1000))

    def passes() -> Iterable[tuple[tuple[int, int], Callable[[], None]]]:
        for new, before in candidates:
            yield (new, before), _pass(runner, [SequenceChunk([0] * new, before, slots)])

    return [(*sample, ms) for sample, ms in _measure(passes(), budget_s)]


def measure_decode(runner: ModelRunner, slots: Sequence[int], max_batch: int, budget_s: float = 2.0) -> list[tuple[int, int, float]]:
    """(sequences, tokens of context summed over them, milliseconds) of decode steps of at most `max_batch`.

    `slots` are scratch as for `measure_prefill`. The sequences of a batch have their last block to themselves and share the others.
    """
    size = runner.kv_spec.block_tokens
    batches = sorted({(min(batch, max_batch, len(slots)), context) for batch, context in _DECODE_STEPS})

    def passes() -> Iterable[tuple[tuple[int, int], Callable[[], None]]]:
        for batch, wanted in batches:
            context = min(wanted, _capacity(runner, slots))
            blocks = -(-context // size)
            chunks = [SequenceChunk([0], context - 1, [*_rotated(slots, i)[1:blocks], slots[i]]) for i in range(batch)]
            yield (batch, batch * context), _pass(runner, chunks)

    return [(*sample, ms) for sample, ms in _measure(passes(), budget_s)]


def _capacity(runner: ModelRunner, slots: Sequence[int]) -> int:
    if not slots:
        raise ValueError("measuring needs at least one scratch slot")
    return min(len(slots) * runner.kv_spec.block_tokens, runner.model.config.context_length)


def _rotated(slots: Sequence[int], by: int) -> list[int]:
    return [*slots[by:], *slots[:by]]


def _pass(runner: ModelRunner, batch: Sequence[SequenceChunk]) -> Callable[[], None]:
    def run() -> None:
        runner.forward(batch)

    return run


def _measure(passes: Iterable[tuple[tuple[int, int], Callable[[], None]]], budget_s: float) -> list[tuple[tuple[int, int], float]]:
    """The faster of two runs of each pass, after one run of the first to warm up."""
    results: list[tuple[tuple[int, int], float]] = []
    end = time.perf_counter() + budget_s
    for sample, run in passes:
        if not results:
            run()
        if len(results) >= _LEAST_SAMPLES and time.perf_counter() + 2 * results[-1][1] / 1000 > end:
            break
        results.append((sample, min(_milliseconds(run), _milliseconds(run))))
    return results


def _milliseconds(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1000
