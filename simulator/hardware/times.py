"""Times of prefill passes and decode steps as tables and slopes: a simulation asks for millions of them, at a microsecond or less each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PassTimes:
    """A prefill pass: `by_tokens_ms[n]` for all but the attention of n new tokens in all rows together, and for each row's attention
    the longer of what its pairs (a new token and one before it, or itself) take to compute and what its context takes to read.

    `by_tokens_ms` has at least two entries, the first 0 (no token, no pass); beyond its end it goes on as its last step does.
    """

    by_tokens_ms: tuple[float, ...] = field(repr=False)
    per_pair_ms: float
    per_read_token_ms: float

    def pass_ms(self, rows: Sequence[tuple[int, int]]) -> float:
        """Rows of (new tokens, tokens before them)."""
        per_pair_ms, per_read_token_ms = self.per_pair_ms, self.per_read_token_ms
        tokens = 0
        attention_ms = 0.0
        for new, before in rows:
            tokens += new
            compute_ms = new * (before + new * 0.5) * per_pair_ms
            read_ms = (before + new) * per_read_token_ms
            attention_ms += compute_ms if compute_ms > read_ms else read_ms
        return _at(self.by_tokens_ms, tokens) + attention_ms


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A decode step: `by_batch_ms[n]` for n sequences, and their contexts together at so much a token; see PassTimes for the table."""

    by_batch_ms: tuple[float, ...] = field(repr=False)
    per_context_token_ms: float

    def step_ms(self, batch: int, context_tokens: int) -> float:
        """`context_tokens`: of all the sequences in the batch together."""
        return _at(self.by_batch_ms, batch) + self.per_context_token_ms * context_tokens

    def steps_ms(self, batch: int, context_tokens: int, k: int) -> float:
        """k steps, each of which leaves every sequence one token longer: the sum of `step_ms(batch, context_tokens + i * batch)`."""
        grown_tokens = batch * (k * (k - 1) // 2)
        return k * _at(self.by_batch_ms, batch) + self.per_context_token_ms * (k * context_tokens + grown_tokens)


def _at(table_ms: tuple[float, ...], index: int) -> float:
    last = len(table_ms) - 1
    if index <= last:
        return table_ms[index]
    return table_ms[last] + (index - last) * (table_ms[last] - table_ms[last - 1])
