"""Programs that call the model step after step."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.workload.sessions import SessionOptions


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
