"""One instance's engine and node, as the simulator sees them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from springtide.cost import DecodeCost, PrefillCost


class PassModel(Protocol):
    def pass_ms(self, rows: Sequence[tuple[int, int]]) -> float:
        """Milliseconds of one prefill pass over rows of (new tokens, tokens before them)."""
        ...


class StepModel(Protocol):
    def step_ms(self, batch: int, context_tokens: int) -> float:
        """Milliseconds of one decode step of `batch` sequences with `context_tokens` together."""
        ...

    def steps_ms(self, batch: int, context_tokens: int, k: int) -> float:
        """The sum of `step_ms(batch, context_tokens + i * batch)` for i below k."""
        ...


@dataclass(frozen=True, slots=True)
class Hardware:
    """`passes` and `steps` are what the engine takes; `prefill_cost` and `decode_cost` what nodes and Conductor believe it takes."""

    name: str
    num_layers: int
    kv_bytes_per_token: int
    link_bytes_per_s: float
    """What one instance's network interfaces send to others, all together."""
    arena_tokens: int
    """Tokens whose KV the DRAM arena of one instance holds by default."""
    device_tokens: int
    """Tokens whose KV fits in the accelerators' memory of a decode instance beside the weights."""
    max_batch: int
    prefill_cost: PrefillCost
    decode_cost: DecodeCost
    prefill_error: float
    """90th percentile of the relative error of `prefill_cost` over the samples that it is fitted to; `decode_error` likewise."""
    decode_error: float
    passes: PassModel
    steps: StepModel

    def pass_ms(self, rows: Sequence[tuple[int, int]]) -> float:
        """The time of one prefill pass over rows of (new tokens, tokens before them)."""
        return self.passes.pass_ms(rows)

    def step_ms(self, batch: int, context_tokens: int) -> float:
        """The time of one decode step of `batch` sequences with `context_tokens` together."""
        return self.steps.step_ms(batch, context_tokens)

    def mixed_ms(self, rows: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float:
        """The time of one pass over rows as of `pass_ms` and a decode step as of `step_ms` together: weights are read once, and each
        sequence is a token more; its attention is that of the step."""
        attention_ms = self.step_ms(batch, context_tokens) - self.step_ms(batch, 0) if batch else 0.0
        return self.pass_ms([*rows, *[(1, 0)] * batch]) + attention_ms

    def steps_ms(self, batch: int, context_tokens: int, k: int) -> float:
        """k consecutive decode steps of the same batch, of which the first finds `context_tokens`."""
        return self.steps.steps_ms(batch, context_tokens, k)

    def steps_begun(self, batch: int, context_tokens: int, at_most: int, elapsed_ms: float) -> int:
        """How many of `at_most` consecutive steps of the same batch have begun after so long: 1 or more."""
        return 1 + bisect_left(range(1, at_most), elapsed_ms, key=lambda k: self.steps_ms(batch, context_tokens, k))


def p90_error(samples: Sequence[tuple[int, int, float]], cost: PrefillCost | DecodeCost) -> float:
    """90th percentile of |predicted / actual - 1| over samples as `cost` was fitted to: (tokens or batch, context, milliseconds)."""
    errors = sorted(abs(cost.predict_ms(size, context) / ms - 1.0) for size, context, ms in samples)
    return errors[int(0.9 * (len(errors) - 1))]
