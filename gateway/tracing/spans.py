"""The spans of a trace, made of its record when it has ended.

What other machines say counts from when an attempt came to them, on their clocks. It is placed between when the gateway sent the attempt
there and when it heard: what that took longer than they say is halved between the two ways. So a span is never outside of what it is a part
of, whatever the wall clocks of the machines say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gateway import events as ev
from gateway.tracing.record import AttemptTrace, GenerationTrace, RequestTrace
from gateway.tracing.tracer import Kept
from springtide.protocol.instances import Role
from springtide.protocol.outputs import PrefillDone
from springtide.protocol.timings import PassTimes, PrefillTimes
from springtide.trace_context import new_span_id

PROVIDER = "springtide"
_LEAST_WAIT_S = 0.001
"""Between two attempts; less is what deciding takes."""

Attributes = Mapping[str, Any]


class Kind(Enum):
    """What a span is to others, by OpenTelemetry's names."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class Span:
    """One span. `begin` and `end` are seconds on the gateway's clock."""

    name: str
    span_id: str
    parent_id: str
    """Empty where it has none."""
    begin: float
    end: float
    attributes: Attributes = field(default_factory=dict)
    kind: Kind = Kind.INTERNAL
    links: tuple[str, ...] = ()
    """Other spans of the trace, by id."""
    error: str = ""
    """What went wrong in it, for people; empty: nothing."""
    events: tuple[tuple[str, float], ...] = ()


def spans_of(trace: RequestTrace, why: Kept) -> list[Span]:
    """All spans, the request's own first, and parents before their children."""
    spans = _Spans(trace)
    spans.request(why)
    return spans.made


def _present(**attributes: Any) -> dict[str, Any]:
    """Those that are there, with their dots for `__`."""
    return {name.replace("__", "."): value for name, value in attributes.items() if value is not None and value != ""}


class _Spans:
    def __init__(self, trace: RequestTrace) -> None:
        self._trace = trace
        self.made: list[Span] = []

    def _add(self, name: str, parent_id: str, begin: float, end: float, attributes: Attributes, **more: Any) -> str:
        span_id = new_span_id()
        self.made.append(Span(name, span_id, parent_id, begin, max(begin, end), attributes, **more))
        return span_id

    # ---- the request ----

    def request(self, why: Kept) -> None:
        trace = self._trace
        errors = trace.errors()
        error = errors[0] if errors else None
        attributes = {
            **_present(
                gen_ai__operation__name=trace.operation,
                gen_ai__provider__name=PROVIDER,
                gen_ai__request__model=trace.model,
                gen_ai__response__model=trace.model,
                gen_ai__response__id=trace.request_id,
                gen_ai__request__stream=trace.stream,
                gen_ai__request__choice__count=trace.num_choices if trace.num_choices > 1 else None,
                springtide__endpoint=trace.endpoint,
                springtide__request__id=trace.request_id,
                springtide__kept=why.value,
                error__type=(error.code or type(error).__name__) if error is not None else None,
            ),
            **_status(trace.status),
            **self._generated(),
        }
        failed = why is Kept.ERROR
        first = [generation.first_token_at for generation in trace.generations if generation.first_token_at is not None]
        self.made.append(
            Span(
                f"{trace.operation} {trace.model}".strip(),
                trace.context.span_id,
                "" if trace.parent is None else trace.parent.span_id,
                trace.began_at,
                trace.ended_at,
                attributes,
                Kind.SERVER,
                error=(error.message if error is not None else trace.status) if failed else "",
                events=(("first token", min(first)),) if first else (),
            )
        )
        begun = min((generation.arrived_at for generation in trace.generations), default=trace.ended_at)
        self._add("prepare", trace.context.span_id, trace.began_at, begun, {})
        for index, generation in enumerate(trace.generations):
            self._generation(index, generation)

    def _generated(self) -> dict[str, Any]:
        """What the request's generations have in common, and came to."""
        trace, generations = self._trace, self._trace.generations
        if not generations:
            return {}
        sampling = generations[0].sampling
        firsts = [one.first_token_at - trace.began_at for one in generations if one.first_token_at is not None]
        return _present(
            gen_ai__request__max_tokens=sampling.max_tokens,
            gen_ai__request__temperature=sampling.temperature,
            gen_ai__request__top_p=sampling.top_p,
            gen_ai__request__top_k=sampling.top_k or None,
            gen_ai__usage__input_tokens=trace.num_prompt_tokens,
            gen_ai__usage__output_tokens=sum(one.num_output_tokens for one in generations),
            gen_ai__usage__cache_read__input_tokens=generations[0].cached_tokens,
            gen_ai__response__finish_reasons=tuple(one.reply.reason.value for one in generations if isinstance(one.reply, ev.Finished))
            or None,
            gen_ai__response__time_to_first_chunk=min(firsts) if firsts else None,
            springtide__tenant=generations[0].tenant,
        )

    # ---- generations and attempts ----

    def _generation(self, index: int, generation: GenerationTrace) -> None:
        until, before = generation.arrived_at, ""
        several = {"springtide.choice": index} if len(self._trace.generations) > 1 else {}
        for number, attempt in enumerate(generation.attempts, 1):
            if attempt.asked_at - until > _LEAST_WAIT_S:
                self._add("wait", self._trace.context.span_id, until, attempt.asked_at, several)
            before = self._attempt(number, attempt, generation, before, several)
            until = max(until, attempt.ended_at or until)  # one that was to take the place of another may have ended before it
        if generation.ended_at is not None and generation.ended_at - until > _LEAST_WAIT_S:
            self._add("wait", self._trace.context.span_id, until, generation.ended_at, several)

    def _attempt(self, number: int, attempt: AttemptTrace, generation: GenerationTrace, before: str, several: Attributes) -> str:
        """Returns its id. `before`: that of the attempt before it, to which it is linked."""
        ended_at = self._trace.ended_at if attempt.ended_at is None else attempt.ended_at
        ending = _present(
            springtide__failure=attempt.failure, springtide__culprit=attempt.culprit, springtide__no_room=attempt.full or None
        )
        attributes = {"springtide.attempt.id": attempt.attempt_id, "springtide.attempt.number": number, **several, **ending}
        failed = attempt.failure if attempt.lost else ""
        span_id = self._add(
            "attempt", self._trace.context.span_id, attempt.asked_at, ended_at, attributes, links=(before,) if before else (), error=failed
        )
        self._schedule(span_id, attempt, ended_at)
        if attempt.placed:
            _Attempt(self._add, span_id, attempt, ended_at).all_of_it()
        return span_id

    def _schedule(self, parent_id: str, attempt: AttemptTrace, ended_at: float) -> None:
        """The question to the Conductor, with what it expects of where it has placed the attempt."""
        attributes = _present(
            springtide__prompt__tokens=attempt.num_tokens,
            springtide__schedule__asked=attempt.num_asked,
            springtide__schedule__refusal=attempt.refusal,
            springtide__schedule__message=attempt.refusal_message,
        )
        if (assignment := attempt.assignment) is not None:
            expected = assignment.prediction
            attributes |= _present(
                springtide__prefill__instance=assignment.prefill.instance_id,
                springtide__decode__instance=assignment.decode.instance_id,
                springtide__inlined=assignment.inlined,
                springtide__waits=assignment.waits,
                springtide__local_blocks=assignment.local_blocks,
                springtide__sources=tuple(source.node_id for source in assignment.sources) or None,
                springtide__source_blocks=assignment.sources[0].num_blocks if assignment.sources else None,
                springtide__predicted__ttft_ms=assignment.predicted_ttft_ms,
                springtide__predicted__queue_ms=expected.queue_ms,
                springtide__predicted__transfer_ms=expected.transfer_ms,
                springtide__predicted__prefill_ms=expected.prefill_ms,
                springtide__predicted__tbt_ms=assignment.predicted_tbt_ms,
                springtide__predicted__output_tokens=expected.output_tokens,
                springtide__predicted__ahead_ms=expected.ahead_ms,
                springtide__slo__ttft_ms=assignment.ttft_slo_ms,
                springtide__slo__tbt_ms=assignment.tbt_slo_ms,
            )
        end = ended_at if attempt.answered_at is None else attempt.answered_at
        self._add("schedule", parent_id, attempt.asked_at, end, attributes, kind=Kind.CLIENT)


class _Attempt:
    """The spans of an attempt that was placed."""

    def __init__(self, add: Any, span_id: str, attempt: AttemptTrace, ended_at: float) -> None:
        self._add = add
        self._span_id = span_id
        self._attempt = attempt
        self._ended_at = ended_at
        self._inlined = attempt.assignment is not None and attempt.assignment.inlined

    def all_of_it(self) -> None:
        prefill_side = Role.DECODE if self._inlined else Role.PREFILL
        begun_at = self._attempt.started_at.get(prefill_side)
        if begun_at is not None:
            self._prefill(prefill_side, begun_at)
        begun_at = self._attempt.started_at.get(Role.DECODE)
        if begun_at is not None:
            self._decode(begun_at)

    def _prefill(self, side: Role, begun_at: float) -> None:
        attempt, done = self._attempt, self._attempt.done
        attributes = {"springtide.instance": attempt.instance_of(side), "springtide.role": side.value}
        if done is None or attempt.done_at is None:
            self._add("prefill", self._span_id, begun_at, self._ended_at, attributes, error=attempt.failure if attempt.lost else "")
            return
        attributes |= _present(
            springtide__prompt__tokens=attempt.num_tokens,
            springtide__cached_tokens=done.cached_tokens,
            springtide__remote_tokens=done.remote_tokens,
            springtide__queue_ms=done.queue_ms,
            springtide__compute_ms=done.compute_ms,
        )
        latency_s = 0.0
        if done.times is not None:
            latency_s = _latency_s(begun_at, attempt.done_at, done.times.age_ms)
            attributes |= _present(springtide__chunks_left_out=done.times.passes_left_out or None)
        over = attempt.handed_over
        over_at = attempt.done_at if over is None else min(max(attempt.done_at, attempt.handed_over_at - latency_s), self._ended_at)
        span_id = self._add("prefill", self._span_id, begun_at, over_at, attributes, events=(("first token", attempt.done_at),))
        if done.times is not None:
            self._computed(span_id, done, done.times, begun_at + latency_s, attempt.done_at)
        if over is not None and over.num_bytes:
            waited_ms = max(0.0, over_at - attempt.done_at) * 1000
            transferred = _transferred(over.num_bytes, over.write_ms, waited_ms)
            self._add("hand_over", span_id, max(begun_at, over_at - over.span_ms / 1000), over_at, transferred)

    def _computed(self, parent_id: str, done: PrefillDone, times: PrefillTimes, zero: float, end: float) -> None:
        """What the node says of a prompt: `zero` is when the attempt came there."""

        def at(after_ms: float) -> float:
            return min(zero + after_ms / 1000, end)

        slots = {"springtide.slots_ms": times.slots_ms}
        self._add("queue", parent_id, zero, at(done.queue_ms), slots)
        if done.fetch_ms > 0:
            fetched = {"springtide.tokens": done.remote_tokens, **_transferred(times.fetch_bytes, done.fetch_ms, done.fetch_wait_ms)}
            self._add("fetch", parent_id, at(times.fetch_at_ms), at(times.fetch_at_ms + done.fetch_ms), fetched)
        for number, one in enumerate(times.passes):
            self._chunk(parent_id, number, one, at(one.at_ms), at(one.at_ms + one.took_ms))

    def _chunk(self, parent_id: str, number: int, one: PassTimes, begin: float, end: float) -> None:
        attributes = {
            "springtide.chunk": number,
            "springtide.start": one.start,
            "springtide.tokens": one.num_tokens,
            "springtide.others": one.others,
            "springtide.waited_ms": one.waited_ms,
        }
        span_id = self._add("chunk", parent_id, begin, end, attributes)
        for stage, part in enumerate(one.stages):
            stage_end = min(begin + part.end_ms / 1000, end)
            stage_begin = max(begin, stage_end - (part.busy_ms + part.waited_ms) / 1000)
            busy = {"springtide.stage": stage, "springtide.busy_ms": part.busy_ms, "springtide.waited_ms": part.waited_ms}
            self._add("stage", span_id, stage_begin, stage_end, busy)

    def _decode(self, begun_at: float) -> None:
        attempt, times, arrivals = self._attempt, self._attempt.times, self._attempt.arrivals
        attributes = {"springtide.instance": attempt.instance_of(Role.DECODE), "springtide.role": Role.DECODE.value}
        failed = attempt.failure if attempt.lost and attempt.done is not None else ""
        span_id = self._add("decode", self._span_id, begun_at, self._ended_at, attributes, error=failed)
        stepping_at = attempt.done_at
        if times is not None:
            zero = begun_at + _latency_s(begun_at, attempt.times_at, times.age_ms)
            slots_at, prompt_at = (min(zero + after_ms / 1000, self._ended_at) for after_ms in (times.slots_ms, times.prompt_ms))
            self._add("reserve", span_id, zero, slots_at, {})
            if not self._inlined:
                self._add("ingest", span_id, slots_at, prompt_at, {})
            stepping_at = prompt_at
        if stepping_at is None or (times is None and not arrivals.steps):
            return
        steps = _present(
            springtide__steps=arrivals.steps,
            springtide__tokens=arrivals.tokens,
            springtide__mean_gap_ms=1000 * arrivals.gaps_s / (arrivals.steps - 1) if arrivals.steps > 1 else None,
            springtide__longest_gap_ms=1000 * arrivals.longest_gap_s if arrivals.steps > 1 else None,
        )
        if times is not None and times.steps > 1:
            steps |= {"springtide.mean_step_ms": times.steps_ms / times.steps, "springtide.longest_step_ms": times.longest_step_ms}
        self._add("steps", span_id, stepping_at, self._ended_at, steps)


def _latency_s(sent_at: float, heard_at: float, age_ms: float) -> float:
    """What a message takes one way, if it takes the same both ways: of the time in between, what the other side has not had it."""
    return max(0.0, heard_at - sent_at - age_ms / 1000) / 2


def _transferred(num_bytes: int, took_ms: float, waited_ms: float) -> dict[str, Any]:
    """Of a transfer: `hidden_ms` is what of it was in nobody's way."""
    return {
        "springtide.bytes": num_bytes,
        "springtide.transfer_ms": took_ms,
        "springtide.waited_ms": waited_ms,
        "springtide.hidden_ms": max(0.0, took_ms - waited_ms),
    }


def _status(status: str) -> dict[str, Any]:
    if status.isdigit():
        return {"http.response.status_code": int(status)}
    return {"rpc.response.status_code": status} if status else {}
