"""Which chunks go into the next pass.

Least relative slack, after Medha (arXiv 2409.17264): the time an attempt can still lose before it is late, divided by its own predicted
work. What waits loses slack the faster the shorter it is, so a short prompt soon comes before a million-token one, and nobody starves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prefill_node.core.attempt import Attempt
from springtide.cost import PrefillCost

STRETCH = 3.0
"""An attempt is due when it has taken so many times its own predicted work, or at its objective, whichever is sooner: with one
objective for all lengths, the longest prompt would otherwise always be the most urgent one."""


@dataclass(frozen=True, slots=True)
class Policy:
    cost: PrefillCost
    chunk_tokens: int

    def work_ms(self, num_tokens: int, computed: int) -> float:
        """Predicted time of computing the rest of a prompt, chunk by chunk."""
        remaining = num_tokens - computed
        if remaining <= 0:
            return 0.0
        extra_passes = -(-remaining // self.chunk_tokens) - 1
        return self.cost.predict_ms(remaining, computed) + extra_passes * self.cost.fixed_ms

    def due_at(self, arrived_at: float, work_ms: float, ttft_budget_ms: float) -> float:
        allowed_ms = STRETCH * work_ms
        if ttft_budget_ms > 0:
            allowed_ms = min(allowed_ms, ttft_budget_ms)
        return arrived_at + allowed_ms / 1000

    def relative_slack(self, attempt: Attempt, now: float) -> float:
        left_ms = (attempt.due_at - now) * 1000 - self.work_ms(attempt.request.num_tokens, attempt.computed)
        return left_ms / max(attempt.work_ms, 1e-3)

    def choose(self, attempts: Iterable[Attempt], now: float) -> Sequence[tuple[Attempt, int]]:
        """The attempts of the next pass with their numbers of tokens, at most `chunk_tokens` in all; empty when nothing can run.

        The most urgent one takes what it can use; others join when their whole rest fits beside it. An attempt whose prefix still
        arrives runs alone, and only when nothing else can: nobody else's step waits for its slabs.
        """
        order = sorted((attempt for attempt in attempts if attempt.runnable), key=lambda attempt: self.relative_slack(attempt, now))
        ready = [attempt for attempt in order if not attempt.fetching]
        if not ready:
            return [(attempt, min(attempt.remaining_tokens, self.chunk_tokens)) for attempt in order[:1]]
        first = ready[0]
        chosen = [(first, min(first.remaining_tokens, self.chunk_tokens))]
        budget = self.chunk_tokens - chosen[0][1]
        for attempt in ready[1:]:
            if attempt.remaining_tokens <= budget:
                chosen.append((attempt, attempt.remaining_tokens))
                budget -= attempt.remaining_tokens
        return chosen
