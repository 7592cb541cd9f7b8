"""An attempt at the decode node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from decode_node.core.actions import StepRow
from decode_node.core.drafting import Foretold, Guessing, PromptLookup
from engine.batch import SamplingRow
from springtide.blocks import block_keys, blocks_for
from springtide.ids import AttemptId, BlockKey, NodeId, Slot
from springtide.protocol.starts import DecodeStart, PrefillStart, Request
from springtide.protocol.timings import DecodeTimes

DecodePhase = Literal["waiting", "awaiting", "reserving", "ingesting", "prefilling", "loading", "running"]
"""Where an attempt is. waiting: for slots, unasked or refused. awaiting: for what another attempt
computes of its prompt, which is computed here, too. reserving: the store has been asked. ingesting: holds slots that the prefill
side fills. prefilling: holds slots, and its prompt is computed by this very engine. loading: its prompt is in its
slots, and is brought to the device that computes, or will be when there is room. running: takes part in steps, once it has a place in the
batch and a slot for its next token."""

Growth = Literal["none", "asked", "refused"]


@dataclass(slots=True)
class Tally:
    """What the time of a traced attempt went into. Times are the node's."""

    slots_at: float = 0.0
    prompt_at: float = 0.0
    """When its prompt was in its slots."""
    steps: int = 0
    steps_ms: float = 0.0
    longest_step_ms: float = 0.0

    def stepped(self, elapsed_ms: float, repeated: int) -> None:
        """It took part in so many steps that took so long each."""
        self.steps += repeated
        self.steps_ms += elapsed_ms * repeated
        self.longest_step_ms = max(self.longest_step_ms, elapsed_ms)


@dataclass(slots=True, eq=False)
class DecodeAttempt:
    """One attempt, from its start until its slots are given back."""

    session: int
    start: DecodeStart
    arrived_at: float
    most_blocks: int
    """How many blocks it will ever need: the last token of the output is never fed back."""
    expected_blocks: int
    """What its prompt and its predicted output need."""
    phase: DecodePhase = "waiting"
    lease_until: float = float("inf")
    """When the prefill side is given up, while ingesting."""
    slots: tuple[Slot, ...] = ()
    shared_blocks: int = 0
    """Of its prompt, that another one computes, while it is awaiting, or has committed since."""
    awaited_s: float = 0.0
    """How long it has been awaiting; while it is, less the time at which that began."""
    growth: Growth = "none"
    quota_used: bool = False
    """It was refused for its tenant's quota, not for the pool."""
    asked_at: float = 0.0
    """When the store was asked for the slots of its prompt."""
    answer_due_at: float = 0.0
    """When the store is taken for hung, in observed time (springtide.clock), while it is reserving or has asked for growth."""
    starved_since: float | None = None
    """Since when it sits out steps because its slot was refused."""
    prompt_ids: Sequence[int] = ()
    ready_since: float | None = None
    """Since when a prompt that was handed over has been here, as long as the first step has not been launched."""
    output_ids: list[int] = field(default_factory=list)
    """Everything since the original prompt. The last one's KV is not computed yet."""
    ahead: int = 0
    """Steps in flight that it takes part in."""
    drafted_ahead: int = 0
    """The most tokens that are guessed of it in these."""
    last_drafted: int = 0
    """The same of the one that was launched last."""
    guessing: Guessing = field(default_factory=Guessing)
    lookup: PromptLookup | None = None
    """What guesses, once it runs: of the steps, as `fed_ids` are."""
    foretold: Foretold | None = None
    """Where it succeeds another attempt."""
    fed_ids: list[int] = field(default_factory=list)
    """The same as `output_ids`, with what the steps in flight have added by now: theirs alone (see actions.StepRow)."""
    sampling: SamplingRow = field(init=False)
    """What the sampler knows of it, the same for every step; there is one once it runs."""
    committed_blocks: int = 0
    last_key: BlockKey | None = None
    """The key of the last committed block, or the namespace: the parent of the next one."""
    tally: Tally | None = None
    """Where it is traced."""

    request: Request = field(init=False)
    attempt_id: AttemptId = field(init=False)
    idle: bool = field(init=False)
    """Whether it is in idle capacity: it gives way to all that are not."""

    def __post_init__(self) -> None:
        self.request = self.start.request
        self.attempt_id, self.idle = self.request.attempt_id, self.request.idle
        if self.request.traced:
            self.tally = Tally()

    @classmethod
    def of(cls, session: int, start: DecodeStart, arrived_at: float, block_tokens: int) -> DecodeAttempt:
        """The attempt that a gateway has ordered."""
        request = start.request
        most_blocks = blocks_for(request.num_prompt_tokens + request.params.max_tokens - 1, block_tokens)
        expected_tokens = request.num_tokens + max(1, round(start.expected_tokens) - 1)
        return cls(
            session,
            start,
            arrived_at,
            most_blocks=most_blocks,
            expected_blocks=min(blocks_for(expected_tokens, block_tokens), most_blocks),
        )

    @property
    def objective_ms(self) -> float:
        """For the time between tokens; inf: it has none."""
        return self.start.tbt_slo_ms if self.start.tbt_slo_ms > 0 else math.inf

    def left_ms(self, now: float) -> float:
        """Of its objective, for a step that is launched now."""
        waited_s = 0.0 if self.ready_since is None else now - self.ready_since
        return self.objective_ms - 1000 * waited_s

    @property
    def inlined(self) -> bool:
        """Its prompt is computed here."""
        return self.start.inlined

    @property
    def waits(self) -> bool:
        """It waits for room, as long as it takes: nobody has begun its prefill."""
        return self.start.waits or self.start.inlined

    @property
    def prompt(self) -> PrefillStart:
        """The order of its prompt, which is computed here, from now on."""
        return PrefillStart(self.request, "", NodeId(""), self.start.ttft_budget_ms, self.start.sources)

    @property
    def requested_at(self) -> float:
        """When the request arrived at its gateway."""
        return self.arrived_at - self.request.age_s

    @property
    def place_in_order(self) -> tuple[bool, float]:
        """The less, the sooner its turn: those in idle capacity are last, and of others the oldest is first."""
        return self.idle, self.requested_at

    @property
    def has_begun(self) -> bool:
        """Whether its prompt is here: it runs, or is about to."""
        return self.phase in ("loading", "running")

    @property
    def context_tokens(self) -> int:
        """Tokens in the sequence, the last one's KV not being computed yet; before it begins, those of its prompt and the first token."""
        if self.has_begun:
            return self.request.num_prompt_tokens + len(self.output_ids)
        return self.request.num_tokens + 1

    @property
    def planned_tokens(self) -> int:
        """Tokens whose KV there is after the next step that is launched, at least: without guesses."""
        return self.context_tokens + self.ahead

    @property
    def most_planned_tokens(self) -> int:
        """The same where all guesses of the steps in flight are right."""
        return self.planned_tokens + self.drafted_ahead

    def draft_room(self, block_tokens: int) -> int:
        """For how many guesses in the next step it has slots, and could have use."""
        in_slots = len(self.slots) * block_tokens - self.most_planned_tokens
        return min(in_slots, self.request.params.max_tokens - len(self.output_ids) - self.ahead - 1)

    @property
    def num_foretold(self) -> int:
        """How many tokens the next step that is launched may find foretold."""
        return 0 if self.foretold is None else self.foretold.expected(len(self.output_ids) + self.ahead)

    @property
    def continues(self) -> bool:
        """A token is still to come after the steps in flight, unless one of theirs ends it."""
        return len(self.output_ids) + self.ahead < self.request.params.max_tokens

    def growth_blocks(self, block_tokens: int) -> int:
        """How many slots it is expected to want beyond those that it has or, before it has any, will have first. An output that is
        longer than was predicted is expected to go on for a quarter of what it has."""
        held = len(self.slots) or self.request.num_blocks
        if held < self.expected_blocks:
            return self.expected_blocks - held
        return min(len(self.output_ids) // (4 * block_tokens), self.most_blocks - held)

    def lacks_slot(self, block_tokens: int) -> bool:
        """It must sit out the next step that is launched."""
        return len(self.slots) * block_tokens < self.most_planned_tokens

    def wants_slot(self, block_tokens: int) -> bool:
        """The next step that is launched writes into its last slot, and it will go on beyond it. Guesses are as many as in the last one."""
        held, drafted = len(self.slots), max(self.last_drafted, self.num_foretold)
        return (held - 1) * block_tokens < self.most_planned_tokens + drafted and held < self.most_blocks

    def begin(self, first_token: int, block_tokens: int, *, loads: bool = False) -> None:
        """Begins to generate: its prompt is in its slots, the full blocks committed. `loads`: it is not yet where steps compute."""
        request = self.request
        self.prompt_ids = request.token_ids[: request.num_prompt_tokens]
        self.fed_ids = [*request.token_ids[request.num_prompt_tokens :], first_token]
        self.sampling = SamplingRow(request.params, self.prompt_ids, self.fed_ids)
        self.phase = "loading" if loads else "running"
        self.output_ids = [*request.token_ids[request.num_prompt_tokens :], first_token]
        self.committed_blocks = request.num_tokens // block_tokens
        self.last_key = request.keys[-1] if request.keys else request.namespace

    def row(self, most_drafted: int) -> StepRow:
        """The row that it has in the next step that is launched."""
        guesses = most_drafted > 0 and not self.num_foretold
        if guesses and self.lookup is None:
            self.lookup = PromptLookup(self.prompt_ids, self.fed_ids, self.request.params.max_tokens)
        return StepRow(
            self.attempt_id,
            self.planned_tokens - 1,
            self.slots,
            self.sampling,
            self.fed_ids,
            most_drafted,
            self.lookup if guesses else None,
            None if guesses else self.foretold,
        )

    def times(self, tally: Tally, now: float) -> DecodeTimes:
        """What its time went into so far."""
        age_ms, slots_ms, prompt_ms = (max(0.0, at - self.arrived_at) * 1000 for at in (now, tally.slots_at, tally.prompt_at))
        return DecodeTimes(self.attempt_id, age_ms, slots_ms, prompt_ms, tally.steps, tally.steps_ms, tally.longest_step_ms)

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
        """The tokens of the prompt and the output at positions [begin, end)."""
        prompt = self.request.num_prompt_tokens
        return [*self.request.token_ids[begin : min(end, prompt)], *self.output_ids[max(begin - prompt, 0) : max(end - prompt, 0)]]
