"""What the gateway's core remembers of a request and of the attempt that runs it, what follows from that, and the limits it keeps to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gateway.events import Generation
from springtide.ids import AttemptId, BlockKey, InstanceId
from springtide.protocol.attempts import NO_ATTEMPT, LiveAttempt, Phase
from springtide.protocol.instances import InstanceRef, Role
from springtide.protocol.outputs import AttemptSign, PrefillDone, TokenOutput
from springtide.protocol.scheduling import Assignment, Terms
from springtide.protocol.starts import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that the core keeps to."""

    max_attempts: int = 6
    """Consecutive attempts that lost a node, without a token from the decode side, after which a request is given up."""
    capacity_wait_s: float = 60.0
    """How long an accepted request, or one in idle capacity, waits for instances or the Conductor to come back."""
    arrival_wait_s: float = 30.0
    """How long a request waits for instances that has not been accepted yet and does not ask for idle capacity alone."""
    scheduler_wait_s: float = 10.0
    """How long such a request waits for the Conductor to come back."""
    asked_per_s: float = 20.0
    """How often all requests together that nobody is there for ask whether somebody has come."""
    crowded_pause_s: float = 0.05
    """Pause before the third attempt that wants for room and did not have to wait for the answer; doubles with each further one. The
    second follows at once, and waits at its decode node."""
    crowded_pause_max_s: float = 1.0
    retry_base_s: float = 0.3
    """Pause before the third attempt without progress; doubles with each further one. The second follows at once."""
    retry_max_s: float = 4.0
    silence_s: float = 3.0
    """A node that has not named an attempt of its own among its signs of life for so long is hung, cut off, or has forgotten it."""
    standstill_s: float = 10.0
    """An attempt that its node names, that does not wait and of which nothing more is computed for so long is stuck. Beyond it, a pass over
    the prompt may take as long as its predicted TTFT, and a step STEPS_AT_A_STANDSTILL times the predicted TBT."""


STEPS_AT_A_STANDSTILL = 20

CLOSE_TOKENS, FAR_TOKENS, MOST_SUCCESSORS, MOST_WAITS = 1, 16, 4, 16
"""A successor that computes tokens one by one takes the attempt's place if it is so few behind; further behind than so many, none does; so
many begin at most; and so many outputs has one that computes several at once."""


class Hashing(Protocol):
    """How the tokens of a generation become block keys."""

    block_tokens: int

    def namespace(self, generation: Generation) -> BlockKey:
        """The root of its keys."""
        ...

    def keys(self, generation: Generation, token_ids: Sequence[int], known: tuple[BlockKey, ...] = ()) -> tuple[BlockKey, ...]:
        """The keys of every full block of these tokens, which are those of its prompt and its output so far. `known`: of the first ones."""
        ...


@dataclass(slots=True)
class Pulse:
    """What one side of an attempt has been heard to do, in the observer's time (springtide.clock)."""

    heard_at: float
    moved_at: float
    """When more was computed than before, or it had to wait."""
    computed_tokens: int = -1

    def move(self, now: float) -> None:
        self.heard_at = self.moved_at = now

    def take(self, sign: AttemptSign, now: float) -> None:
        self.heard_at = now
        if sign.waiting or sign.computed_tokens != self.computed_tokens:
            self.moved_at = now
        self.computed_tokens = sign.computed_tokens


@dataclass(slots=True)
class AttemptState:
    """An attempt that runs."""

    assignment: Assignment
    base: int
    """Output position of its first token."""
    num_tokens: int
    started_at: float
    pulses: dict[Role, Pulse]
    waits: bool = False
    """The decode side has not said yet that it has room; prefill begins then."""
    prefill_open: bool = True
    """The prefill side may still fail it: from its begin until the decode side's first token shows that the hand-over is complete."""
    decode_open: bool = True
    first_token_seen: bool = False
    progressed: bool = False
    """The decode side has delivered."""
    cached_tokens: int = 0
    end: int = field(init=False)
    """Output position of the next token that it is to send: earlier ones may have been sent by another attempt already."""
    sent_from: int = field(init=False)
    """Output position of the first token that the client has from it."""
    held: list[TokenOutput] = field(default_factory=list)
    """Of the decode side, ahead of the first token: that one comes over another connection and may be overtaken."""

    def __post_init__(self) -> None:
        self.end = self.sent_from = self.base

    @property
    def attempt_id(self) -> AttemptId:
        return self.assignment.attempt_id

    @property
    def phase(self) -> Phase:
        return Phase.DECODE if self.first_token_seen else Phase.PREFILL

    def ref_of(self, side: Role) -> InstanceRef:
        return self.assignment.prefill if side is Role.PREFILL else self.assignment.decode

    def instance_of(self, side: Role) -> InstanceId:
        return self.ref_of(side).instance_id

    def owes_word(self, side: Role) -> bool:
        """Of that side it is still to be heard what becomes of the hand-over: its token or an end."""
        return self.decode_open if side is Role.DECODE else self.prefill_open and not self.first_token_seen

    def is_open(self, side: Role) -> bool:
        return self.prefill_open if side is Role.PREFILL else self.decode_open

    @property
    def longest_s(self) -> float:
        """The longest work of a node from one sign of headway to the next."""
        return (self.assignment.predicted_ttft_ms + STEPS_AT_A_STANDSTILL * self.assignment.prediction.tbt_ms) / 1000

    def hung(self, limits: Limits, now: float) -> dict[Role, str]:
        """The sides that are taken to hang, and why, at `now` in the observer's time. Once the first token is out, the prefill side owes no
        sign of life: it may have nothing left to do but hand over, which the stores see to."""
        hung: dict[Role, str] = {}
        for side in Role:
            if not self.is_open(side) or (side is Role.PREFILL and self.first_token_seen):
                continue
            silent_s, still_s = now - self.pulses[side].heard_at, now - self.pulses[side].moved_at
            if silent_s >= limits.silence_s:
                hung[side] = f"{self.instance_of(side)} has not been heard of the attempt for {silent_s:.1f} s"
            elif still_s >= limits.standstill_s and still_s >= limits.standstill_s + self.longest_s:
                hung[side] = f"{self.instance_of(side)} has not got on with the attempt for {still_s:.0f} s"
        return hung

    def close(self, side: Role) -> None:
        """Notes that a side has ended the attempt by itself: it needs no abort."""
        if side is Role.PREFILL:
            self.prefill_open = False
        else:
            self.decode_open = False


@dataclass(slots=True)
class Move:
    """The way of a request that runs to another decode node. A successor of its attempt has the prefix brought there and computes what is
    lacking, while the attempt goes on. When the successor's first token comes, the attempt has gone on by some tokens. They are foretold to
    it: it takes the attempt's place after its first step, if the next one computes as many as it lacks then, and else goes on to catch up.
    Where it comes to them one by one, and they are many, for a long prefix had to be brought, another successor begins at the same place:
    it finds most of it there."""

    asked: AttemptId | None
    """For which the Conductor's answer is awaited; None: the successor runs."""
    attempt: AttemptState | None = None
    """The successor that runs."""
    first: PrefillDone | None = None
    """With its first token."""
    waited: int = 0
    """Outputs that it has had to catch up."""
    successors: int = 0
    behind: int | None = None
    """By how many tokens the successor before it was behind in the end."""

    def begin(self, attempt: AttemptState) -> None:
        """Another successor runs from now on."""
        self.attempt, self.first, self.waited = attempt, None, 0
        self.successors += 1

    def judge(self, behind: int, most_foretold: int) -> Literal["close", "wait", "again", "far"]:
        """What becomes of a successor that has come to a token and is so many behind, of which it computes so many in a step. close: it
        takes the attempt's place. wait: it catches up. again: another begins that is to be closer. far: none does."""
        if behind < 0:
            return "close"
        if most_foretold:
            # Behind the pass of its prompt a step may be launched already that it is not in. From its first step on it is in every one.
            if self.waited and behind <= most_foretold:
                return "close"
            if self.waited < MOST_WAITS:
                self.waited += 1
                return "wait"
        elif behind <= CLOSE_TOKENS:
            return "close"
        before, self.behind = self.behind, behind
        no_closer = before is not None and behind >= before
        if self.successors < MOST_SUCCESSORS and not (no_closer and behind <= FAR_TOKENS):
            return "again"
        return "close" if behind <= FAR_TOKENS else "far"


@dataclass(slots=True)
class RequestState:
    """A request that has not ended. Exactly one of `asked`, `retry_at` and `attempt` is set, or it is in the line for idle capacity: it is
    being scheduled, waits to be, or runs."""

    generation: Generation
    namespace: BlockKey
    block_tokens: int
    arrived_at: float
    accepted: bool
    tokens: list[int] = field(default_factory=list)
    tries: int = 0
    keys: tuple[BlockKey, ...] = ()
    """Of every full block of what was last to be scheduled."""
    asked: AttemptId | None = None
    """The attempt for which the Conductor's answer is awaited."""
    unanswered: bool = False
    """The Conductor was asked but not heard: it may have placed the current try."""
    retry_at: float | None = None
    attempt: AttemptState | None = None
    move: Move | None = None
    """Of that attempt, while it is under way."""
    fruitless: int = 0
    """Consecutive attempts that lost a node and made no progress."""
    crowded_out: int = 0
    """Consecutive attempts that ended for want of room and made no progress: no reason to give up, for there will be room."""
    avoid: tuple[InstanceId, ...] = ()
    refused_at_admission: bool = False
    waiting_since: float | None = None
    """When it was first found that there is nobody to run it; None again once somebody has."""
    cached_tokens: int | None = None
    computed_tokens: int = -1
    """The most that any attempt has been heard to have computed."""
    grown_at: float = 0.0
    """When that was first heard, in the observer's time."""

    @property
    def attempt_id(self) -> AttemptId:
        """The id of the current try: unique, as request ids are."""
        return AttemptId(f"{self.generation.request_id}.{self.tries}")

    def attempt_named(self, attempt_id: AttemptId) -> AttemptState | None:
        """The attempt, or its successor, if it is that one."""
        for attempt in (self.attempt, None if self.move is None else self.move.attempt):
            if attempt is not None and attempt.attempt_id == attempt_id:
                return attempt
        return None

    @property
    def movable(self) -> bool:
        """Its attempt decodes, and is not on its way already."""
        return self.attempt is not None and self.attempt.progressed and self.move is None and not self.generation.terms.idle

    @property
    def token_ids(self) -> Sequence[int]:
        return (*self.generation.prompt_ids, *self.tokens) if self.tokens else self.generation.prompt_ids

    @property
    def scores_prompt(self) -> bool:
        """The prompt's log-probabilities are wanted, and have not come: they come with the first token."""
        return self.generation.sampling.prompt_logprobs is not None and not self.tokens

    def terms_left(self, now: float) -> Terms | None:
        """The request's terms with what is left of them at `now`; None when its deadline has passed."""
        return self.generation.terms.after(self._age_ms(now))

    def ttft_budget_ms(self, assignment: Assignment, now: float) -> float:
        """The time that prefill may take from now on."""
        if self.tokens or not assignment.ttft_slo_ms:
            # The client of a continuation waits between two tokens: no slack beyond the work itself.
            return assignment.predicted_ttft_ms
        return max(0.0, assignment.ttft_slo_ms - (now - self.arrived_at) * 1000)

    def request(self, attempt_id: AttemptId, now: float, *, traces: bool) -> Request:
        """What both nodes of an attempt are to know of it."""
        return Request(
            attempt_id=attempt_id,
            request_id=self.generation.request_id,
            tenant=self.generation.tenant,
            token_ids=self.token_ids,
            num_prompt_tokens=len(self.generation.prompt_ids),
            params=self.generation.sampling,
            namespace=self.namespace,
            keys=self.keys,
            block_tokens=self.block_tokens,
            age_s=self._age_ms(now) / 1000,
            traceparent=self.generation.traceparent,
            idle=self.generation.terms.idle,
            traced=traces and bool(self.generation.traceparent),
        )

    def live_attempt(self, attempt: AttemptState) -> LiveAttempt:
        """What the Conductor is to know of the attempt that runs."""
        return LiveAttempt(
            attempt_id=attempt.attempt_id,
            prefill_id=attempt.instance_of(Role.PREFILL),
            decode_id=attempt.instance_of(Role.DECODE),
            phase=attempt.phase,
            num_tokens=attempt.num_tokens,
            # Whatever the node says: the last token is always computed.
            cached_tokens=min(attempt.cached_tokens, attempt.num_tokens - 1),
            tenant=self.generation.tenant,
            max_new_tokens=self.generation.sampling.max_tokens - attempt.base,
            prediction=attempt.assignment.prediction,
            idle=self.generation.terms.idle,
            output_tokens=attempt.base,
            successor_of=self.attempt.attempt_id if self.attempt is not None and attempt is not self.attempt else NO_ATTEMPT,
        )

    def _age_ms(self, now: float) -> float:
        """Of the API request, whose further choices begin later."""
        requested_at = self.generation.requested_at
        return (now - (self.arrived_at if requested_at is None else requested_at)) * 1000
