"""One attempt on its way through the prefill group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from node_runtime.requests import Request
from prefill_node.core.events import Start

Phase = Literal["waiting", "acquiring", "running", "handing-over"]
"""waiting: for slots, unasked or refused. acquiring: the store has been asked. running: holds slots, has prompt left to compute.
handing-over: the first token is out, the slots are the store's again, which goes on pushing."""


@dataclass(slots=True)
class Attempt:
    """Block counts are from the prompt's start. `reused_blocks`, `computed`, `pushed_blocks` and `committed_blocks` fall back when the
    fetch of the prefix is truncated, and otherwise only rise."""

    start: Start
    arrived_at: float
    phase: Phase = "waiting"
    slots: tuple[int, ...] = ()
    local_blocks: int = 0
    reused_blocks: int = 0
    """Local ones and those fetched from the sources."""
    layers_arrived: int = 0
    """Of the remote part of the prefix."""
    asked_at: float = 0.0
    """When the store was asked for slots and what can be fetched."""
    fetching: bool = False
    stalled: bool = False
    """The pass that waited for the prefix was interrupted; the store's FetchTruncated is on its way."""
    pushed_layers: int = 0
    """Of the remote part of the prefix."""
    computed: int = 0
    """Tokens whose KV is in the slots, or arriving in them."""
    pushed_blocks: int = 0
    committed_blocks: int = 0
    due_at: float = 0.0
    work_ms: float = 0.0
    """Predicted when the slots were acquired: what its slack is relative to."""
    first_pass_at: float | None = None
    compute_ms: float = 0.0
    fetch_ms: float = 0.0
    """From the order until all that was fetched had arrived; 0 when nothing was."""

    @property
    def attempt_id(self) -> str:
        return self.start.request.attempt_id

    @property
    def request(self) -> Request:
        return self.start.request

    @property
    def session(self) -> int:
        return self.start.session

    @property
    def runnable(self) -> bool:
        """It may take part in a pass; while `fetching`, only alone."""
        return self.phase == "running" and not self.stalled and (not self.fetching or self.layers_arrived > 0)

    @property
    def remaining_tokens(self) -> int:
        return self.request.num_tokens - self.computed

    def fetched(self, now: float) -> None:
        """Nothing more of the prefix will arrive."""
        if self.fetching:
            self.fetch_ms = (now - self.asked_at) * 1000
        self.fetching = self.stalled = False

    def truncate(self, valid_blocks: int, block_tokens: int) -> None:
        """Only so many blocks of the prefix are valid; what follows is computed here."""
        self.reused_blocks = min(self.reused_blocks, valid_blocks)
        self.local_blocks = min(self.local_blocks, valid_blocks)
        self.computed = min(self.computed, valid_blocks * block_tokens)
        self.pushed_blocks = min(self.pushed_blocks, valid_blocks)
        self.committed_blocks = min(self.committed_blocks, valid_blocks)
