"""A world around the gateway's core: a Conductor, nodes and clients that do anything at any time, and remember what they were told."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gateway import events as ev
from gateway.core import GatewayCore
from gateway.state import Limits
from springtide.clock import Tick
from springtide.ids import AttemptId, BlockKey, GatewayId, InstanceId, NodeId, RequestId
from springtide.protocol.attempts import Prediction
from springtide.protocol.instances import InstanceRef, Role
from springtide.protocol.outputs import (
    AttemptFailed,
    AttemptSign,
    Failure,
    FailureCode,
    Finish,
    PrefillDone,
    PromptLogprobs,
    SampledToken,
    TokenOutput,
)
from springtide.protocol.sampling import SamplingParams
from springtide.protocol.scheduling import Assignment, Reason, Rejection, Schedule, Terms
from springtide.protocol.starts import DecodeStart

LIMITS = Limits(max_attempts=3, capacity_wait_s=5, arrival_wait_s=3, scheduler_wait_s=2, silence_s=3, standstill_s=10)
GATEWAY = GatewayId("g")
REASONS = [
    Reason.TTFT,
    Reason.NO_PREFILL,
    Reason.NO_DECODE,
    Reason.TBT,
    Reason.TOO_LARGE,
]
CODES = [
    FailureCode.INVALID,
    FailureCode.OVERLOADED,
    FailureCode.POOL_FULL,
    FailureCode.PREEMPTED,
    FailureCode.QUOTA_USED,
    FailureCode.PEER_LOST,
    FailureCode.ABORTED,
    FailureCode.INTERNAL,
]


NOTHING = Prediction(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def instance(name: str) -> InstanceRef:
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    return InstanceRef(InstanceId(name), role, f"{name}:1", NodeId(name), f"{name}:2")


def assignment(
    attempt_id: AttemptId,
    prefill: InstanceRef | None = None,
    decode: InstanceRef | None = None,
    *,
    predicted_ttft_ms: float = 0.0,
    ttft_slo_ms: float = 0.0,
    prediction: Prediction = NOTHING,
    waits: bool = False,
    refusable: bool = False,
) -> Assignment:
    """On p0 and d0, if nothing else is said."""
    return Assignment(
        attempt_id=attempt_id,
        prefill=prefill or instance("p0"),
        decode=decode or instance("d0"),
        local_blocks=0,
        sources=(),
        predicted_ttft_ms=predicted_ttft_ms,
        predicted_tbt_ms=0.0,
        ttft_slo_ms=ttft_slo_ms,
        tbt_slo_ms=0.0,
        prediction=prediction,
        waits=waits,
        refusable=refusable,
    )


def new_core(limits: Limits | None = None) -> GatewayCore:
    """Whose block keys are the tokens themselves."""
    return GatewayCore(limits or LIMITS, GATEWAY, TokensAsKeys())


class TokensAsKeys:
    """A block is a token."""

    block_tokens = 1

    def namespace(self, generation: ev.Generation) -> BlockKey:
        return BlockKey(bytes(16))

    def keys(self, generation: ev.Generation, token_ids: Sequence[int], known: tuple[BlockKey, ...] = ()) -> tuple[BlockKey, ...]:
        return tuple(BlockKey(token_id.to_bytes(16, "little")) for token_id in token_ids)


def generation(number: int, max_tokens: int, *, accepted: bool = False, idle: bool = False) -> ev.Generation:
    sampling, terms = SamplingParams(max_tokens=max_tokens), Terms(idle=idle)
    return ev.Generation(RequestId(f"r{number}"), (number, number, number), sampling, accepted=accepted, terms=terms)


@dataclass
class Attempt:
    """What the nodes do for one attempt. `running` are the sides that still work for it."""

    request: Request
    assignment: Assignment
    base: int
    running: set[Role] = field(default_factory=lambda: set(Role))
    next_position: int = 0
    prompt_inlined: bool = False
    """The decode side has yet to compute the prompt."""
    waits: bool = False
    """The decode side has yet to say that it has room."""
    reported_over: int = 0
    succeeds: bool = False
    """Another one ran when it began, and may still."""
    differs: bool = False
    """It has come to other tokens than those that were sent."""
    foretold: int = 0
    """Tokens from its base on."""

    @property
    def attempt_id(self) -> AttemptId:
        return self.assignment.attempt_id


@dataclass
class Request:
    generation: ev.Generation
    stop_at: int | None
    """Output position at which the model ends by itself."""
    emitted: list[int] = field(default_factory=list)
    scores: list[PromptLogprobs] = field(default_factory=list)
    terminals: list[ev.Finished | ev.Failed | ev.Cancelled] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def scored(self) -> bool:
        """Whether its prompt's log-probabilities are wanted."""
        return self.generation.sampling.prompt_logprobs is not None

    def token(self, position: int) -> int:
        return int(self.generation.request_id[1:]) * 1000 + position

    def output(self, attempt_id: AttemptId, position: int, count: int) -> TokenOutput:
        """What a node that works well sends: at most `count` tokens, less where the output ends."""
        tokens: list[SampledToken] = []
        finish: Finish | None = None
        for at in range(position, position + count):
            if at == self.stop_at:
                finish = Finish.STOP
                break
            tokens.append(SampledToken(self.token(at)))
            if at + 1 == self.generation.sampling.max_tokens:
                finish = Finish.LENGTH
                break
        return TokenOutput(attempt_id, position, tuple(tokens), finish)


class World:
    """Feeds the core, does its actions, and asserts on the way what must hold after every event."""

    def __init__(self, seed: int, most_tokens: int = 12, moving: int = 1) -> None:
        """`most_tokens`: of an output. `moving`: how often, beside other things, the Conductor finds that attempts had better move."""
        self.random = random.Random(seed)
        self.most_tokens, self.moving = most_tokens, moving
        self.core = new_core()
        self.now = 0.0
        self.requests: dict[RequestId, Request] = {}
        self.asked: dict[AttemptId, Schedule] = {}
        self.placed: dict[AttemptId, Assignment] = {}
        self.attempts: dict[AttemptId, Attempt] = {}
        self.sent: list[ev.Event] = []
        self.told_placed: set[AttemptId] = set()
        self.moves = self.foretold = 0

    def feed(self, event: ev.Event) -> None:
        self.sent.append(event)
        for action in self.core.handle(event, self.now):
            self._do(action)
        self.core.validate()

    # ---- what the core wants done ----

    def _do(self, action: ev.Action) -> None:
        match action:
            case Schedule():
                request = self.requests[action.request_id]
                assert not request.terminals
                assert action.attempt_id not in self.asked and action.attempt_id not in self.attempts
                expected = TokensAsKeys().keys(request.generation, [*request.generation.prompt_ids, *request.emitted])
                assert action.block_keys == expected, "keys of other tokens"
                assert action.num_tokens == len(request.generation.prompt_ids) + len(request.emitted)
                running = [attempt.attempt_id for attempt in request.attempts if attempt.running & {Role.DECODE}]
                assert running in ([], [action.successor_of]), "two attempts at once"
                if action.successor_of:
                    assert self.attempts[action.successor_of].assignment.decode.instance_id in action.avoid and not action.terms.idle
                self.asked[action.attempt_id] = action
                asking = [asked for asked in self.asked.values() if asked.terms.idle and not self.requests[asked.request_id].terminals]
                assert len(asking) <= 1, "one at a time asks for idle capacity"
            case ev.StartAtDecode(at, start, successor):
                request = self.requests[start.request.request_id]
                running = [attempt for attempt in request.attempts if attempt.running & {Role.DECODE}]
                assert len(running) <= successor, "two attempts at once"
                base = start.request.first_position
                assert base == len(request.emitted)
                assert list(start.request.token_ids) == [*request.generation.prompt_ids, *request.emitted]
                placed = self.placed[start.request.attempt_id] if start.request.attempt_id in self.placed else self._again(start, at)
                assert at == placed.decode
                attempt = Attempt(request, placed, base, next_position=base + 1, running={Role.DECODE}, succeeds=successor)
                if placed.inlined:
                    assert not start.waits and start.inlined
                    attempt.prompt_inlined = True
                else:
                    attempt.waits = start.waits
                assert start.waits or not placed.waits or placed.inlined
                assert start.request.idle == request.generation.terms.idle and not (start.waits and start.request.idle)
                request.attempts.append(attempt)
                self.attempts[attempt.attempt_id] = attempt
            case ev.StartAtPrefill(at, start):
                attempt = self.attempts[start.request.attempt_id]
                assert start.ttft_budget_ms >= 0 and not attempt.assignment.inlined and at == attempt.assignment.prefill
                assert not attempt.waits, "prefill begins when the decode side has room"
                attempt.running.add(Role.PREFILL)
            case ev.Foretell(instance_id, told):
                attempt = self.attempts[told.attempt_id]
                assert attempt.succeeds and Role.DECODE in attempt.running and not attempt.reported_over
                assert instance_id == attempt.assignment.decode.instance_id
                assert told.position == attempt.base + attempt.foretold, "tokens between have not been foretold"
                attempt.foretold += len(told.token_ids)
                assert list(told.token_ids) == attempt.request.emitted[told.position :]
                self.foretold += len(told.token_ids)
            case ev.Abort(side, instance_id, attempt_id):
                attempt = self.attempts[attempt_id]
                named = attempt.assignment.prefill if side is Role.PREFILL else attempt.assignment.decode
                assert named.instance_id == instance_id
                attempt.running.discard(side)
            case ev.Emit(request_id, tokens):
                request = self.requests[request_id]
                assert not request.terminals, "output after the terminal reply"
                assert tokens
                for token in tokens:
                    assert token.token_id == request.token(len(request.emitted)), "a token lost, repeated or out of order"
                    request.emitted.append(token.token_id)
            case ev.EmitPrompt(request_id, logprobs):
                request = self.requests[request_id]
                assert request.scored and not request.emitted and not request.terminals
                request.scores.append(logprobs)
                assert len(request.scores) == 1
            case ev.Report(progress):
                if progress.attempt_id in self.attempts and progress.phase.over:
                    self.attempts[progress.attempt_id].reported_over += 1
            case ev.TellPlaced(live):
                assert live.attempt_id in self.attempts and live.decode_id == self.attempts[live.attempt_id].assignment.decode.instance_id
                self.told_placed.add(live.attempt_id)
            case ev.Moved(request_id, source, target):
                self.moves += 1
                assert source != target and request_id in self.unfinished()
            case ev.Terminal(request_id, reply):
                self._end(self.requests[request_id], reply)

    def _again(self, start: DecodeStart, at: InstanceRef) -> Assignment:
        """A further successor, where the one before it was placed."""
        before = [attempt.assignment for attempt in self.requests[start.request.request_id].attempts if attempt.succeeds]
        assert before and before[-1].decode == at, "an attempt that nobody has placed"
        return replace(before[-1], attempt_id=start.request.attempt_id)

    def _end(self, request: Request, reply: ev.Finished | ev.Failed | ev.Cancelled) -> None:
        request.terminals.append(reply)
        assert len(request.terminals) == 1
        for attempt in request.attempts:
            assert not attempt.running & {Role.DECODE}, "an attempt goes on after the terminal reply"
            assert attempt.reported_over == 1
            assert (attempt.attempt_id in self.told_placed) == (attempt.attempt_id not in self.placed), "one that Conductors do not know"
        if isinstance(reply, ev.Finished) and reply.reason is Finish.LENGTH:
            assert len(request.emitted) == request.generation.sampling.max_tokens
            assert len(request.scores) == request.scored

    # ---- what the world may do ----

    def arrive(self) -> None:
        max_tokens = self.random.randint(1, self.most_tokens)
        stop_at = self.random.choice([None, self.random.randrange(max_tokens)])
        idle = self.random.random() < 0.3
        asked = generation(len(self.requests), max_tokens, accepted=self.random.random() < 0.2, idle=idle)
        if self.random.random() < 0.3:
            asked = replace(asked, sampling=replace(asked.sampling, prompt_logprobs=0))
        request = Request(asked, stop_at)
        self.requests[request.generation.request_id] = request
        self.feed(ev.Arrived(request.generation))

    def assign(self, attempt_id: AttemptId) -> None:
        asked = self.asked.pop(attempt_id)
        idle = asked.terms.idle
        prefill, decode = (instance(self.random.choice(names)) for names in (("p0", "p1"), ("d0", "d1")))
        if asked.successor_of and self.random.random() < 0.9:
            decode = instance(self.random.choice([name for name in ("d0", "d1", "d2") if name not in asked.avoid]))
            prefill = decode
        elif self.random.random() < 0.3 and not idle:
            prefill = decode
        waits, refusable = self.random.random() < 0.3 and not idle, self.random.random() < 0.5 and not idle
        placed = assignment(attempt_id, prefill, decode, predicted_ttft_ms=5.0, ttft_slo_ms=100.0, waits=waits, refusable=refusable)
        self.placed[attempt_id] = placed
        self.feed(placed)

    def reserve(self, attempt: Attempt) -> None:
        attempt.waits = False
        self.feed(ev.DecodeReserved(attempt.attempt_id))

    def answer_badly(self, attempt_id: AttemptId) -> None:
        idle = self.asked.pop(attempt_id).terms.idle
        if self.random.random() < 0.3:
            self.feed(ev.SchedulerUnreachable(attempt_id, "gone"))
        elif idle and self.random.random() < 0.7:
            self.feed(ev.Rejected(attempt_id, Rejection(Reason.NOT_IDLE, "no idle capacity", 0.1)))
        else:
            self.feed(ev.Rejected(attempt_id, Rejection(self.random.choice(REASONS), "no", 2.0)))

    def prefill_done(self, attempt: Attempt) -> None:
        attempt.running.discard(Role.PREFILL)
        output = self._rounded(attempt, attempt.request.output(attempt.attempt_id, attempt.base, 1))
        if attempt.prompt_inlined:
            attempt.prompt_inlined = False
            if output.finish is not None:
                attempt.running.discard(Role.DECODE)
        scores = PromptLogprobs(bytes(8), bytes(8)) if attempt.request.scored and attempt.base == 0 else None
        most_foretold = self.random.choice([0, 1, 4])
        self.feed(PrefillDone(output, cached_tokens=self.random.randint(0, 2), prompt_logprobs=scores, most_foretold=most_foretold))

    def decode_output(self, attempt: Attempt) -> None:
        at_once = self.random.randint(1, 3)
        if self.random.random() < 0.5:
            at_once += max(0, attempt.base + attempt.foretold - attempt.next_position)
        output = attempt.request.output(attempt.attempt_id, attempt.next_position, at_once)
        if self.random.random() < 0.05:
            output = TokenOutput(output.attempt_id, output.position + 1, output.tokens)
        output = self._rounded(attempt, output)
        attempt.next_position = output.end
        if output.finish is not None:
            attempt.running.discard(Role.DECODE)
        self.feed(output)

    def _rounded(self, attempt: Attempt, output: TokenOutput) -> TokenOutput:
        """What a successor sends whose node rounds as the one before it did not: from a place where the client has another token, all are
        others."""
        if attempt.succeeds and output.position < len(attempt.request.emitted) and output.tokens and self.random.random() < 0.1:
            attempt.differs = True
        if not attempt.differs:
            return output
        return replace(output, tokens=tuple(SampledToken(token.token_id + 500) for token in output.tokens))

    def fail(self, attempt: Attempt) -> None:
        side = self.random.choice(sorted(attempt.running))
        attempt.running.discard(side)
        self.feed(ev.SideFailed(side, AttemptFailed(attempt.attempt_id, Failure(self.random.choice(CODES), "broken"))))

    def lose_session(self) -> None:
        side = self.random.choice(list(Role))
        name = self.random.choice(("p0", "p1") if side is Role.PREFILL else ("d0", "d1"))
        lost = [
            attempt
            for attempt in self.attempts.values()
            if (attempt.assignment.prefill if side is Role.PREFILL else attempt.assignment.decode).instance_id == name
            and not attempt.reported_over
        ]
        for attempt in lost:
            attempt.running.discard(side)
        self.feed(ev.SessionLost(side, InstanceId(name), tuple(a.attempt_id for a in lost), self.random.random() < 0.7))

    def hang(self) -> None:
        """The Conductor finds that an instance hangs. It wakes up later, or not."""
        name = self.random.choice(("p0", "p1", "d0", "d1"))
        self.feed(ev.InstancesHung(frozenset({(InstanceId(name), f"{name}:1")})))

    def move(self) -> None:
        """The Conductor finds that some had better decode elsewhere; of some of them it is mistaken."""
        self.feed(ev.MovesWanted(tuple(attempt_id for attempt_id in self.attempts if self.random.random() < 0.3)))

    def show_signs(self) -> None:
        side = self.random.choice(list(Role))
        signs = [AttemptSign(attempt.attempt_id, attempt.next_position, self.random.random() < 0.5) for attempt in self.working(side)]
        self.feed(ev.Signs(side, tuple(signs)))

    def repeat_something(self) -> None:
        """Sends a message again: of an attempt that goes on, where there is one, else of any."""
        outputs = [event for event in self.sent if isinstance(event, (PrefillDone, TokenOutput))]
        attempt_ids = [event.attempt_id if isinstance(event, TokenOutput) else event.output.attempt_id for event in outputs]
        live = [event for event, attempt_id in zip(outputs, attempt_ids, strict=True) if not self.attempts[attempt_id].reported_over]
        # A repeated failure or loss of an attempt that goes on would be news to it, not a repetition.
        past = [event for event in self.sent if self._is_past(event)]
        repeatable = (live if self.random.random() < 0.7 else []) or [*outputs, *past]
        if repeatable:
            self.feed(self.random.choice(repeatable))
        reserved = [event for event in self.sent if isinstance(event, ev.DecodeReserved)]
        if reserved:
            self.feed(self.random.choice(reserved))

    def _is_past(self, event: ev.Event) -> bool:
        if isinstance(event, ev.SideFailed):
            return self.attempts[event.failed.attempt_id].reported_over > 0
        if isinstance(event, ev.SessionLost):
            return all(self.attempts[attempt_id].reported_over for attempt_id in event.attempt_ids)
        return isinstance(event, (ev.StopStringHit, ev.ClientGone)) and bool(self.requests[event.request_id].terminals)

    def tick(self) -> None:
        self.now += self.random.choice([0.01, 0.2, 0.2, 1.0, 1.0, 1.0, 30.0])
        self.feed(Tick())

    def working(self, side: Role) -> list[Attempt]:
        return [
            attempt
            for attempt in self.attempts.values()
            if side in attempt.running and attempt.request.generation.request_id in self.unfinished()
        ]

    def unfinished(self) -> set[RequestId]:
        return {request_id for request_id, request in self.requests.items() if not request.terminals}

    def step(self, smooth: bool = False) -> None:
        """One random event; `smooth`: only such as bring the requests on."""
        progress = [(self.assign, attempt_id) for attempt_id in self.asked]
        progress += [(self.prefill_done, attempt) for attempt in self.working(Role.PREFILL)]
        decoding = self.working(Role.DECODE)
        progress += [(self.prefill_done, attempt) for attempt in decoding if attempt.prompt_inlined]
        progress += [(self.reserve, attempt) for attempt in decoding if attempt.waits]
        ready = [attempt for attempt in decoding if not attempt.prompt_inlined and not attempt.waits]
        progress += [(self.decode_output, attempt) for attempt in ready if not (smooth and Role.PREFILL in attempt.running)]
        if smooth:
            choices = progress or [(lambda _: self.tick(), None)]
        else:
            choices = progress * 5
            choices += [(self.answer_badly, attempt_id) for attempt_id in self.asked]
            choices += [(self.fail, attempt) for attempt in self.attempts.values() if attempt.running and not attempt.reported_over]
            others = (self.lose_session, self.hang, self.show_signs, self.repeat_something, self.repeat_something, self.tick)
            choices += [(lambda _, act=act: act(), None) for act in (*others, *[self.move] * self.moving)]
            choices += [(self._end_by_client, request_id) for request_id in sorted(self.unfinished())[:1]]
            if len(self.unfinished()) < 4:
                choices += [(lambda _: self.arrive(), None)] * 4
        act, subject = self.random.choice(choices)
        act(subject)

    def _end_by_client(self, request_id: RequestId) -> None:
        self.feed(self.random.choice([ev.StopStringHit(request_id), ev.ClientGone(request_id)]))
