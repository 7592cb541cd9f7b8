"""Measures this machine for the cost models (springtide.cost): a few forward passes on slots that the caller lends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.batch import SequenceChunk
from engine.runner import ModelRunner

_LEAST_SAMPLES = 4
"""Taken whatever the budget: one more than the coefficients of a cost model."""
_PREFILL_PARTS = (32, 8, 2)
"""Of the longest pass: half of it tells as much as the whole, and leaves time for repeats."""
_MOST_REPEATS = 8
_SHORT_REPEATS = 4
"""Of a part of a pass."""
_BUSY_STRETCH = 2
"""How many times its budget measuring may take where other processes keep the processors busy."""
_DECODE_STEPS = ((1, 64), (1, 1024), (4, 256), (16, 64), (8, 512), (32, 128), (16, 512))
"""(sequences, context of each)."""


def prefill_samples(capacity: int, max_tokens: int) -> list[tuple[int, int]]:
    """(new tokens, cached tokens before them) of passes that tell what prefill costs, the quickest first: of at most `max_tokens`, and of
    `capacity` with what is cached."""
    most = min(max_tokens, capacity)
    news = sorted({max(1, most // parts) for parts in _PREFILL_PARTS})
    samples = {(new, min(before, capacity - new)) for new in news for before in (0, capacity // 2)} | {(news[0], capacity // 4)}
    return sorted(samples, key=lambda sample: sample[0] * (sample[0] + sample[1] + 1000))


def measure_prefill(runner: ModelRunner, slots: Sequence[int], max_tokens: int, budget_s: float = 2.0) -> list[tuple[int, int, float]]:
    """(new tokens, cached tokens before them, milliseconds) of prefill passes of at most `max_tokens`.

    `slots` are scratch, the caller's before and after, and hold all that is measured. Long passes that `budget_s` has no time for are
    left out; on a busy machine it may take up to twice as long.
    """

    def passes() -> Iterable[tuple[tuple[int, int], Callable[[], None]]]:
        for new, before in prefill_samples(_capacity(runner, slots), max_tokens):
            yield (new, before), _pass(runner, [SequenceChunk([0] * new, before, slots)])

    return [(*sample, ms) for sample, ms in _measure(passes(), runner.work_clock, budget_s)]


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

    return [(*sample, ms) for sample, ms in _measure(passes(), runner.work_clock, budget_s)]


def fastest_ms(runner: ModelRunner, run: Callable[[], object]) -> float:
    """The time of the fastest of a few runs of it, which computes with the runner's model."""
    run()  # to warm up
    timed = _Timed((0, 0), run, runner.work_clock)
    for _ in range(_SHORT_REPEATS):
        timed.measure()
    return timed.best_ms


def _capacity(runner: ModelRunner, slots: Sequence[int]) -> int:
    if not slots:
        raise ValueError("measuring needs at least one scratch slot")
    return min(min(len(slots), runner.most_blocks) * runner.kv_spec.block_tokens, runner.model.config.context_length)


def _rotated(slots: Sequence[int], by: int) -> list[int]:
    return [*slots[by:], *slots[:by]]


def _pass(runner: ModelRunner, batch: Sequence[SequenceChunk]) -> Callable[[], None]:
    def run() -> None:
        runner.forward(batch)

    return run


def _measure(
    passes: Iterable[tuple[tuple[int, int], Callable[[], None]]], clock: Callable[[], float], budget_s: float
) -> list[tuple[tuple[int, int], float]]:
    """The fastest run of each pass. Runs of one pass are spread over the whole time, so that a busy moment of the machine, such as other
    processes starting, does not meet all of them."""
    budget = _Budget(clock, budget_s)
    taken: list[_Timed] = []
    for sample, run in passes:
        if not taken:
            run()  # to warm up
        if len(taken) >= _LEAST_SAMPLES and not budget.has_time_for(taken[-1]):
            break
        taken.append(_Timed(sample, run, clock))
        taken[-1].measure()
    for _ in range(_MOST_REPEATS):
        for timed in taken:
            if budget.has_time_for(timed):
                timed.measure()
    return [(timed.sample, timed.best_ms) for timed in taken]


@dataclass(slots=True)
class _Timed:
    """One pass and what has been measured of it."""

    sample: tuple[int, int]
    run: Callable[[], object]
    clock: Callable[[], float]
    """See ModelRunner.work_clock: as long as the machine is not busy it tells the time of the pass, and where it is, other processes' turns
    do not count."""
    best_ms: float = math.inf
    wall_s: float = 0.0
    """Of the last run."""

    def measure(self) -> None:
        began, used = time.perf_counter(), self.clock()
        self.run()
        self.best_ms = min(self.best_ms, (self.clock() - used) * 1000)
        self.wall_s = time.perf_counter() - began


class _Budget:
    """Of the work clock's time, so that a busy machine is measured as often as an idle one, within limits."""

    def __init__(self, clock: Callable[[], float], budget_s: float) -> None:
        self._clock = clock
        self._used_end = clock() + budget_s
        self._wall_end = time.perf_counter() + _BUSY_STRETCH * budget_s

    def has_time_for(self, timed: _Timed) -> bool:
        return self._clock() + timed.best_ms / 1000 <= self._used_end and time.perf_counter() + timed.wall_s <= self._wall_end
