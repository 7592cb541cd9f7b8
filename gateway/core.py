"""The gateway's decisions: what becomes of each request and its attempts. Free of I/O, clock and randomness.

A request is scheduled, runs as an attempt on one (prefill, decode) pair and, when that fails, is scheduled again with the tokens it has
already received, until it has its one terminal reply. Whatever is late, duplicate or about an attempt that is over changes nothing.

It may move to another decode node while it runs: a successor of its attempt begins there, and takes its place when it has caught up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from gateway import events as ev
from gateway.idle_line import IdleLine
from gateway.state import AttemptState, Hashing, Limits, Move, Pulse, RequestState
from springtide.clock import ObservedTime, Tick
from springtide.errors import DeadlineExceeded, InvalidRequest, Overloaded, SpringtideError, Unavailable
from springtide.ids import AttemptId, GatewayId, InstanceId, RequestId
from springtide.protocol.attempts import NO_ATTEMPT, LiveAttempt, Phase, Progress
from springtide.protocol.instances import Role
from springtide.protocol.outputs import AttemptFailed, FailureCode, Finish, HandedOver, PrefillDone, TokenOutput
from springtide.protocol.scheduling import Assignment, Reason, Schedule, Terms
from springtide.protocol.starts import DecodeStart, ForetellTokens, PrefillStart
from springtide.protocol.timings import DecodeTimes

_NOBODY_THERE = (Reason.NO_PREFILL, Reason.NO_DECODE)
_FOLLOWING = 8
"""Who waited because nobody was there asks again when another has found somebody: so many at each answer, not thousands at the first."""
_REFUSED_RETRY_AFTER_S = 1.0
_NO_ROOM = (
    FailureCode.POOL_FULL,
    FailureCode.QUOTA_USED,
    FailureCode.PREEMPTED,
    FailureCode.OVERLOADED,
)
"""A healthy node that is full: the request waits, and tries again for as long as its client wants it."""
_PARTED = (FailureCode.PEER_LOST, FailureCode.ABORTED)
"""One of the two sides has no more to do with the other, and the gateway has not asked for it."""
_LOOK_EVERY_S = 0.25
"""At all requests. Ticks come also for the retry of a single one."""
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.05, 1.0
"""Between two questions of a request that waits."""
_MOST_BETWEEN_TICKS_S = 1.0
"""What is more than that between two ticks is a pause of this gateway, not of the nodes."""


class GatewayCore:
    """The requests that this gateway owns: events in, actions out."""

    def __init__(self, limits: Limits, gateway_id: GatewayId, hashing: Hashing, *, traces: bool = False) -> None:
        """`traces`: nodes are to tell what the time of requests that have a `traceparent` goes into."""
        self._limits = limits
        self._traces = traces
        self._gateway_id = gateway_id
        self._hashing = hashing
        self._requests: dict[RequestId, RequestState] = {}
        self._by_attempt: dict[AttemptId, RequestState] = {}
        """Those that run."""
        self._asked: dict[AttemptId, RequestState] = {}
        """Those for which the Conductor's answer is awaited."""
        self._moves: dict[AttemptId, RequestState] = {}
        """Those that run, by the successor for which it is."""
        self._retries: dict[RequestId, float] = {}
        self._unserved: dict[RequestId, None] = {}
        """Those of them that nobody was there for, by when they were last told so."""
        self._idle = IdleLine()
        self._shut_down = False
        self._looked_at = float("-inf")
        self._observed = ObservedTime(_MOST_BETWEEN_TICKS_S)

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        actions = self._handle(event, now)
        while (request_id := self._idle.take(now)) is not None:
            actions += self._ask(self._requests[request_id], now)
        return actions

    def _handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        match event:
            case ev.Arrived():
                return self._on_arrived(event, now)
            case Assignment():
                return self._on_assigned(event, now)
            case ev.Rejected():
                return self._on_rejected(event, now)
            case ev.SchedulerUnreachable():
                return self._on_scheduler_unreachable(event, now)
            case PrefillDone():
                return self._on_prefill_done(event, now)
            case TokenOutput():
                return self._on_decode_output(event, now)
            case ev.DecodeReserved(attempt_id):
                return self._on_decode_reserved(attempt_id, now)
            case ev.SideFailed(side, failed):
                return self._on_attempt_failed(side, failed, now)
            case ev.SessionLost():
                return self._on_session_lost(event, now)
            case ev.InstancesHung():
                return self._on_instances_hung(event, now)
            case ev.MovesWanted(attempt_ids):
                return [action for attempt_id in attempt_ids for action in self._begin_move(attempt_id, now)]
            case ev.Signs():
                return self._on_signs(event)
            case ev.StopStringHit():
                state = self._requests.get(event.request_id)
                return [] if state is None else self._finish(state, Finish.STOP)
            case ev.ClientGone():
                state = self._requests.get(event.request_id)
                return [] if state is None else self._end(state, ev.Cancelled(state.cached_tokens or 0))
            case ev.Shutdown():
                self._shut_down = True
                return [action for state in list(self._requests.values()) for action in self._end(state, ev.Failed(_shutting_down()))]
            case HandedOver() | DecodeTimes():
                return []
            case Tick():
                return self._on_tick(now)

    def next_deadline(self) -> float | None:
        """The time at which the next request that waits wants a Tick."""
        idle_at = self._idle.next_at
        if not self._retries:
            return idle_at
        moment = min(self._retries.values())
        return moment if idle_at is None else min(moment, idle_at)

    def live_attempts(self) -> list[LiveAttempt]:
        return [state.live_attempt(attempt) for state, attempt in self._all_running()]

    def validate(self) -> None:
        """Asserts the invariants."""
        for request_id, state in self._requests.items():
            assert state.generation.request_id == request_id
            stages = [state.asked is not None, state.retry_at is not None, state.attempt is not None, request_id in self._idle]
            assert sum(stages) == 1, f"{request_id} is in {sum(stages)} stages at once"
            assert self._retries.get(request_id) == state.retry_at
            assert state.asked is None or self._asked.get(state.asked) is state
            assert len(state.tokens) < state.generation.sampling.max_tokens, f"{request_id} goes on beyond max_tokens"
            assert state.fruitless < self._limits.max_attempts
            if state.move is not None:
                assert state.attempt is not None and (state.move.asked is None) == (state.move.attempt is not None)
                assert state.move.asked is None or self._moves.get(state.move.asked) is state
            if state.attempt is not None:
                assert self._by_attempt.get(state.attempt.attempt_id) is state
                assert state.attempt.decode_open or state.attempt.owes_word(Role.PREFILL), (
                    f"{request_id} runs on a decode side that has ended it"
                )
                assert state.attempt.base + state.attempt.first_token_seen <= len(state.tokens)
        successors = [state.move for state in self._requests.values() if state.move is not None]
        assert len(self._moves) == sum(move.asked is not None for move in successors)
        running = sum(state.attempt is not None for state in self._requests.values()) + len(successors) - len(self._moves)
        assert len(self._by_attempt) == running == len(list(self._all_running()))
        assert len(self._asked) == sum(state.asked is not None for state in self._requests.values())
        assert set(self._unserved) <= set(self._retries) <= set(self._requests)

    # ---- scheduling ----

    def _on_arrived(self, event: ev.Arrived, now: float) -> list[ev.Action]:
        generation = event.generation
        if generation.request_id in self._requests:
            raise ValueError(f"request id {generation.request_id} is in use")
        if self._shut_down:
            return [ev.Terminal(generation.request_id, ev.Failed(_shutting_down()))]
        namespace, block_tokens = self._hashing.namespace(generation), self._hashing.block_tokens
        state = RequestState(generation, namespace, block_tokens, arrived_at=now, accepted=generation.accepted, grown_at=self._observed.now)
        self._requests[generation.request_id] = state
        return self._schedule(state, now)

    def _schedule(self, state: RequestState, now: float) -> list[ev.Action]:
        """Asks for a new attempt; who is content with idle capacity does so in its turn."""
        if state.generation.terms.idle:
            self._idle.join(state.generation.request_id)
            return []
        return self._ask(state, now)

    def _ask(self, state: RequestState, now: float) -> list[ev.Action]:
        """Asks for a new attempt, or for the same again when the Conductor may have placed it without our learning of it. When the
        request's deadline has passed, there is no further attempt."""
        terms = state.terms_left(now)
        if terms is None:
            return self._miss_deadline(state)
        if not state.unanswered:
            state.tries += 1
        state.unanswered = False
        state.asked = state.attempt_id
        self._asked[state.asked] = state
        return [self._question(state, state.asked, terms)]

    def _question(self, state: RequestState, attempt_id: AttemptId, terms: Terms, successor_to: AttemptState | None = None) -> Schedule:
        generation, sampling, token_ids = state.generation, state.generation.sampling, state.token_ids
        state.keys = self._hashing.keys(generation, token_ids, state.keys)
        max_new_tokens = sampling.max_tokens - len(state.tokens)
        # Nothing ends an output before its limit whose end tokens are ignored, unless a stop string, a grammar or the client does.
        endless = sampling.ignore_eos and not sampling.grammar
        return Schedule(
            attempt_id=attempt_id,
            request_id=generation.request_id,
            gateway_id=self._gateway_id,
            block_keys=state.keys,
            num_tokens=len(token_ids),
            max_new_tokens=max_new_tokens,
            min_new_tokens=max_new_tokens if endless else max(1, sampling.min_tokens - len(state.tokens)),
            accepted=state.accepted,
            avoid=frozenset(state.avoid if successor_to is None else (*state.avoid, successor_to.instance_of(Role.DECODE))),
            tenant=generation.tenant,
            terms=terms,
            whole_prompt=state.scores_prompt,
            successor_of=NO_ATTEMPT if successor_to is None else successor_to.attempt_id,
            output_tokens=len(state.tokens),
        )

    def _miss_deadline(self, state: RequestState) -> list[ev.Action]:
        message = f"the deadline of {state.generation.terms.deadline_ms:.0f} ms has passed with {len(state.tokens)} tokens of output"
        return self._give_up(state, DeadlineExceeded(message, code="deadline"))

    def _retry_at(self, state: RequestState, when: float) -> list[ev.Action]:
        state.retry_at = when
        self._retries[state.generation.request_id] = when
        return []

    def _retry(self, request_id: RequestId, now: float) -> list[ev.Action]:
        self._stop_waiting(request_id)
        state = self._requests[request_id]
        state.retry_at = None
        return self._schedule(state, now)

    def _stop_waiting(self, request_id: RequestId) -> None:
        self._retries.pop(request_id, None)
        self._unserved.pop(request_id, None)

    def _answered(self, attempt_id: AttemptId) -> RequestState | None:
        """The request that waits for this very answer of the Conductor, and now no longer does."""
        state = self._asked.pop(attempt_id, None)
        if state is not None:
            state.asked = None
            self._idle.leave(state.generation.request_id)
        return state

    def _on_assigned(self, assignment: Assignment, now: float) -> list[ev.Action]:
        if (moving := self._moves.pop(assignment.attempt_id, None)) is not None and moving.move is not None:
            return self._start_successor(moving, moving.move, assignment, now)
        state = self._answered(assignment.attempt_id)
        if state is None:
            # Nobody waits for it any more: the Conductor must not count it as load.
            return [] if assignment.attempt_id in self._by_attempt else [ev.Report(Progress(assignment.attempt_id, Phase.FINISHED))]
        state.accepted = True
        idle = state.generation.terms.idle
        if idle:
            self._idle.found()
        # Who found a node full before does not take it for roomy again, whatever the Conductor has heard of it by now.
        waits = not assignment.inlined and not idle and (assignment.waits or state.crowded_out > 0)
        state.attempt, start = self._begin(state, assignment, waits, now)
        actions: list[ev.Action] = [ev.StartAtDecode(assignment.decode, start)]
        if state.attempt.prefill_open:
            actions.append(self._start_prefill(state, state.attempt, now))
        for request_id in list(itertools.islice(self._unserved, _FOLLOWING)):
            actions += self._retry(request_id, now)
        return actions

    def _begin(self, state: RequestState, assignment: Assignment, waits: bool, now: float) -> tuple[AttemptState, DecodeStart]:
        """An attempt that runs from now on, and what its decode node is to be told. Unless its prefill side is open, that is all."""
        pulses = {side: Pulse(self._observed.now, self._observed.now) for side in Role}
        attempt = AttemptState(assignment, len(state.tokens), len(state.token_ids), now, pulses, waits)
        if assignment.inlined or waits:
            attempt.close(Role.PREFILL)
        self._by_attempt[assignment.attempt_id] = state
        start = DecodeStart(
            state.request(attempt.attempt_id, now, traces=self._traces),
            tbt_slo_ms=assignment.tbt_slo_ms,
            inlined=assignment.inlined,
            waits=waits,
            refusable=assignment.refusable,
            expected_tokens=assignment.prediction.output_tokens,
            ttft_budget_ms=state.ttft_budget_ms(assignment, now) if assignment.inlined else 0.0,
            sources=assignment.sources if assignment.inlined else (),
        )
        return attempt, start

    def _start_prefill(self, state: RequestState, attempt: AttemptState, now: float) -> ev.StartAtPrefill:
        assignment = attempt.assignment
        start = PrefillStart(
            state.request(attempt.attempt_id, now, traces=self._traces),
            decode_store_address=assignment.decode.store_address,
            decode_store_node_id=assignment.decode.node_id,
            ttft_budget_ms=state.ttft_budget_ms(assignment, now),
            sources=assignment.sources,
        )
        return ev.StartAtPrefill(assignment.prefill, start)

    def _on_decode_reserved(self, attempt_id: AttemptId, now: float) -> list[ev.Action]:
        running = self._running(attempt_id)
        if running is None or not running[1].waits:
            return []
        state, attempt = running
        attempt.waits, attempt.prefill_open = False, True
        state.waiting_since = None
        attempt.pulses[Role.PREFILL].move(self._observed.now)
        return [self._start_prefill(state, attempt, now)]

    def _on_rejected(self, event: ev.Rejected, now: float) -> list[ev.Action]:
        if event.attempt_id in self._moves:
            return self._give_up_move(self._moves[event.attempt_id], event.rejection.message)
        state = self._answered(event.attempt_id)
        if state is None:
            return []
        reason, message, retry_after_s = event.rejection.reason, event.rejection.message, event.rejection.retry_after_s
        if reason is Reason.NOT_IDLE:
            state.waiting_since = None  # somebody is there
            self._idle.refused(now, retry_after_s)
            self._idle.join(state.generation.request_id)
            return []
        if reason is Reason.TOO_LARGE and not state.accepted:
            return self._give_up(state, InvalidRequest(message, code="request_too_large"))
        if reason in _NOBODY_THERE:
            return self._wait_for_somebody(state, self._limits.arrival_wait_s, message, now)
        if state.accepted:
            return self._wait_for_capacity(state, message, now)
        if reason is Reason.DEADLINE and not retry_after_s:
            return self._give_up(state, DeadlineExceeded(message, code="deadline"))
        if not retry_after_s:
            return self._give_up(state, InvalidRequest(message, code="objective_unattainable"))
        return self._give_up(state, Overloaded(message, retry_after_s=retry_after_s, reason=reason.value))

    def _on_scheduler_unreachable(self, event: ev.SchedulerUnreachable, now: float) -> list[ev.Action]:
        if event.attempt_id in self._moves:
            return self._give_up_move(self._moves[event.attempt_id], event.message)
        state = self._answered(event.attempt_id)
        if state is None:
            return []
        state.unanswered = True
        return self._wait_for_somebody(state, self._limits.scheduler_wait_s, event.message, now)

    def _wait_for_somebody(self, state: RequestState, new_patience_s: float, message: str, now: float) -> list[ev.Action]:
        """There is no node, or nobody who decides. `new_patience_s`: of a request that has not been accepted yet and does not ask
        for idle capacity alone."""
        self._unserved[state.generation.request_id] = None
        pause_s = max(len(self._unserved) / self._limits.asked_per_s, _LEAST_PAUSE_S)
        patient = state.accepted or state.generation.terms.idle
        return self._wait(state, self._limits.capacity_wait_s if patient else new_patience_s, pause_s, message, now)

    def _wait_for_capacity(self, state: RequestState, message: str, now: float) -> list[ev.Action]:
        """There are nodes, but none that it can go to."""
        waited_s = 0.0 if state.waiting_since is None else now - state.waiting_since
        return self._wait(state, self._limits.capacity_wait_s, min(max(waited_s / 4, _LEAST_PAUSE_S), _MOST_PAUSE_S), message, now)

    def _wait(self, state: RequestState, patience_s: float, pause_s: float, message: str, now: float) -> list[ev.Action]:
        if state.waiting_since is None:
            state.waiting_since = now
        waited_s = now - state.waiting_since
        if waited_s >= patience_s:
            return self._give_up(state, Unavailable(f"nobody could run the request for {waited_s:.0f} s: {message}", code="no_capacity"))
        return self._retry_at(state, min(now + pause_s, state.waiting_since + patience_s))

    # ---- running ----

    def _running(self, attempt_id: AttemptId) -> tuple[RequestState, AttemptState] | None:
        state = self._by_attempt.get(attempt_id)
        attempt = None if state is None else state.attempt_named(attempt_id)
        return None if state is None or attempt is None else (state, attempt)

    def _all_running(self) -> Iterator[tuple[RequestState, AttemptState]]:
        for attempt_id, state in list(self._by_attempt.items()):
            if (attempt := state.attempt_named(attempt_id)) is not None:
                yield state, attempt

    def _on_prefill_done(self, event: PrefillDone, now: float) -> list[ev.Action]:
        running = self._running(event.output.attempt_id)
        if running is None or running[1].first_token_seen:
            return []
        state, attempt = running
        if attempt is not state.attempt:
            return self._on_successor(state, attempt, event, now)
        if state.scores_prompt and event.prompt_logprobs is None:
            culprit = attempt.instance_of(Role.PREFILL)
            return self._fail(state, attempt, f"{culprit} sent no log-probabilities of the prompt", [culprit], now)
        attempt.pulses[Role.DECODE].move(self._observed.now)
        attempt.first_token_seen = True
        attempt.cached_tokens = event.cached_tokens
        state.waiting_since = None
        if state.cached_tokens is None:
            state.cached_tokens = event.cached_tokens
        actions: list[ev.Action] = [
            ev.Report(
                Progress(
                    attempt.attempt_id,
                    Phase.DECODE,
                    cached_tokens=event.cached_tokens,
                    output_tokens=len(event.output.tokens),
                    ttft_ms=(now - attempt.started_at) * 1000,
                    remote_tokens=event.remote_tokens,
                    fetch_ms=event.fetch_ms,
                    queue_ms=event.queue_ms,
                    compute_ms=event.compute_ms,
                )
            ),
        ]
        if event.output.finish is not None:
            attempt.close(Role.DECODE if attempt.assignment.inlined else Role.PREFILL)
        if state.scores_prompt and event.prompt_logprobs is not None:
            actions.append(ev.EmitPrompt(state.generation.request_id, event.prompt_logprobs))
        if state.generation.prompt_only:
            return [*actions, *self._finish(state, Finish.LENGTH)]
        actions += self._take(state, attempt, event.output, Role.PREFILL, now)
        # Both stop by themselves: once the attempt is over, it is no longer known.
        for output in attempt.held:
            actions += self._on_decode_output(output, now)
        if not attempt.decode_open and self._running(attempt.attempt_id) is not None:
            actions += self._part(state, attempt, f"{attempt.instance_of(Role.PREFILL)} gave up the hand-over of its token", now)
        return actions

    def _on_decode_output(self, output: TokenOutput, now: float) -> list[ev.Action]:
        running = self._running(output.attempt_id)
        if running is None:
            return []
        state, attempt = running
        if attempt is not state.attempt:
            return self._on_successor(state, attempt, output, now)
        attempt.pulses[Role.DECODE].move(self._observed.now)
        if not (attempt.first_token_seen or attempt.prefill_open or attempt.assignment.inlined):
            return self._part(state, attempt, f"{attempt.instance_of(Role.DECODE)} goes on from a token that was not made", now)
        if not attempt.first_token_seen:
            attempt.held.append(output)
            return []
        attempt.prefill_open = False
        if output.finish is not None:
            attempt.close(Role.DECODE)
        if output.end > len(state.tokens):
            attempt.progressed = True
            state.fruitless = state.crowded_out = 0
            state.avoid = ()
        return self._take(state, attempt, output, Role.DECODE, now)

    def _take(self, state: RequestState, attempt: AttemptState, output: TokenOutput, side: Role, now: float) -> list[ev.Action]:
        """Emits what of `output` is new and ends the request when it says so."""
        expected = len(state.tokens)
        if output.position > attempt.end or (output.finish is not None and output.end < expected):
            message = f"{attempt.instance_of(side)} sent output position {output.position} where {attempt.end} was due"
            return self._fail(state, attempt, message, [attempt.instance_of(side)], now)
        if _differs(output, state.tokens):
            # In some precisions a node rounds as the one before it did not: the text goes on from what has been sent.
            return self._fail(state, attempt, f"{attempt.instance_of(side)} came to other tokens than those that were sent", [], now)
        attempt.end = max(attempt.end, output.end)
        actions: list[ev.Action] = []
        fresh = output.tokens[expected - output.position :]
        if fresh:
            state.tokens += [token.token_id for token in fresh]
            actions.append(ev.Emit(state.generation.request_id, fresh, state.cached_tokens or 0))
        if output.finish is not None:
            actions += self._finish(state, output.finish, output.stop_token)
        elif len(state.tokens) >= state.generation.sampling.max_tokens:
            actions += self._finish(state, Finish.LENGTH)
        elif fresh and state.move is not None and (successor := state.move.attempt) is not None:
            foretold = ForetellTokens(successor.attempt_id, expected, tuple(state.tokens[expected:]))
            actions.append(ev.Foretell(successor.instance_of(Role.DECODE), foretold))
        return actions

    # ---- failures ----

    def _on_attempt_failed(self, side: Role, failed: AttemptFailed, now: float) -> list[ev.Action]:
        running = self._running(failed.attempt_id)
        if running is None or not running[1].is_open(side):
            return []
        state, attempt = running
        attempt.close(side)
        if failed.failure.code is FailureCode.ABORTED and attempt.owes_word(side.other):
            # The other side has given the hand-over up: it has failed, or its token ends the answer. This may overtake its word of it.
            return []
        culprit, failure = attempt.instance_of(side), failed.failure
        message = f"{culprit}: {failure.message}"
        if failure.code is FailureCode.INVALID and not state.tokens:
            return self._give_up(state, InvalidRequest(failure.message))
        if failure.code is FailureCode.OVERLOADED and attempt.assignment.refusable and not state.tokens:
            return self._refused_at_admission(state, attempt, failure.message, culprit, now)
        if failure.code in _NO_ROOM:
            return self._crowd_out(state, attempt, message, now)
        if failure.code in _PARTED and not attempt.assignment.inlined:
            return self._part(state, attempt, message, now)
        return self._fail(state, attempt, message, [culprit], now)

    def _part(self, state: RequestState, attempt: AttemptState, message: str, now: float) -> list[ev.Action]:
        """Fails it: the two sides have lost each other, and whose fault that is cannot be told from here."""
        return self._fail(state, attempt, message, [attempt.instance_of(Role.PREFILL), attempt.instance_of(Role.DECODE)], now)

    def _refused_at_admission(
        self, state: RequestState, attempt: AttemptState, message: str, culprit: InstanceId, now: float
    ) -> list[ev.Action]:
        if state.refused_at_admission:
            return self._give_up(state, Overloaded(message, retry_after_s=_REFUSED_RETRY_AFTER_S, reason="refused_at_admission"))
        state.refused_at_admission = True
        # The Conductor's acceptance has been overruled; this time it may as well reject.
        state.accepted = False
        state.avoid = (*state.avoid, culprit)
        return [*self._stop_attempt(state, attempt, Phase.FAILED, culprit, message), *self._schedule(state, now)]

    def _crowd_out(self, state: RequestState, attempt: AttemptState, message: str, now: float) -> list[ev.Action]:
        """Schedules it anew, to wait for room. Nobody is avoided for being full: the Conductor knows who is."""
        if attempt is not state.attempt:
            return self._give_up_move(state, message)
        waited_s = now - attempt.started_at
        actions = self._stop_attempt(state, attempt, Phase.FAILED, why=message, full=True)
        if succeeded := self._succeeded(state, attempt, now):
            return [*actions, *succeeded]
        state.crowded_out += 1
        state.waiting_since = None  # somebody is there
        pause_s = min(self._limits.crowded_pause_s * 2 ** min(state.crowded_out - 2, 10), self._limits.crowded_pause_max_s)
        if state.crowded_out == 1 or waited_s >= pause_s:
            return [*actions, *self._schedule(state, now)]
        return [*actions, *self._retry_at(state, now + pause_s)]

    def _on_session_lost(self, event: ev.SessionLost, now: float) -> list[ev.Action]:
        actions: list[ev.Action] = []
        message = f"the connection to {event.instance_id} {'was lost' if event.connected else 'could not be made'}"
        for attempt_id in event.attempt_ids:
            running = self._running(attempt_id)
            if running is None or not running[1].is_open(event.side):
                continue
            state, attempt = running
            attempt.close(event.side)
            if attempt is not state.attempt:
                actions += self._give_up_move(state, message)
            elif event.connected:
                actions += self._fail(state, attempt, message, [event.instance_id], now)
            else:
                # It never began: no fruitless attempt, but a lack of instances that the Conductor does not know of yet.
                actions += self._stop_attempt(state, attempt, Phase.FAILED, event.instance_id, message)
                actions += (succeeded := self._succeeded(state, attempt, now))
                if not succeeded:
                    state.avoid = _merge(state.avoid, [event.instance_id])
                    actions += self._wait_for_capacity(state, message, now)
        return actions

    def _fail(
        self, state: RequestState, attempt: AttemptState, message: str, culprits: Collection[InstanceId], now: float
    ) -> list[ev.Action]:
        """Ends the attempt and schedules another, at once or after a pause, unless too many came to nothing."""
        if attempt is not state.attempt:
            return self._give_up_move(state, message)
        actions = self._stop_attempt(state, attempt, Phase.FAILED, next(iter(culprits)) if len(culprits) == 1 else "", message)
        if succeeded := self._succeeded(state, attempt, now):
            return [*actions, *succeeded]
        state.avoid = _merge(state.avoid, culprits)
        state.waiting_since = None  # somebody was there
        if not attempt.progressed:
            state.fruitless += 1
        if state.fruitless >= self._limits.max_attempts:
            error = Unavailable(f"given up after {state.fruitless} attempts without progress; the last: {message}", code="node_lost")
            return [*actions, *self._end(state, ev.Failed(error))]
        if state.fruitless <= 1:
            return [*actions, *self._schedule(state, now)]
        pause_s = min(self._limits.retry_base_s * 2 ** (state.fruitless - 2), self._limits.retry_max_s)
        return [*actions, *self._retry_at(state, now + pause_s)]

    def _on_tick(self, now: float) -> list[ev.Action]:
        actions: list[ev.Action] = []
        for request_id in [request_id for request_id, when in self._retries.items() if when <= now]:
            actions += self._retry(request_id, now)
        if now - self._looked_at < _LOOK_EVERY_S:
            return actions
        self._looked_at = now
        for state in [state for state in self._requests.values() if state.terms_left(now) is None]:
            actions += self._miss_deadline(state)
        self._observed.look(now)
        for state, attempt in self._all_running():
            if hung := attempt.hung(self._limits, self._observed.now):
                culprits = [attempt.instance_of(side) for side in hung]
                actions += self._fail(state, attempt, "; ".join(hung.values()), culprits, now)
        for state in [state for state in self._requests.values() if state.generation.patience_s < math.inf]:
            still_s = self._observed.now - state.grown_at
            if still_s >= state.generation.patience_s + (0.0 if state.attempt is None else state.attempt.longest_s):
                message = f"nothing more of the prompt has been computed for {still_s:.0f} s: there was no room, or nobody idle"
                actions += self._give_up(state, Unavailable(message, code="no_progress"))
        return actions

    # ---- nodes that hang ----

    def _on_signs(self, event: ev.Signs) -> list[ev.Action]:
        for sign in event.signs:
            running = self._running(sign.attempt_id)
            if running is not None:
                state, attempt = running
                attempt.pulses[event.side].take(sign, self._observed.now)
                if sign.computed_tokens > state.computed_tokens:
                    state.computed_tokens, state.grown_at = sign.computed_tokens, self._observed.now
        return []

    def _on_instances_hung(self, event: ev.InstancesHung, now: float) -> list[ev.Action]:
        actions: list[ev.Action] = []
        for state, attempt in self._all_running():
            refs = [attempt.ref_of(side) for side in Role if attempt.is_open(side)]
            culprits = [ref.instance_id for ref in refs if (ref.instance_id, ref.address) in event.addresses]
            if culprits:
                actions += self._fail(state, attempt, f"{', '.join(culprits)} hangs, says the Conductor", culprits, now)
        return actions

    # ---- moves ----

    def _begin_move(self, attempt_id: AttemptId, now: float) -> list[ev.Action]:
        running = self._running(attempt_id)
        if running is None or running[1] is not running[0].attempt or not running[0].movable:
            return []
        state, terms = running[0], running[0].terms_left(now)
        if terms is None:
            return []
        state.tries += 1
        state.move = Move(asked=state.attempt_id)
        self._moves[state.attempt_id] = state
        return [self._question(state, state.attempt_id, terms, successor_to=state.attempt)]

    def _start_successor(self, state: RequestState, move: Move, assignment: Assignment, now: float) -> list[ev.Action]:
        """Of the tokens that have come by now."""
        assert state.attempt is not None, "what moves runs"
        move.asked = None
        if not assignment.inlined or assignment.decode == state.attempt.assignment.decode:
            state.move = None
            why = "the Conductor has placed it where it cannot go on"
            return [ev.Report(Progress(assignment.attempt_id, Phase.MOVED)), ev.MoveGivenUp(state.generation.request_id, why)]
        state.keys = self._hashing.keys(state.generation, state.token_ids, state.keys)
        successor, start = self._begin(state, assignment, waits=False, now=now)
        move.begin(successor)
        return [ev.StartAtDecode(assignment.decode, start, successor=True)]

    def _on_successor(self, state: RequestState, successor: AttemptState, event: PrefillDone | TokenOutput, now: float) -> list[ev.Action]:
        """It has come to a token: it takes the attempt's place, or goes on to catch up, or another one is to be closer to it, or none does.
        What it comes to before it has taken the place, the client has already."""
        attempt, move = state.attempt, state.move
        assert attempt is not None and move is not None
        output = event.output if isinstance(event, PrefillDone) else event
        successor.pulses[Role.DECODE].move(self._observed.now)
        if output.end <= successor.end and output.finish is None:
            return []  # It has been here before.
        where = successor.instance_of(Role.DECODE)
        if isinstance(event, PrefillDone):
            move.first = event
        if output.position > successor.end or move.first is None:
            return self._give_up_move(state, f"{where} sent output position {output.position} where {successor.end} was due")
        if _differs(output, state.tokens) or (output.finish is not None and output.end < len(state.tokens)):
            return self._give_up_move(state, f"{where} comes to other tokens than were sent")
        behind = len(state.tokens) - output.end
        verdict = move.judge(behind, move.first.most_foretold)
        if verdict == "far":
            return self._give_up_move(state, f"{where} is {behind} tokens behind")
        if verdict == "close":
            stopped = self._stop_attempt(state, attempt, Phase.MOVED)
            actions = [*stopped, *self._take_place(state, attempt, move, max(behind, 0), now)]
            return actions if isinstance(event, PrefillDone) else [*actions, *self._on_decode_output(event, now)]
        successor.end = output.end
        if verdict == "wait":
            return []
        *aborts, report = self._stop_attempt(state, successor, Phase.MOVED, why=f"it was {behind} tokens behind")
        state.tries += 1
        begun = self._start_successor(state, move, replace(successor.assignment, attempt_id=state.attempt_id), now)
        assert move.attempt is not None
        # In this order the Conductor knows that the move goes on.
        return [*aborts, *begun, ev.TellPlaced(state.live_attempt(move.attempt)), report]

    def _take_place(self, state: RequestState, attempt: AttemptState, move: Move, behind: int | None, now: float) -> list[ev.Action]:
        """The request is the successor's from now on. `behind`: as of Moved."""
        successor = move.attempt
        assert successor is not None
        state.attempt, state.move = successor, None
        successor.sent_from = len(state.tokens)
        moved = ev.Moved(state.generation.request_id, attempt.instance_of(Role.DECODE), successor.instance_of(Role.DECODE), behind)
        return [moved] if move.first is None else [moved, *self._on_prefill_done(move.first, now)]

    def _succeeded(self, state: RequestState, failed: AttemptState, now: float) -> list[ev.Action]:
        """What is done where a successor runs, which takes the place of the attempt that has failed; nothing where there is none."""
        move, state.move = state.move, None
        if move is None:
            return []
        if move.asked is not None:
            del self._moves[move.asked]
        if move.attempt is None:
            return []
        return self._take_place(state, failed, move, None, now)

    def _give_up_move(self, state: RequestState, why: str) -> list[ev.Action]:
        actions = self._end_move(state, why)
        return [*actions, ev.MoveGivenUp(state.generation.request_id, why)]

    def _end_move(self, state: RequestState, why: str) -> list[ev.Action]:
        move = state.move
        if move is None:
            return []
        actions = [] if move.attempt is None else self._stop_attempt(state, move.attempt, Phase.MOVED, why=why)
        if move.asked is not None:
            del self._moves[move.asked]
        state.move = None
        return actions

    # ---- ends ----

    def _stop_attempt(
        self, state: RequestState, attempt: AttemptState, phase: Phase, culprit: str = "", why: str = "", full: bool = False
    ) -> list[ev.Action]:
        actions: list[ev.Action] = []
        if attempt.decode_open:
            actions.append(ev.Abort(Role.DECODE, attempt.instance_of(Role.DECODE), attempt.attempt_id))
        if attempt.prefill_open:
            actions.append(ev.Abort(Role.PREFILL, attempt.instance_of(Role.PREFILL), attempt.attempt_id))
        output_tokens = len(state.tokens) - attempt.sent_from if attempt is state.attempt else 0
        progress = Progress(attempt.attempt_id, phase, cached_tokens=attempt.cached_tokens, output_tokens=output_tokens)
        actions.append(ev.Report(progress, culprit, why, full))
        del self._by_attempt[attempt.attempt_id]
        if state.move is not None and attempt is state.move.attempt:
            state.move.attempt = None
            return actions
        state.attempt = None
        if state.generation.terms.idle:
            self._idle.found()
        return actions

    def _finish(self, state: RequestState, reason: Finish, stop_token: int | None = None) -> list[ev.Action]:
        prompt_at = None if state.attempt is None else state.attempt.assignment.prefill
        return self._end(state, ev.Finished(reason, state.cached_tokens or 0, stop_token, prompt_at))

    def _give_up(self, state: RequestState, error: SpringtideError) -> list[ev.Action]:
        return self._end(state, ev.Failed(error))

    def _end(self, state: RequestState, reply: ev.Finished | ev.Failed | ev.Cancelled) -> list[ev.Action]:
        request_id = state.generation.request_id
        actions: list[ev.Action] = []
        if isinstance(reply, ev.Failed):
            reply = ev.Failed(reply.error, state.cached_tokens or 0)
        if state.attempt is not None:
            actions += self._end_move(state, "the request has ended")
            if isinstance(reply, ev.Failed):
                actions += self._stop_attempt(state, state.attempt, Phase.FAILED, why=reply.error.message)
            else:
                actions += self._stop_attempt(state, state.attempt, Phase.FINISHED)
        if state.asked is not None:
            del self._asked[state.asked]
        self._stop_waiting(request_id)
        self._idle.leave(request_id)
        del self._requests[request_id]
        return [*actions, ev.Terminal(request_id, reply)]


def _differs(output: TokenOutput, sent: Sequence[int]) -> bool:
    """Whether it has other tokens than those that were sent at the same positions."""
    again = output.tokens[: max(len(sent) - output.position, 0)]
    return any(token.token_id != sent[output.position + place] for place, token in enumerate(again))


def _shutting_down() -> Unavailable:
    return Unavailable("this gateway is shutting down; try again", code="shutting_down")


def _merge(avoid: tuple[InstanceId, ...], more: Collection[InstanceId]) -> tuple[InstanceId, ...]:
    return (*avoid, *(instance for instance in more if instance not in avoid))
