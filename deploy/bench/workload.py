"""What a benchmark sends, and when. The same seed gives the same requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LOWEST_TOKEN_ID = 64
"""Special tokens mostly have the lowest ids; prompts have none."""


@dataclass(frozen=True, slots=True)
class BenchWorkload:
    """`requests` prompts of `prompt_tokens` random tokens each, of which the first `shared_prefix` (0 to 1) are the same in all.

    They come as a Poisson process of `rate` requests a second, or, without one, as fast as at most `concurrency` at a time allow.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    shared_prefix: float
    concurrency: int | None
    rate: float | None
    vocab_size: int
    seed: int

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("a workload has either a concurrency or a rate")
        for name in ("requests", "prompt_tokens", "output_tokens", "concurrency", "rate"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, not {value}")
        if not 0 <= self.shared_prefix <= 1:
            raise ValueError(f"shared_prefix must be between 0 and 1, not {self.shared_prefix}")
        if self.vocab_size <= LOWEST_TOKEN_ID:
            raise ValueError(f"vocab_size must be above {LOWEST_TOKEN_ID}, not {self.vocab_size}")

    def prompts(self) -> list[list[int]]:
        random = np.random.default_rng(self.seed)
        shared = round(self.prompt_tokens * self.shared_prefix)
        prefix = random.integers(LOWEST_TOKEN_ID, self.vocab_size, shared).tolist()
        own = random.integers(LOWEST_TOKEN_ID, self.vocab_size, (self.requests, self.prompt_tokens - shared))
        return [prefix + row for row in own.tolist()]

    def arrivals_s(self) -> list[float]:
        """When each request is sent, from the start; all 0 with a concurrency."""
        if self.rate is None:
            return [0.0] * self.requests
        gaps = np.random.default_rng([self.seed, 1]).exponential(1 / self.rate, self.requests)
        return [float(at) for at in np.cumsum(gaps) - gaps[0]]
