"""Requests that have nothing in common, at a steady or at an alternating rate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.workload.draft import Draft, arrival_times, lengths
from simulator.workload.options import GeneratorOptions


@dataclass(frozen=True, kw_only=True)
class Poisson(GeneratorOptions):
    """Mean lengths of ArXiv Summarization in the Mooncake paper (arXiv 2407.00079, table 2), whose arrivals are a Poisson process too.
    Their spread and the longest prompt are those of the conversation trace of that project: 12,031 requests, coefficients of variation
    1.31 and 0.73, at most 126,195 tokens."""

    input_tokens: float = 8088.0
    input_cv: float = 1.3
    output_tokens: float = 229.0
    output_cv: float = 0.73
    max_input_tokens: int = 131_072
    max_output_tokens: int = 4096

    def draw(self, rng: np.random.Generator, draft: Draft, rate_per_s: float, duration_s: float) -> None:
        self._add(rng, draft, arrival_times(rng, [0.0, duration_s], [rate_per_s]))

    def _add(self, rng: np.random.Generator, draft: Draft, times_s: list[float]) -> None:
        inputs = lengths(rng, self.input_tokens, self.input_cv, len(times_s), self.max_input_tokens)
        outputs = lengths(rng, self.output_tokens, self.output_cv, len(times_s), self.max_output_tokens)
        for arrival_s, input_tokens, output_tokens in zip(times_s, inputs.tolist(), outputs.tolist(), strict=True):
            draft.add_alone(arrival_s, input_tokens, output_tokens)


@dataclass(frozen=True, kw_only=True)
class Bursts(Poisson):
    """Poisson arrivals whose rate alternates; the mean over a period is the rate asked for. Each period of `period_s` begins with
    `burst_share` of it at `burst_ratio` times the rate of the rest.

    Five minutes of which one is four times as busy is our choice, made so that the queue that builds up in a burst outlasts the
    prefill of one request many times and the calm is long enough to drain it."""

    period_s: float = 300.0
    burst_share: float = 0.2
    burst_ratio: float = 4.0

    def draw(self, rng: np.random.Generator, draft: Draft, rate_per_s: float, duration_s: float) -> None:
        calm = rate_per_s / (self.burst_share * self.burst_ratio + 1.0 - self.burst_share)
        starts = np.arange(0.0, duration_s, self.period_s)
        edges = np.append(np.stack([starts, starts + self.burst_share * self.period_s], axis=1).ravel(), starts[-1] + self.period_s)
        rates = np.tile([calm * self.burst_ratio, calm], len(starts))
        self._add(rng, draft, [time for time in arrival_times(rng, edges.tolist(), rates.tolist()) if time < duration_s])
