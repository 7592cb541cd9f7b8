"""Does what the gateway's core decides: asks the Conductor, commands the nodes, hands tokens to the answers, keeps the time."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway import events as ev
from gateway import metrics
from gateway.conductor_link import ConductorLink
from gateway.core import GatewayCore
from gateway.genai_metrics import GenAiMetrics
from gateway.objectives import Latencies, Objectives
from gateway.sessions import SessionPool
from gateway.tracing.tracer import Tracer
from springtide.clock import Clock, Tick
from springtide.credentials import OPEN, Credentials
from springtide.errors import SpringtideError
from springtide.ids import RequestId
from springtide.protocol.attempts import Phase
from springtide.protocol.instances import Role
from springtide.protocol.outputs import PromptLogprobs, SampledToken
from springtide.protocol.scheduling import Schedule, ScheduleReply
from springtide.protocol.starts import AbortAttempt
from springtide.supervision import end, supervised

logger = logging.getLogger(__name__)

TICK_S = 0.5


class Sink(Protocol):
    """Takes the output of one generation. Called by the runner, never again after `end`."""

    def prompt(self, logprobs: PromptLogprobs) -> None:
        """Where the generation asks for them: once, before all else."""
        ...

    def accepted(self) -> None:
        """The Conductor has placed it; with each attempt."""
        ...

    def emit(self, tokens: Sequence[SampledToken], cached_tokens: int) -> bool:
        """The next tokens, and how many of the prompt's were found in the pool, the same each time. True when a stop string ended the text
        with these."""
        ...

    def end(self, reply: ev.Finished | ev.Failed | ev.Cancelled) -> None: ...


@dataclass(slots=True)
class _Served:
    sink: Sink
    num_prompt_tokens: int
    tenant: str
    arrived_at: float
    promised: bool
    """It is held to the objectives."""
    exemplar: dict[str, str]
    operation: str
    latencies: Latencies = field(default_factory=Latencies)
    num_output_tokens: int = 0
    attempts: int = 0


class Runner:
    """The one place where events enter the core and its actions are done. Used from the event loop only."""

    def __init__(
        self,
        core: GatewayCore,
        conductor: ConductorLink,
        clock: Clock,
        objectives: Objectives,
        credentials: Credentials = OPEN,
        tracer: Tracer | None = None,
        genai: GenAiMetrics | None = None,
    ) -> None:
        self._core = core
        self._conductor = conductor
        self._clock = clock
        self._objectives = objectives
        metrics.show_objectives(objectives)
        self._tracer = tracer
        self._genai = genai
        self._sessions = SessionPool(self.post, credentials)
        self._served: dict[RequestId, _Served] = {}
        self._events: deque[ev.Event] = deque()
        self._draining = False
        self.leaving = False
        """The gateway ends what it has, and wants no more."""
        self._retry: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._ticker = supervised(self._tick, "gateway-tick")

    @property
    def num_running(self) -> int:
        """Requests that have not had their terminal reply."""
        return len(self._served)

    def shut_down(self) -> None:
        """Answers everything that still runs; later requests are answered at once."""
        self.post(ev.Shutdown())

    async def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        await end(*self._tasks, self._ticker)
        await self._sessions.close()

    def launch(self, generation: ev.Generation, sink: Sink) -> None:
        self._served[generation.request_id] = _Served(
            sink,
            len(generation.prompt_ids),
            generation.tenant,
            self._clock.now(),
            generation.promised,
            metrics.exemplar(generation.request_id, generation.traceparent),
            generation.operation,
        )
        self.post(ev.Arrived(generation))

    def cancel(self, request_id: RequestId) -> None:
        self.post(ev.ClientGone(request_id))

    def post(self, event: ev.Event) -> None:
        """Events that come up while another's actions are done wait their turn."""
        self._events.append(event)
        if self._draining:
            return
        self._draining = True
        try:
            while self._events:
                event, now = self._events.popleft(), self._clock.now()
                if self._tracer is not None:
                    self._tracer.saw(event, now)
                for action in self._core.handle(event, now):
                    if self._tracer is not None:
                        self._tracer.did(action, now)
                    self._do(action)
        finally:
            self._draining = False
        self._set_retry()

    def _do(self, action: ev.Action) -> None:
        match action:
            case Schedule():
                self._spawn(self._schedule(action))
            case ev.StartAtDecode(instance, start, successor):
                if not successor:
                    self._count_attempt(start.request.request_id)
                self._sessions.start(Role.DECODE, instance, start)
            case ev.StartAtPrefill(instance, start):
                self._sessions.start(Role.PREFILL, instance, start)
            case ev.Abort(side, instance_id, attempt_id):
                self._sessions.tell(side, instance_id, AbortAttempt(attempt_id))
            case ev.Foretell(instance_id, tokens):
                self._sessions.tell(Role.DECODE, instance_id, tokens)
            case ev.Emit(request_id, tokens):
                self._emit(request_id, action)
                metrics.OUTPUT_TOKENS.inc(len(tokens))
            case ev.EmitPrompt(request_id, logprobs):
                if (served := self._served.get(request_id)) is not None:
                    served.sink.prompt(logprobs)
            case ev.Report():
                self._report(action)
            case ev.TellPlaced(placed):
                self._conductor.report(placed)
            case ev.Moved(request_id, source, target, behind):
                metrics.MOVES.labels("moved").inc()
                if behind is not None:
                    metrics.MOVED_BEHIND.observe(behind)
                logger.info("goes on at %s, no longer at %s", target, source, extra={"request_id": request_id})
            case ev.MoveGivenUp(request_id, why):
                metrics.MOVES.labels("given_up").inc()
                logger.info("does not move: %s", why, extra={"request_id": request_id})
            case ev.Terminal(request_id, reply):
                self._end(request_id, reply)

    def _count_attempt(self, request_id: RequestId) -> None:
        served = self._served.get(request_id)
        if served is None:
            return
        served.attempts += 1
        if served.attempts > 1:
            metrics.RESCHEDULES.inc()
        served.sink.accepted()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _schedule(self, action: Schedule) -> None:
        ids = {"request_id": action.request_id, "attempt_id": action.attempt_id}
        try:
            reply = await self._conductor.schedule(action)
        except SpringtideError as error:
            logger.warning("not scheduled: %s", error.message, extra=ids)
            self.post(ev.SchedulerUnreachable(action.attempt_id, error.message))
        except Exception as error:
            # A request must not wait for ever for an answer that makes no sense.
            logger.exception("not scheduled", extra=ids)
            self.post(ev.SchedulerUnreachable(action.attempt_id, f"the Conductor's answer cannot be taken in: {error!r}"))
        else:
            self._answered(action, reply)

    def _answered(self, action: Schedule, reply: ScheduleReply) -> None:
        ids = {"request_id": action.request_id, "attempt_id": action.attempt_id}
        if (assignment := reply.assignment) is not None:
            logger.debug("runs on %s and %s", assignment.prefill.instance_id, assignment.decode.instance_id, extra=ids)
            self.post(assignment)
        elif reply.rejection is not None:
            logger.info("not placed: %s", reply.rejection.message, extra=ids)
            self.post(ev.Rejected(action.attempt_id, reply.rejection))
        else:
            logger.error("the Conductor's answer is empty", extra=ids)
            self.post(ev.SchedulerUnreachable(action.attempt_id, "the Conductor's answer is empty"))

    def _report(self, action: ev.Report) -> None:
        progress = action.progress
        if progress.phase.over:
            self._sessions.forget(progress.attempt_id)
        if progress.phase is Phase.FAILED:
            ids = {"attempt_id": progress.attempt_id}
            if action.full:
                logger.info("waits for room after %d tokens: %s", progress.output_tokens, action.why, extra=ids)
                metrics.CROWDED_OUT.inc()
            else:
                logger.warning("attempt failed after %d tokens: %s", progress.output_tokens, action.why, extra=ids)
                metrics.count_failed_attempt(action.culprit)
        self._conductor.report(progress)

    def _emit(self, request_id: RequestId, action: ev.Emit) -> None:
        served = self._served.get(request_id)
        if served is None:
            return
        after_s, seen = self._clock.now() - served.arrived_at, served.latencies
        gap_s = seen.emitted(len(action.tokens), after_s)
        if gap_s is None:
            metrics.TTFT_SECONDS.observe(after_s, served.exemplar)
        else:
            # Tokens that were guessed come several at a time: each counts.
            for _ in action.tokens:
                metrics.TBT_SECONDS.observe(gap_s, served.exemplar if gap_s == seen.longest_gap_s else None)
        served.num_output_tokens += len(action.tokens)
        try:
            stopped = served.sink.emit(action.tokens, action.cached_tokens)
        except Exception:
            del self._served[request_id]
            _end_without_words(request_id, served.sink)
            self.post(ev.ClientGone(request_id))
            return
        if stopped:
            self.post(ev.StopStringHit(request_id))

    def _end(self, request_id: RequestId, reply: ev.Finished | ev.Failed | ev.Cancelled) -> None:
        outcome = reply.reason.value if isinstance(reply, ev.Finished) else type(reply).__name__.lower()
        metrics.TERMINALS.labels(outcome).inc()
        if isinstance(reply, ev.Failed):
            metrics.FAILURES.labels(reply.error.code or "none").inc()
            # What the client did, or a refusal under load, is no trouble of ours; there may be very many of them.
            level = logging.WARNING if reply.error.http_status >= 500 else logging.INFO
            logger.log(level, "request failed: %s", reply.error.message, extra={"request_id": request_id})
        served = self._served.pop(request_id, None)
        if served is None:
            return
        took_s = self._clock.now() - served.arrived_at
        if served.promised:
            metrics.count_objectives(served.tenant, served.latencies, took_s, reply, self._objectives)
        if self._genai is not None and served.promised:
            self._genai.ended(served.operation, served.latencies, took_s, served.num_output_tokens, reply)
        if isinstance(reply, ev.Finished):
            metrics.E2E_SECONDS.observe(took_s, served.exemplar)
            metrics.count_tokens(served.tenant, served.num_prompt_tokens, reply.cached_tokens, served.num_output_tokens)
            logger.info(
                "request finished (%s): %d prompt tokens, %d of them cached; %d output tokens; %.0f ms; attempts: %d",
                reply.reason,
                served.num_prompt_tokens,
                reply.cached_tokens,
                served.num_output_tokens,
                took_s * 1000,
                served.attempts,
                extra={"request_id": request_id},
            )
        try:
            served.sink.end(reply)
        except Exception:
            _end_without_words(request_id, served.sink)

    # ---- time ----

    def _set_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        deadline = self._core.next_deadline()
        if deadline is not None:
            delay_s = max(0.0, deadline - self._clock.now())
            self._retry = asyncio.get_running_loop().call_later(delay_s, self.post, Tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.post(Tick())
            if self._tracer is not None:
                self._tracer.look(self._clock.now())


def _end_without_words(request_id: RequestId, sink: Sink) -> None:
    """Whatever is wrong with one request's text must not hold up the others' events. Called where the exception is known."""
    logger.exception("output cannot be put into words", extra={"request_id": request_id})
    sink.end(ev.Failed(SpringtideError("internal error: the output cannot be put into words")))
