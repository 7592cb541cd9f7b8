"""People who chat."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.workload.sessions import SessionOptions


@dataclass(frozen=True, kw_only=True)
class Chat(SessionOptions):
    """Multi-turn chat: one short system prompt for everybody (one block of 512 tokens, as in the conversation trace of the Mooncake
    project), mean lengths of a turn as in ShareGPT (arXiv 2309.06180, figure 11: 161 tokens in, 338 out). Four turns with 30 s of
    reading and typing between them are our choice."""
