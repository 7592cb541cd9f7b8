"""An attempt on its way through the prefill group."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine.batch import SamplingRow, Scoring, SequenceChunk
from node_runtime.pass_tally import PassTally
from prefill_node.core.actions import PassRow
from springtide.ids import AttemptId, Slot
from springtide.protocol.outputs import PrefillDone, PromptLogprobs, TokenOutput
from springtide.protocol.starts import PrefillStart, Request

PrefillPhase = Literal["waiting", "awaiting", "acquiring", "running", "handing-over"]
"""Where an attempt is. waiting: for slots, unasked or refused. awaiting: for what another one computes of its prompt
(prefill_node.core.shared_prefixes). acquiring: the store has been asked. running: holds slots, has prompt left
to compute. handing-over: the first token is out, the slots are the store's again, which goes on pushing."""


@dataclass(slots=True)
class PrefillAttempt:
    """One attempt, from its start until the store has ended its hand-over. Block counts are from the prompt's start. `reused_blocks`,
    `computed`, `pushed_blocks` and `committed_blocks` fall back when the fetch of the prefix is truncated, and otherwise only rise;
    `launched` falls back to `computed` when a pass comes to nothing."""

    session: int
    start: PrefillStart
    arrived_at: float
    phase: PrefillPhase = "waiting"
    slots: tuple[Slot, ...] = ()
    local_blocks: int = 0
    reused_blocks: int = 0
    """Local ones and those fetched from the sources."""
    layers_arrived: int = 0
    """How many of the remote part of the prefix are there."""
    asked_at: float = 0.0
    """When the store was asked for slots and what can be fetched."""
    answer_due_at: float = 0.0
    """When a store that has not answered is taken for hung, in observed time (springtide.clock)."""
    idle_before_s: float = 0.0
    """How long the group had been idle, in all, until then."""
    fetching: bool = False
    stalled: bool = False
    """The pass that waited for the prefix was interrupted; the store's FetchTruncated is on its way."""
    pushed_layers: int = 0
    """How many of the remote part of the prefix are handed over."""
    computed: int = 0
    """Tokens whose KV is in the slots, in all layers, or arriving in them."""
    launched: int = 0
    """The computed ones, and the tokens of the passes in flight."""
    pushed_blocks: int = 0
    committed_blocks: int = 0
    due_at: float = 0.0
    work_ms: float = 0.0
    """Predicted when the slots were acquired: what its slack is relative to."""
    first_pass_at: float | None = None
    compute_ms: float = 0.0
    fetch_ms: float = 0.0
    """The time from the order until all that was fetched had arrived; 0 when nothing was."""
    fetch_wait_ms: float = 0.0
    """How long its passes waited for that, and no pass at all was in flight; also when nothing came of it."""
    scores: list[PromptLogprobs] = field(default_factory=list)
    """Of its chunks that are computed, where they are wanted."""
    acquired_at: float = 0.0
    """When the store gave it its slots."""
    shared_blocks: int = 0
    """That another one computes, while it is awaiting, or has committed since."""
    awaited_s: float = 0.0
    """How long it has been awaiting; while it is, less the time at which that began."""
    followers: Mapping[AttemptId, PrefillAttempt] = field(default_factory=dict)
    """Those that await what it computes."""
    tally: PassTally | None = None
    """Of its passes, where it is traced."""
    request: Request = field(init=False)
    attempt_id: AttemptId = field(init=False)

    def __post_init__(self) -> None:
        self.request, self.attempt_id = self.start.request, self.start.request.attempt_id
        if self.request.traced:
            self.tally = PassTally(self.arrived_at)

    @property
    def requested_at(self) -> float:
        """When the request arrived at its gateway."""
        return self.arrived_at - self.request.age_s

    @property
    def objective_at(self) -> float:
        """When its first token is to be there at the latest; infinity without an objective."""
        budget_ms = self.start.ttft_budget_ms
        return self.arrived_at + budget_ms / 1000 if budget_ms > 0 else math.inf

    @property
    def idle(self) -> bool:
        """Whether it is in idle capacity: it gives way to all that are not."""
        return self.request.idle

    @property
    def runnable(self) -> bool:
        """Whether it may take part in a pass; while `fetching`, only alone, and in one at a time: each further one would wait for an
        overdue prefix anew."""
        readable = not self.stalled and (not self.fetching or (self.layers_arrived > 0 and self.launched == self.computed))
        return self.phase == "running" and readable and self.unlaunched_tokens > 0

    @property
    def shared_tokens(self) -> int:
        """As `shared_blocks`."""
        return self.shared_blocks * self.request.block_tokens

    def awaited_ahead(self) -> Iterator[PrefillAttempt]:
        """The followers that wait for what is still to be launched of it, or to arrive."""
        return (one for one in self.followers.values() if one.shared_tokens > self.launched or self.fetching)

    @property
    def remaining_tokens(self) -> int:
        """To compute, those apart that another one does."""
        return self.request.num_tokens - (self.shared_tokens if self.phase == "awaiting" else self.computed)

    @property
    def unlaunched_tokens(self) -> int:
        return self.request.num_tokens - self.launched

    def fetched(self, now: float, idle_s: float) -> None:
        """Nothing more of the prefix will arrive. `idle_s`: as `idle_before_s`, until now."""
        if self.fetching:
            self.fetch_ms = (now - self.asked_at) * 1000
            self.fetch_wait_ms += (idle_s - self.idle_before_s) * 1000
        self.fetching = self.stalled = False

    def truncate(self, valid_blocks: int, block_tokens: int) -> None:
        """Only so many blocks of the prefix are valid; what follows is computed here."""
        self.reused_blocks = min(self.reused_blocks, valid_blocks)
        self.local_blocks = min(self.local_blocks, valid_blocks)
        self.computed = self.launched = min(self.computed, valid_blocks * block_tokens)
        self.pushed_blocks = min(self.pushed_blocks, valid_blocks)
        self.committed_blocks = min(self.committed_blocks, valid_blocks)

    def row(self, num_tokens: int) -> PassRow:
        """The row that it has in the next pass that is launched, with so many tokens."""
        request = self.request
        begin, end = self.launched, self.launched + num_tokens
        last = end == request.num_tokens
        scoring = None if request.num_top is None else Scoring(request.token_ids[begin + 1 : end + 1], request.num_top)
        chunk = SequenceChunk(request.token_ids[begin:end], begin, self.slots, wants_logits=last, wants_all=scoring is not None)
        if not last:
            return PassRow(self.attempt_id, chunk, None, scoring)
        prompt, output = request.token_ids[: request.num_prompt_tokens], request.token_ids[request.num_prompt_tokens :]
        return PassRow(self.attempt_id, chunk, SamplingRow(request.params, prompt, output), scoring)

    def done(self, output: TokenOutput, block_tokens: int, bytes_per_block: int, now: float) -> PrefillDone:
        """What its gateway is told when its whole prompt is computed. Queue time lasts until the first pass, compute time is that of its
        passes, fetch time counts when something came of it; what was waited for it counts in any case."""
        assert self.first_pass_at is not None
        fetched_blocks = self.reused_blocks - self.local_blocks
        return PrefillDone(
            output,
            cached_tokens=self.reused_blocks * block_tokens,
            remote_tokens=fetched_blocks * block_tokens,
            queue_ms=(self.first_pass_at - self.arrived_at) * 1000,
            compute_ms=self.compute_ms,
            fetch_ms=self.fetch_ms if fetched_blocks > 0 else 0.0,
            # A pass hears a little later than this process that all is here.
            fetch_wait_ms=min(self.fetch_wait_ms, self.fetch_ms) if fetched_blocks > 0 else self.fetch_wait_ms,
            prompt_logprobs=None if self.request.num_top is None else PromptLogprobs.joined(self.scores),
            times=None if self.tally is None else self.tally.times(now, self.acquired_at, self.asked_at, fetched_blocks * bytes_per_block),
        )
