"""How a prompt is cut into passes, and what these take together: prefill nodes cut by it, the Conductor predicts by it.

All passes take about the same time, so that who arrives in the middle of one waits no longer at a long prompt's end, where attention is
dear, than at its beginning: chunks become smaller the further they are (adaptive chunking, Medha, arXiv 2409.17264).
"""

from __future__ import annotations

from dataclasses import field
from math import ceil, sqrt

from springtide.cost import PrefillCost, pairs
from springtide.values import value_class

LEAST_PART = 8
"""A chunk is at least this part of `chunk_tokens`: what each pass costs beside its tokens must not outweigh what others gain."""
MOST_FIXED = 0.05
"""Nor may it be more than this share of a pass, for the sake of those who might come."""
ROUND_TO, ROUND_FROM = 16, 128
"""Tokens, of chunks that are cut short: matrix products like few and even shapes. Of smaller chunks too much would be cut off."""
EPSILON = 1e-6
"""Of a token, or of a pass: what counts as whole."""


@value_class(frozen=True, slots=True)
class Chunking:
    """`chunk_ms`: how long a pass should take at most; None for as long as `chunk_tokens` take with nothing before them, or longer where
    the fixed part of the cost is large.

    `conductor/native/estimating.c` has the arithmetic of `prompt_ms` once more, over many instances, to the same digit.
    """

    cost: PrefillCost
    chunk_tokens: int
    chunk_ms: float | None = None
    budget_ms: float = field(init=False)
    """The time for the tokens of a pass."""
    least_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        if self.chunk_ms is not None:
            budget_ms = self.chunk_ms - self.cost.fixed_ms
        else:
            budget_ms = max(self.own_ms(self.chunk_tokens, 0), (1 / MOST_FIXED - 1) * self.cost.fixed_ms)
        object.__setattr__(self, "budget_ms", budget_ms)
        object.__setattr__(self, "least_tokens", max(1, self.chunk_tokens // LEAST_PART))

    def own_ms(self, new_tokens: int, cached_tokens: int) -> float:
        """The time of a pass, beside its fixed part."""
        return self.cost.per_token_ms * new_tokens + self.cost.per_pair_ms * pairs(new_tokens, cached_tokens)

    def next_chunk(self, cached_tokens: int, tokens: int, budget_ms: float, least_tokens: int | None = None) -> int:
        """The most tokens after `cached_tokens` that `tokens` and the time allow, though not too few: `least_tokens`, None for those of all
        chunks."""
        fitting = min(tokens, self._fitting(cached_tokens, budget_ms))
        if ROUND_FROM <= fitting < tokens:
            fitting -= fitting % ROUND_TO
        return min(tokens, max(fitting, self.least_tokens if least_tokens is None else least_tokens))

    def prompt_ms(self, new_tokens: int, cached_tokens: int) -> float:
        """The time of the passes of `new_tokens` >= 1 after `cached_tokens`: the first takes its way through all stages, each further one
        comes out as long after the one before it as the slowest stage takes."""
        first_tokens = min(new_tokens, self.next_chunk(cached_tokens, self.chunk_tokens, self.budget_ms))
        first_ms = self.cost.predict_ms(first_tokens, cached_tokens)
        return self.occupied_ms(new_tokens, cached_tokens) + (1.0 - self.cost.slowest_share) * first_ms

    def occupied_ms(self, new_tokens: int, cached_tokens: int) -> float:
        """How long such a prompt keeps the slowest stage from others."""
        own_ms = self.own_ms(new_tokens, cached_tokens)
        return self.cost.slowest_share * (own_ms + self._passes(new_tokens, own_ms) * self.cost.fixed_ms)

    def _passes(self, new_tokens: int, own_ms: float) -> int:
        """As many as the time, which all of them use up, or the number of tokens asks for. Without counting chunk by chunk: a Conductor
        asks for every instance."""
        at_least, at_most = -(-new_tokens // self.chunk_tokens), -(-new_tokens // self.least_tokens)
        budget_ms = self.budget_ms
        by_time = ceil(min(own_ms / budget_ms - EPSILON, at_most)) if budget_ms > 0 else at_most
        return max(at_least, by_time)

    def _fitting(self, cached_tokens: int, budget_ms: float) -> int:
        """The most tokens after `cached_tokens` that take `budget_ms`, beside the fixed part of the pass; at most `chunk_tokens`."""
        if budget_ms <= 0:
            return 0
        # per_pair / 2 * n^2 + linear * n = budget
        linear = self.cost.per_token_ms + self.cost.per_pair_ms * cached_tokens
        divisor = linear + sqrt(linear * linear + 2 * self.cost.per_pair_ms * budget_ms)
        return self.chunk_tokens if divisor <= 0 else int(min(self.chunk_tokens, 2 * budget_ms / divisor + EPSILON))
