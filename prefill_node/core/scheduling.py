"""Which chunks go into the next pass.

Least relative slack, after Medha (arXiv 2409.17264): the time an attempt can still lose before it is late, divided by its own predicted
work. What waits loses slack the faster the shorter it is, so a short prompt soon comes before a million-token one, and nobody starves.
How large chunks are says springtide/chunking.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prefill_node.core.attempt import PrefillAttempt
from springtide.chunking import EPSILON, LEAST_PART, Chunking
from springtide.values import value_class

LEAST_BESIDE = 8
"""Tokens of a chunk that is computed with a decode node's step, though that has no time for it: prompts must come to their ends."""
STRETCH = 3.0
"""An attempt is due when it has taken so many times its own predicted work, or at its objective, whichever is sooner and can still be kept:
with one objective for all lengths, the longest prompt would otherwise always be the most urgent one."""


class WithStep(NamedTuple):
    """A decode node's step that a pass is computed with."""

    spare_ms: float
    """By so much it may be lengthened."""
    slots: Sequence[int] = ()
    """Of all its sequences."""
    idle: bool = False
    """It is of sequences in idle capacity alone: prompts that are, too, may be computed with it."""


@value_class(frozen=True, slots=True)
class ChunkPolicy:
    """Chooses by least relative slack. `chunking`: by what passes lately took."""

    chunking: Chunking

    def work_ms(self, num_tokens: int, computed: int) -> float:
        """Predicted time of computing the rest of a prompt, chunk by chunk."""
        return self.chunking.prompt_ms(num_tokens - computed, computed) if num_tokens > computed else 0.0

    def occupied_ms(self, num_tokens: int, computed: int) -> float:
        """Predicted time for which the rest of a prompt keeps the slowest stage from others."""
        return self.chunking.occupied_ms(num_tokens - computed, computed) if num_tokens > computed else 0.0

    def due_at(self, attempt: PrefillAttempt) -> float:
        """When an attempt is to be computed, whose work is predicted. It has waited since its request arrived at its gateway. Whose client
        reads already has nothing to lose: it waits for the next token from the first moment on."""
        return min(self._due_without_objective(attempt), attempt.objective_at)

    @staticmethod
    def _due_without_objective(attempt: PrefillAttempt) -> float:
        stretch = 0.0 if attempt.request.continues else STRETCH
        return attempt.requested_at + stretch * attempt.work_ms / 1000

    def relative_slack(self, attempt: PrefillAttempt, now: float) -> float:
        """The time that it can still lose, in multiples of its work; or that the most urgent one can of those that await what it
        computes."""
        slack = self._slack(attempt, attempt.launched, now)
        if not attempt.followers:
            return slack
        return min([slack, *(self._slack(one, attempt.launched, now) for one in attempt.awaited_ahead() if one.idle <= attempt.idle)])

    def _slack(self, attempt: PrefillAttempt, launched: int, now: float) -> float:
        """Of one that cannot keep its objective any more, as if it had none: who can still keep theirs go before it."""
        work_ms = self.work_ms(attempt.request.num_tokens, launched)
        lost = now + work_ms / 1000 > attempt.objective_at
        due_at = self._due_without_objective(attempt) if lost else attempt.due_at
        return ((due_at - now) * 1000 - work_ms) / max(attempt.work_ms, 1e-3)

    def choose(
        self, attempts: Iterable[PrefillAttempt], now: float, step: WithStep | None = None, *, awaits: bool = True
    ) -> Sequence[tuple[PrefillAttempt, int]]:
        """Returns the attempts of the next pass with their numbers of tokens, at most `chunk_tokens` in all; empty when nothing can run.
        `step`: what it is computed with, if anything. `awaits`: whether a pass may wait for a prefix that still arrives.

        Attempts in idle capacity run when there is nothing left to launch of any other, in passes of a LEAST_PART: who comes in the middle
        of one waits for its end.

        The most urgent one comes first; others join with their whole rest. When the first one's ends in this pass, they have what it
        leaves; when it does not, they may have up to half, for which its chunk shrinks. An attempt whose prefix still arrives runs
        alone, and only when nothing else can: nobody else's step waits for its slabs.
        """
        candidates = [attempt for attempt in attempts if attempt.phase != "handing-over" and attempt.unlaunched_tokens > 0]
        if not candidates:
            return []
        most_tokens, most_ms, least_tokens = self.chunking.chunk_tokens, self.chunking.budget_ms, self.chunking.least_tokens
        others = [attempt for attempt in candidates if not attempt.idle]
        if step is not None:
            candidates = candidates if step.idle else others
            most_ms, least_tokens = min(most_ms, step.spare_ms), min(least_tokens, LEAST_BESIDE)
        elif not others:
            most_tokens, most_ms = least_tokens, most_ms / LEAST_PART
        runnable = [attempt for attempt in others or candidates if attempt.runnable]
        order = sorted(runnable, key=lambda attempt: self.relative_slack(attempt, now)) if len(runnable) > 1 else runnable
        ready = [attempt for attempt in order if not attempt.fetching]
        if not ready:
            if not awaits:
                return []
            return [(attempt, self._chunk(attempt, most_tokens, most_ms)) for attempt in order[:1]]
        first, others = ready[0], ready[1:]
        alone = self._chunk(first, most_tokens, most_ms, least_tokens)
        if not others:
            return [(first, alone)]
        alone_ms = self.chunking.own_ms(alone, first.launched)
        if alone == first.unlaunched_tokens:
            return [(first, alone), *self._joining(others, most_tokens - alone, most_ms - alone_ms)]
        gaining = [attempt for attempt in others if self._gains(attempt, first, alone_ms)]
        joining = self._joining(gaining, most_tokens // 2, most_ms / 2)
        taken = sum(num_tokens for _, num_tokens in joining)
        taken_ms = sum(self.chunking.own_ms(num_tokens, attempt.launched) for attempt, num_tokens in joining)
        return [(first, self._chunk(first, most_tokens - taken, most_ms - taken_ms, least_tokens)), *joining]

    def pass_ms(self, chosen: Iterable[tuple[PrefillAttempt, int]]) -> float:
        """Predicted time of a pass of these, which have not been launched yet, through all stages."""
        return self.chunking.cost.fixed_ms + sum(self.chunking.own_ms(num_tokens, attempt.launched) for attempt, num_tokens in chosen)

    def _joining(self, attempts: Iterable[PrefillAttempt], tokens: int, budget_ms: float) -> list[tuple[PrefillAttempt, int]]:
        """The ones of these whose whole rest fits, one after another."""
        joining = []
        for attempt in attempts:
            rest = attempt.unlaunched_tokens
            rest_ms = self.chunking.own_ms(rest, attempt.launched)
            if rest <= tokens and rest_ms <= budget_ms + EPSILON:
                joining.append((attempt, rest))
                tokens, budget_ms = tokens - rest, budget_ms - rest_ms
        return joining

    def _gains(self, attempt: PrefillAttempt, first: PrefillAttempt, alone_ms: float) -> bool:
        """Whether it gains more slack by joining, relative to its work, than `first` loses, which would otherwise have a pass of so long
        alone."""
        rest_ms = self.chunking.own_ms(attempt.unlaunched_tokens, attempt.launched)
        return alone_ms * first.work_ms >= rest_ms * attempt.work_ms

    def _chunk(self, attempt: PrefillAttempt, tokens: int, budget_ms: float, least_tokens: int | None = None) -> int:
        """How many of its tokens the next chunk has: as many as `tokens` and the time allow, though not too few, and none beyond those that
        are awaited."""
        if attempt.followers and not attempt.fetching:
            tokens = min([tokens, *(one.shared_tokens - attempt.launched for one in attempt.awaited_ahead())])
        return min(attempt.unlaunched_tokens, self.chunking.next_chunk(attempt.launched, tokens, budget_ms, least_tokens))
