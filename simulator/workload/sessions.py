"""Sessions: each prompt is the one before it, the output that followed, and something new."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.workload.draft import Draft, arrival_times, lengths, positive
from simulator.workload.options import GeneratorOptions
from simulator.workload.request import ID_TYPE, block_count, filled_by_output
from springtide.errors import ConfigError

_WARM_UP_SESSIONS = 5.0
"""How many mean sessions long the time is that is played before the workload begins. With a number of steps that is geometric, less
than 1% of sessions are longer."""


@dataclass(frozen=True, kw_only=True)
class SessionOptions(GeneratorOptions):
    """A workload is cut out of a service that has been running: at its beginning there are sessions in progress, so the rate is even
    from the first second on. The next step comes a pause after the answer, which is taken to be written at `output_token_s` a token:
    where the simulated cluster is slower, a step may come before the one ahead of it has ended. A session ends before a prompt
    would be longer than `max_input_tokens`."""

    prefixes: int = 1
    """How many different beginnings there are; each session has one of them, all equally likely."""
    prefix_tokens: int = 512
    steps: float = 4.0
    """Mean of a geometric distribution: after each step a session goes on with the same probability."""
    first_tokens: float = 161.0
    """Mean length of what follows the prefix in the first prompt of a session."""
    new_tokens: float = 161.0
    """Mean length of what is new in each prompt after the first."""
    new_cv: float = 1.3
    output_tokens: float = 338.0
    output_cv: float = 0.73
    pause_s: float = 30.0
    pause_cv: float = 1.0
    output_token_s: float = 0.05
    max_input_tokens: int = 131_072
    max_output_tokens: int = 4096

    @classmethod
    def may_be_0(cls) -> frozenset[str]:
        return super().may_be_0() | {"prefix_tokens", "pause_s", "output_token_s"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise ConfigError(f"steps of this workload should be a number not below 1, not {self.steps!r}", param="steps")

    def draw(self, rng: np.random.Generator, draft: Draft, rate_per_s: float, duration_s: float) -> None:
        warm_up_s = _WARM_UP_SESSIONS * self.steps * (self.pause_s + self.output_tokens * self.output_token_s)
        starts = arrival_times(rng, [-warm_up_s, duration_s], [rate_per_s / self.steps])
        counts = rng.geometric(1.0 / self.steps, len(starts))
        ends = np.cumsum(counts)
        total = int(counts.sum())
        chosen = rng.integers(self.prefixes, size=len(starts)).tolist()
        firsts = lengths(rng, self.first_tokens, self.new_cv, len(starts), self.max_input_tokens)
        news = lengths(rng, self.new_tokens, self.new_cv, total, self.max_input_tokens)
        news[ends - counts] = firsts
        outputs = lengths(rng, self.output_tokens, self.output_cv, total, self.max_output_tokens)
        pauses = positive(rng, self.pause_s, self.pause_cv, total) if self.pause_s else np.zeros(total)
        gaps = pauses + outputs * self.output_token_s
        shared = [draft.take_ids(self.prefix_tokens // draft.block_tokens) for _ in range(self.prefixes)]
        for start_s, prefix, end, count in zip(starts, chosen, ends.tolist(), counts.tolist(), strict=True):
            part = slice(end - count, end)
            _add_session(draft, start_s, duration_s, self, shared[prefix], news[part], outputs[part], gaps[part])


def _add_session(
    draft: Draft,
    start_s: float,
    duration_s: float,
    options: SessionOptions,
    shared: Sequence[int],
    news: np.ndarray[tuple[int], np.dtype[np.int64]],
    outputs: np.ndarray[tuple[int], np.dtype[np.int64]],
    gaps: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> None:
    """The steps of one session that arrive from 0 to `duration_s`."""
    size = draft.block_tokens
    before = np.cumsum(outputs) - outputs
    inputs = options.prefix_tokens + np.cumsum(news) + before
    arrivals = start_s + np.cumsum(gaps) - gaps
    steps = [
        step
        for step in zip(arrivals.tolist(), inputs.tolist(), outputs.tolist(), strict=True)
        if 0.0 <= step[0] < duration_s and step[1] <= options.max_input_tokens
    ]
    if not steps:
        return
    # The session's tokens are one line, of which every prompt is a beginning: its full blocks are counted along it once, for all steps.
    _, last_input, last_output = steps[-1]
    line = array(ID_TYPE, [*shared, *draft.take_ids(block_count(last_input + last_output, size) - len(shared))])
    for arrival_s, input_tokens, output_tokens in steps:
        full = input_tokens // size
        filled = filled_by_output(input_tokens, output_tokens, size)
        blocks = line[:full]
        if input_tokens % size:
            # What is partial here is full, and so other KV, in the next prompt.
            blocks = blocks + array(ID_TYPE, draft.take_ids(1))
        draft.add(arrival_s, input_tokens, output_tokens, blocks, range(line[full], line[full] + filled) if filled else ())


@dataclass(frozen=True, kw_only=True)
class Agents(SessionOptions):
    """Agents: eight kinds, each with a long system prompt and tools; a task is many short steps, the results of tools between them.

    Chosen so that prompts and outputs are about as long on average as in the tool and agent trace of the Mooncake project (FAST'25:
    8,596 tokens in, 182 out); how these come about (a prefix of 4,096 tokens, 10 steps, 260 tokens a result, 2 s for a tool) is our
    choice."""

    prefixes: int = 8
    prefix_tokens: int = 4096
    steps: float = 10.0
    first_tokens: float = 500.0
    new_tokens: float = 260.0
    output_tokens: float = 182.0
    pause_s: float = 2.0


@dataclass(frozen=True, kw_only=True)
class Chat(SessionOptions):
    """Multi-turn chat: one short system prompt for everybody (one block of 512 tokens, as in the conversation trace of the Mooncake
    project), mean lengths of a turn as in ShareGPT (arXiv 2309.06180, figure 11: 161 tokens in, 338 out). Four turns with 30 s of
    reading and typing between them are our choice."""
