"""One attempt at the decode node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.base import SamplingRow, SequenceChunk
from node_runtime.requests import Request
from springtide.blocks import block_keys, blocks_for
from springtide.ids import BlockKey

Phase = Literal["waiting", "reserving", "ingesting", "running"]
"""waiting: for slots, unasked or refused. reserving: the store has been asked. ingesting: holds slots that the prefill side fills.
running: takes part in steps, once it has a place in the batch and a slot for its next token."""

Growth = Literal["none", "asked", "refused"]


@dataclass(slots=True)
class Attempt:
    session: int
    request: Request
    tbt_slo_ms: float
    arrived_at: float
    phase: Phase = "waiting"
    lease_until: float = float("inf")
    """While ingesting: when the prefill side is given up."""
    slots: tuple[int, ...] = ()
    growth: Growth = "none"
    starved_since: float | None = None
    """Since when it sits out steps because its slot was refused."""
    prompt_ids: Sequence[int] = ()
    output_ids: list[int] = field(default_factory=list)
    """Everything since the original prompt. The last one's KV is not computed yet."""
    sampling_row: SamplingRow = field(init=False)
    """The same for every step; there is one once it runs."""
    committed_blocks: int = 0
    last_key: BlockKey | None = None
    """Of the last committed block, or the namespace: the parent of the next one."""

    @property
    def attempt_id(self) -> str:
        return self.request.attempt_id

    @property
    def context_tokens(self) -> int:
        """Tokens in the sequence, the last one's KV not being computed yet; before it runs, those of its prompt and the first token."""
        if self.phase == "running":
            return self.request.num_prompt_tokens + len(self.output_ids)
        return self.request.num_tokens + 1

    def needed_blocks(self, block_tokens: int) -> int:
        """That hold the KV of the next step's token too."""
        return blocks_for(self.context_tokens, block_tokens)

    def most_blocks(self, block_tokens: int) -> int:
        """It will ever need: the last token of the output is never fed back."""
        return blocks_for(self.request.num_prompt_tokens + self.request.params.max_tokens - 1, block_tokens)

    def lacks_slot(self, block_tokens: int) -> bool:
        """It must sit out the next step."""
        return len(self.slots) * block_tokens < self.context_tokens

    def wants_slot(self, block_tokens: int) -> bool:
        """It writes into its last slot, and will go on beyond it."""
        held = len(self.slots)
        return (held - 1) * block_tokens < self.context_tokens and held < self.most_blocks(block_tokens)

    def begin(self, first_token: int, block_tokens: int) -> None:
        """Its prompt is in its slots, the full blocks committed by the store."""
        request = self.request
        self.phase = "running"
        self.prompt_ids = request.token_ids[: request.num_prompt_tokens]
        self.output_ids = [*request.token_ids[request.num_prompt_tokens :], first_token]
        self.committed_blocks = request.num_tokens // block_tokens
        self.last_key = request.keys[-1] if request.keys else request.namespace
        self.sampling_row = SamplingRow(request.params, self.prompt_ids, self.output_ids)

    def chunk(self) -> SequenceChunk:
        return SequenceChunk((self.output_ids[-1],), self.context_tokens - 1, self.slots)

    def complete_blocks(self, block_tokens: int) -> tuple[BlockKey, ...]:
        """Counts the blocks that are full by now as committed; returns the keys of those that were not before."""
        first, complete = self.committed_blocks, (self.context_tokens - 1) // block_tokens
        if complete <= first:
            return ()
        self.committed_blocks = complete
        assert self.last_key is not None, "only a sequence that has begun fills blocks"
        keys = block_keys(self.last_key, self._tokens(first * block_tokens, self.committed_blocks * block_tokens), block_tokens)
        self.last_key = keys[-1]
        return tuple(keys)

    def _tokens(self, begin: int, end: int) -> list[int]:
        """Of the prompt and the output, positions [begin, end)."""
        prompt = self.request.num_prompt_tokens
        return [*self.request.token_ids[begin : min(end, prompt)], *self.output_ids[max(begin - prompt, 0) : max(end - prompt, 0)]]
