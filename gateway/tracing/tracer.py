"""Gathers traces from what enters and leaves the gateway's core, and decides at a trace's end whether it is kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from gateway import events as ev
from gateway.objectives import Objectives
from gateway.tracing.record import AttemptTrace, GenerationTrace, RequestTrace
from springtide.ids import AttemptId, RequestId
from springtide.protocol.attempts import Phase
from springtide.protocol.instances import Role
from springtide.protocol.outputs import HandedOver, PrefillDone, TokenOutput
from springtide.protocol.scheduling import Assignment, Schedule
from springtide.protocol.starts import Request
from springtide.protocol.timings import DecodeTimes
from springtide.trace_context import TRACE_IDS, TraceContext, is_chosen, new_span_id, new_trace_id, parsed

LINGER_S = 1.0
"""A trace is looked at so long after its end: of a hand-over, nodes tell a moment after the tokens."""
MOST_ATTEMPTS = 32
"""Of a generation, of which the first and the last are told."""
MOST_REJECTED_PER_S = 10.0
_GRPC_ERRORS = ("UNKNOWN", "DEADLINE_EXCEEDED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")


class Kept(StrEnum):
    """Why a trace is kept."""

    SAMPLED = "sampled"
    """Its turn by the ratio, or the client's own trace is kept."""
    ERROR = "error"
    """The cluster could not do it."""
    ATTEMPT_LOST = "attempt_lost"
    """A node was lost on the way, and the request went on elsewhere."""
    OBJECTIVE_MISSED = "objective_missed"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which traces are kept: this share of all, and every one that did not go well."""

    ratio: float
    objectives: Objectives

    def why_kept(self, trace: RequestTrace) -> Kept | None:
        """Why, of a trace that has ended; None: it is not."""
        if _is_error(trace.status) or any(error.http_status >= 500 for error in trace.errors()):
            return Kept.ERROR
        if any(attempt.lost for generation in trace.generations for attempt in generation.attempts[:-1]):
            return Kept.ATTEMPT_LOST
        if any(self._missed(generation) for generation in trace.generations):
            return Kept.OBJECTIVE_MISSED
        if trace.context.sampled:
            return Kept.SAMPLED
        return Kept.REJECTED if trace.rejected else None

    def _missed(self, generation: GenerationTrace) -> bool:
        if not generation.promised or generation.ended_at is None:
            return False
        seen, took_s = generation.latencies, generation.ended_at - generation.arrived_at
        return self.objectives.late(seen, took_s) or self.objectives.halting(seen)


def _is_error(status: str) -> bool:
    return int(status) >= 500 if status.isdigit() else status in _GRPC_ERRORS


class Tracer:
    """The traces of the requests that run. `keep` is told of each that is kept, and why; `left_out` of each that is not."""

    def __init__(self, sampling: Sampling, keep: Callable[[RequestTrace, Kept], None], left_out: Callable[[], None]) -> None:
        self._sampling = sampling
        self._keep = keep
        self._left_out = left_out
        self._requests: dict[str, RequestTrace] = {}
        """That have not ended, by their headers."""
        self._generations: dict[RequestId, tuple[RequestTrace, GenerationTrace]] = {}
        self._attempts: dict[AttemptId, AttemptTrace] = {}
        """Also of traces that have ended, until they are looked at."""
        self._ended: deque[RequestTrace] = deque()
        self._rejections_left, self._counted_at = MOST_REJECTED_PER_S, float("-inf")

    # ---- requests ----

    def begin(self, request_id: str, traceparent: str, endpoint: str, operation: str, now: float, unix_ns: int) -> RequestTrace:
        """The trace of a request that has come at `now`, which is `unix_ns` by the wall clock: the client's, whose `traceparent` this is,
        or a new one. It ends by `end`."""
        parent = parsed(traceparent)
        trace_id = new_trace_id() if parent is None else parent.trace_id
        sampled = is_chosen(trace_id, self._sampling.ratio) if parent is None else parent.sampled
        context = TraceContext(trace_id, new_span_id(), sampled)
        trace = RequestTrace(request_id, context, parent, endpoint, operation, now, unix_ns)
        self._requests[trace.header] = trace
        TRACE_IDS.note(request_id, trace.header)
        return trace

    def end(self, trace: RequestTrace, status: str, now: float) -> None:
        """The client has its answer, or has gone. What goes on without it still belongs to the trace."""
        trace.status = status
        self._close(trace, now)

    def _close(self, trace: RequestTrace, now: float) -> None:
        trace.num_open -= 1
        if not trace.num_open:
            trace.ended_at = now
            del self._requests[trace.header]
            self._ended.append(trace)

    def look(self, now: float, linger_s: float = LINGER_S) -> None:
        """Decides on the traces that have ended so long ago."""
        while self._ended and self._ended[0].ended_at + linger_s <= now:
            trace = self._ended.popleft()
            for generation in trace.generations:
                for attempt in generation.attempts:
                    self._attempts.pop(attempt.attempt_id, None)
            why = self._sampling.why_kept(trace)
            if why is None or (why is Kept.REJECTED and not self._may_keep_rejected(now)):
                self._left_out()
            else:
                self._keep(trace, why)

    def _may_keep_rejected(self, now: float) -> bool:
        """Under load there are more rejections than of anything else."""
        gained = max(0.0, now - self._counted_at) * MOST_REJECTED_PER_S
        self._rejections_left, self._counted_at = min(MOST_REJECTED_PER_S, self._rejections_left + gained), now
        if self._rejections_left < 1:
            return False
        self._rejections_left -= 1
        return True

    # ---- what the core hears ----

    def saw(self, event: ev.Event, now: float) -> None:
        """The core is about to handle this."""
        match event:
            case TokenOutput():
                attempt = self._attempts.get(event.attempt_id)
                if attempt is not None and attempt.ended_at is None:
                    attempt.arrivals.take(event, now)
            case ev.Arrived(generation):
                self._arrived(generation, now)
            case Assignment():
                if (attempt := self._attempts.get(event.attempt_id)) is not None and attempt.assignment is None:
                    attempt.assignment, attempt.answered_at = event, now
            case ev.Rejected(attempt_id, rejection):
                self._refused(attempt_id, rejection.reason.value, rejection.message, now)
            case ev.SchedulerUnreachable(attempt_id, message):
                self._refused(attempt_id, "unreachable", message, now)
            case PrefillDone():
                attempt = self._attempts.get(event.output.attempt_id)
                if attempt is not None and attempt.done is None and attempt.ended_at is None:
                    # Log-probabilities of a prompt may be long, and are nothing to a trace.
                    attempt.done, attempt.done_at = replace(event, prompt_logprobs=None), now
            case HandedOver():
                if (attempt := self._attempts.get(event.attempt_id)) is not None:
                    attempt.handed_over, attempt.handed_over_at = event, now
            case DecodeTimes():
                if (attempt := self._attempts.get(event.attempt_id)) is not None:
                    attempt.times, attempt.times_at = event, now
            case _:
                pass

    def _arrived(self, generation: ev.Generation, now: float) -> None:
        trace = self._requests.get(generation.traceparent)
        if trace is None:
            return
        num_tokens = len(generation.prompt_ids)
        own = GenerationTrace(generation.request_id, now, num_tokens, generation.sampling, generation.tenant, generation.promised)
        trace.generations.append(own)
        trace.num_open += 1
        self._generations[generation.request_id] = trace, own

    def _refused(self, attempt_id: AttemptId, refusal: str, message: str, now: float) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is not None and not attempt.placed:
            attempt.refusal, attempt.refusal_message, attempt.answered_at = refusal, message, now

    # ---- what the core wants done ----

    def did(self, action: ev.Action, now: float) -> None:
        """The core has decided this."""
        match action:
            case ev.Emit(request_id, tokens):
                if (found := self._generations.get(request_id)) is not None:
                    found[1].emitted(len(tokens), now)
            case Schedule():
                if (found := self._generations.get(action.request_id)) is not None:
                    self._asked(found[1], action, now)
            case ev.StartAtDecode(_, start, successor):
                if successor and start.request.attempt_id not in self._attempts:
                    self._again(start.request, now)
                self._started(start.request.attempt_id, Role.DECODE, now)
            case ev.StartAtPrefill(_, start):
                self._started(start.request.attempt_id, Role.PREFILL, now)
            case ev.Report(progress) if progress.phase.over:
                attempt = self._attempts.get(progress.attempt_id)
                if attempt is not None and attempt.ended_at is None:
                    attempt.ended_at = now
                    if progress.phase is Phase.FAILED:
                        attempt.failure, attempt.culprit, attempt.full = action.why or "failed", action.culprit, action.full
            case ev.MoveGivenUp(request_id):
                if (found := self._generations.get(request_id)) is not None and not found[1].attempts[-1].placed:
                    self._attempts.pop(found[1].attempts.pop().attempt_id, None)
            case ev.Terminal(request_id, reply):
                self._terminated(request_id, reply, now)
            case _:
                pass

    def _again(self, request: Request, now: float) -> None:
        """Another successor begins where the one before it was placed."""
        found = self._generations.get(request.request_id)
        if found is None or not found[1].attempts:
            return
        attempt = AttemptTrace(
            request.attempt_id, now, len(request.token_ids), answered_at=now, assignment=found[1].attempts[-1].assignment
        )
        self._attempts[request.attempt_id] = attempt
        self._add(found[1], attempt)

    def _asked(self, generation: GenerationTrace, asked: Schedule, now: float) -> None:
        attempts = generation.attempts
        if attempts and not attempts[-1].placed:
            # Asked again for one that waits: however often that is, it is one wait.
            last = attempts[-1]
            self._attempts.pop(last.attempt_id, None)
            last.attempt_id, last.num_asked = asked.attempt_id, last.num_asked + 1
            self._attempts[asked.attempt_id] = last
            return
        attempt = AttemptTrace(asked.attempt_id, now, asked.num_tokens)
        self._attempts[asked.attempt_id] = attempt
        self._add(generation, attempt)

    def _add(self, generation: GenerationTrace, attempt: AttemptTrace) -> None:
        attempts = generation.attempts
        attempts.append(attempt)
        if len(attempts) > MOST_ATTEMPTS:
            self._attempts.pop(attempts.pop(MOST_ATTEMPTS // 2).attempt_id, None)
            generation.attempts_left_out += 1

    def _started(self, attempt_id: AttemptId, side: Role, now: float) -> None:
        if (attempt := self._attempts.get(attempt_id)) is not None:
            attempt.started_at[side] = now

    def _terminated(self, request_id: RequestId, reply: ev.Finished | ev.Failed | ev.Cancelled, now: float) -> None:
        found = self._generations.pop(request_id, None)
        if found is None:
            return
        trace, generation = found
        generation.reply, generation.ended_at, generation.cached_tokens = reply, now, reply.cached_tokens
        if generation.attempts and generation.attempts[-1].ended_at is None:
            generation.attempts[-1].ended_at = now
        self._close(trace, now)
