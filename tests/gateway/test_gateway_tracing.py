"""Which traces are kept, and what spans they are of: the gateway's core, watched by the tracer, with times by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from gateway_world import assignment, generation, instance, new_core
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import events as ev
from gateway.objectives import Objectives
from gateway.tracing.record import RequestTrace
from gateway.tracing.spans import Kind, Span, spans_of
from gateway.tracing.tracer import LINGER_S, MOST_REJECTED_PER_S, Kept, Sampling, Tracer
from springtide.clock import Tick
from springtide.errors import Unavailable
from springtide.ids import AttemptId, InstanceId
from springtide.protocol.attempts import Prediction
from springtide.protocol.instances import Role
from springtide.protocol.outputs import Finish, HandedOver, PrefillDone, SampledToken, TokenOutput
from springtide.protocol.scheduling import Reason, Rejection, Terms
from springtide.protocol.timings import DecodeTimes, PassTimes, PrefillTimes, StageTimes
from springtide.trace_context import TraceContext, TraceIds, is_chosen, new_trace_id, parsed
from tests.support.traces import children, named, unaccounted_s

FIRST, SECOND = AttemptId("r0.1"), AttemptId("r0.2")
CLIENT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", True)


class Watched:
    """One request with max_tokens 4, unless more are given, by hand. Times are in seconds after it came."""

    def __init__(self, *, ratio: float = 1.0, traceparent: str = "", idle: bool = False, tokens: int = 4) -> None:
        self.tokens = tokens
        self.kept: list[tuple[RequestTrace, Kept]] = []
        self.num_left_out = 0
        self.tracer = Tracer(Sampling(ratio, Objectives(ttft_s=5.0, tbt_s=1.0)), lambda *kept: self.kept.append(kept), self._left_out)
        self.core = new_core()
        self.now = 100.0
        self.trace = self.tracer.begin("r0", traceparent, "/v1/chat/completions", "chat", self.now, 1_700_000_000_000_000_000)
        self.trace.tell("tiny", True, 3, 1)
        own = replace(generation(0, tokens), traceparent=self.trace.header, terms=Terms(idle=idle))
        self.at(0.1, ev.Arrived(own))

    def _left_out(self) -> None:
        self.num_left_out += 1

    def at(self, after_s: float, *events: ev.Event) -> None:
        self.now = 100.0 + after_s
        for event in events:
            self.tracer.saw(event, self.now)
            for action in self.core.handle(event, self.now):
                self.tracer.did(action, self.now)
            self.core.validate()

    def first_token(self, attempt_id: AttemptId = FIRST, times: PrefillTimes | None = None) -> PrefillDone:
        position = int(attempt_id.rpartition(".")[2]) - 1
        output = TokenOutput(attempt_id, position, (SampledToken(7),))
        return PrefillDone(output, 2, remote_tokens=1, queue_ms=100.0, compute_ms=300.0, fetch_ms=200.0, fetch_wait_ms=50.0, times=times)

    def token(self, position: int, attempt_id: AttemptId = FIRST) -> TokenOutput:
        return TokenOutput(attempt_id, position, (SampledToken(7),), Finish.LENGTH if position == self.tokens - 1 else None)

    def end(self, after_s: float, status: str = "200") -> None:
        """The exchange ends, and the trace is looked at when nothing more is waited for."""
        self.now = 100.0 + after_s
        self.tracer.end(self.trace, status, self.now)
        self.tracer.look(self.now + LINGER_S)

    def served(self, *, step_s: float = 0.1) -> None:
        self.at(0.2, assignment(FIRST))
        self.at(1.0, self.first_token())
        for position in (1, 2, 3):
            self.at(1.0 + step_s * position, self.token(position))
        self.end(1.0 + step_s * 3)

    def why(self) -> Kept | None:
        return self.kept[0][1] if self.kept else None

    def spans(self) -> Sequence[Span]:
        ((trace, why),) = self.kept
        return spans_of(trace, why)


# ---- what is kept ----


def test_a_request_that_went_well_is_kept_by_the_ratio_alone() -> None:
    by_ratio = {}
    for ratio in (0.0, 1.0):
        watched = Watched(ratio=ratio)
        watched.served()
        by_ratio[ratio] = watched.why(), watched.num_left_out
    assert by_ratio == {0.0: (None, 1), 1.0: (Kept.SAMPLED, 0)}


@pytest.mark.parametrize(("sampled", "why"), [(True, Kept.SAMPLED), (False, None)])
def test_a_request_of_a_trace_is_kept_as_its_client_keeps_the_trace(sampled: bool, why: Kept | None) -> None:
    watched = Watched(ratio=0.0 if sampled else 1.0, traceparent=replace(CLIENT, sampled=sampled).header)
    watched.served()
    assert watched.why() is why and watched.trace.context.trace_id == CLIENT.trace_id


def test_what_failed_is_kept_whatever_the_ratio() -> None:
    watched = Watched(ratio=0.0)
    watched.at(0.2, ev.Rejected(FIRST, Rejection(Reason.NO_PREFILL, "nobody is there", 1.0)))
    watched.at(9.0, Tick())
    watched.at(9.0, ev.Rejected(SECOND, Rejection(Reason.NO_PREFILL, "nobody is there", 1.0)))
    watched.end(9.0, "503")
    assert watched.why() is Kept.ERROR
    root = watched.spans()[0]
    assert root.error and root.attributes["error.type"] == "no_capacity" and root.attributes["http.response.status_code"] == 503


def test_a_fault_of_the_gateway_itself_is_kept() -> None:
    watched = Watched(ratio=0.0)
    watched.at(0.2, ev.ClientGone(watched.trace.generations[0].request_id))
    watched.end(0.3, "500")
    assert watched.why() is Kept.ERROR


@pytest.mark.parametrize(("step_s", "idle", "why"), [(1.1, False, Kept.OBJECTIVE_MISSED), (0.9, False, None), (1.1, True, None)])
def test_what_misses_its_objective_between_tokens_is_kept_unless_it_is_content_with_idle_capacity(
    step_s: float, idle: bool, why: Kept | None
) -> None:
    watched = Watched(ratio=0.0, idle=idle)
    watched.served(step_s=step_s)
    assert watched.why() is why


def test_what_has_its_first_token_late_is_kept() -> None:
    watched = Watched(ratio=0.0)
    watched.at(0.2, assignment(FIRST))
    watched.at(5.2, watched.first_token())
    watched.at(5.3, ev.ClientGone(watched.trace.generations[0].request_id))
    watched.end(5.3, "499")
    assert watched.why() is Kept.OBJECTIVE_MISSED


def test_rejections_are_kept_up_to_a_rate() -> None:
    kept: list[Kept] = []
    tracer = Tracer(Sampling(0.0, Objectives(5.0, 1.0)), lambda trace, why: kept.append(why), lambda: None)
    counts = []
    for now in (0.0, 0.0, 100.0):
        for number in range(50):
            tracer.end(tracer.begin(f"r{number}", "", "/v1/completions", "text_completion", now, 0), "429", now)
        tracer.look(now + LINGER_S)
        counts.append(len(kept))
    assert counts == [MOST_REJECTED_PER_S, MOST_REJECTED_PER_S, 2 * MOST_REJECTED_PER_S] and set(kept) == {Kept.REJECTED}


def test_nothing_is_decided_before_the_last_word_can_have_come_nor_remembered_afterwards() -> None:
    watched = Watched()
    watched.at(0.2, assignment(FIRST))
    watched.at(1.0, watched.first_token())
    for position in (1, 2, 3):
        watched.at(1.1, watched.token(position))
    watched.tracer.end(watched.trace, "200", watched.now)
    watched.tracer.look(watched.now + LINGER_S / 2)
    assert not watched.kept
    watched.at(1.2, HandedOver(FIRST, 100, 50.0, 40.0))
    watched.tracer.look(watched.now + LINGER_S)
    assert [span.end for span in named(watched.spans(), "hand_over")] == [101.1], "not after the end of what it is part of"
    state = vars(watched.tracer)
    assert not any(state[name] for name in ("_requests", "_generations", "_attempts", "_ended"))


def test_what_goes_on_without_its_client_belongs_to_the_trace_until_it_ends() -> None:
    watched = Watched()
    watched.at(0.2, assignment(FIRST))
    watched.tracer.end(watched.trace, "200", watched.now)
    watched.tracer.look(watched.now + 60.0)
    assert not watched.kept
    watched.at(1.0, watched.first_token())
    for position in (1, 2, 3):
        watched.at(2.0, watched.token(position))
    watched.tracer.look(watched.now + LINGER_S)
    assert watched.spans()[0].end == 102.0


# ---- spans ----


def test_the_clients_span_is_the_parent_of_the_request_and_that_of_all_others() -> None:
    watched = Watched(traceparent=CLIENT.header)
    watched.served()
    spans = watched.spans()
    root = spans[0]
    assert (root.name, root.kind, root.parent_id) == ("chat tiny", Kind.SERVER, CLIENT.span_id)
    assert root.span_id == parsed(watched.trace.header).span_id  # type: ignore[union-attr]
    assert [span.name for span in children(spans, root)] == ["prepare", "attempt"]
    assert len({span.span_id for span in spans}) == len(spans)
    known = {CLIENT.span_id} | {span.span_id for span in spans}
    assert all(span.parent_id in known and root.begin <= span.begin <= span.end <= root.end for span in spans)


def test_the_request_has_the_attributes_of_generative_ai_and_nothing_of_what_was_said() -> None:
    watched = Watched()
    watched.served()
    attributes = dict(watched.spans()[0].attributes)
    assert attributes.pop("gen_ai.response.time_to_first_chunk") == pytest.approx(1.0)
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "springtide",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "r0",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ("length",),
        "http.response.status_code": 200,
        "springtide.endpoint": "/v1/chat/completions",
        "springtide.request.id": "r0",
        "springtide.kept": "sampled",
    }


def test_the_conductors_estimates_are_with_the_question_to_it() -> None:
    watched = Watched()
    expected = Prediction(400.0, 100.0, 20.0, 280.0, 15.0, 64.0, 120.0)
    watched.at(0.2, assignment(FIRST, predicted_ttft_ms=400.0, ttft_slo_ms=5000.0, prediction=expected))
    watched.at(1.0, watched.first_token())
    watched.at(1.1, ev.ClientGone(watched.trace.generations[0].request_id))
    watched.end(1.1)
    (schedule,) = named(watched.spans(), "schedule")
    assert schedule.kind is Kind.CLIENT and (schedule.begin, schedule.end) == (100.1, 100.2)
    said = {name.removeprefix("springtide."): value for name, value in schedule.attributes.items()}
    assert said["prefill.instance"] == "p0" and said["decode.instance"] == "d0"
    assert [said[f"predicted.{name}_ms"] for name in ("ttft", "queue", "transfer", "prefill")] == [400.0, 100.0, 20.0, 280.0]
    assert said["predicted.output_tokens"] == 64.0 and said["slo.ttft_ms"] == 5000.0


def test_a_nodes_words_are_placed_between_when_it_was_told_and_when_it_was_heard() -> None:
    watched = Watched()
    watched.at(0.2, assignment(FIRST))
    passes = (
        PassTimes(100.0, 200.0, 2, 16, 1, 10.0, (StageTimes(100.0, 90.0, 10.0), StageTimes(200.0, 80.0, 0.0))),
        PassTimes(300.0, 200.0, 18, 9),
    )
    times = PrefillTimes(age_ms=600.0, slots_ms=50.0, fetch_at_ms=20.0, fetch_bytes=4096, passes=passes)
    # It was told at 0.2 and heard at 1.0, and had it for 0.6: a tenth was lost either way.
    watched.at(1.0, watched.first_token(times=times))
    watched.at(1.15, DecodeTimes(FIRST, 800.0, 50.0, 700.0, 1, 20.0, 20.0), watched.token(1))
    watched.at(1.2, HandedOver(FIRST, 800, span_ms=400.0, write_ms=300.0), watched.token(2))
    watched.at(1.3, DecodeTimes(FIRST, 1000.0, 50.0, 700.0, 3, 90.0, 50.0), watched.token(3))
    watched.end(1.3)
    spans = watched.spans()
    (prefill,), (decode,) = named(spans, "prefill"), named(spans, "decode")
    at = {span.name: (round(span.begin - 100, 4), round(span.end - 100, 4)) for span in spans}
    assert at["prefill"] == (0.2, 1.1), "until the hand-over's end, which took a tenth to be heard of"
    assert at["queue"] == (0.3, 0.4) and at["fetch"] == (0.32, 0.52) and at["hand_over"] == (0.7, 1.1)
    assert [(round(one.begin - 100, 4), round(one.end - 100, 4)) for one in named(spans, "chunk")] == [(0.4, 0.6), (0.6, 0.8)]
    assert [(round(one.begin - 100, 4), round(one.end - 100, 4)) for one in named(spans, "stage")] == [(0.4, 0.5), (0.52, 0.6)]
    assert at["decode"] == (0.2, 1.3) and at["reserve"] == (0.25, 0.3) and at["ingest"] == (0.3, 0.95) and at["steps"] == (0.95, 1.3)
    assert [span.name for span in children(spans, prefill)] == ["queue", "fetch", "chunk", "chunk", "hand_over"]
    assert [span.name for span in children(spans, decode)] == ["reserve", "ingest", "steps"]
    assert {span.parent_id for span in named(spans, "stage")} == {named(spans, "chunk")[0].span_id}
    (fetch,), (over,) = named(spans, "fetch"), named(spans, "hand_over")
    said = ("springtide.bytes", "springtide.transfer_ms", "springtide.waited_ms", "springtide.hidden_ms")
    assert [fetch.attributes[name] for name in said] == [4096, 200.0, 50.0, 150.0]
    assert [over.attributes[name] for name in said] == [800, 300.0, pytest.approx(100.0), pytest.approx(200.0)]
    (steps,) = named(spans, "steps")
    assert {name.removeprefix("springtide."): pytest.approx(value) for name, value in steps.attributes.items()} == {
        "steps": 3,
        "tokens": 3,
        "mean_gap_ms": 75.0,
        "longest_gap_ms": 100.0,
        "mean_step_ms": 30.0,
        "longest_step_ms": 50.0,
    }


@settings(max_examples=200, deadline=None)
@given(
    age_ms=st.floats(0, 5000),
    queue_ms=st.floats(0, 5000),
    began=st.floats(0, 5000),
    took=st.floats(0, 5000),
    part=st.floats(0, 5000),
)
def test_whatever_a_node_says_no_span_is_outside_of_its_parent(
    age_ms: float, queue_ms: float, began: float, took: float, part: float
) -> None:
    watched = Watched()
    watched.at(0.2, assignment(FIRST))
    one = PassTimes(began, took, 0, 9, stages=(StageTimes(part, took, began),))
    done = watched.first_token(times=PrefillTimes(age_ms, queue_ms, began, 1, (one,)))
    watched.at(1.0, replace(done, queue_ms=queue_ms, fetch_ms=took))
    watched.at(1.1, DecodeTimes(FIRST, age_ms, began, took, 1, 1.0, 1.0), HandedOver(FIRST, 1, part, took))
    watched.at(1.2, ev.ClientGone(watched.trace.generations[0].request_id))
    watched.end(1.2)
    spans = watched.spans()
    by_id = {span.span_id: span for span in spans}
    for span in spans[1:]:
        parent = by_id[span.parent_id]
        assert parent.begin <= span.begin <= span.end <= parent.end, (span, parent)


def test_a_lost_node_ends_its_attempt_with_an_error_and_the_next_attempt_is_linked_to_it() -> None:
    watched = Watched(ratio=0.0)
    watched.at(0.2, assignment(FIRST))
    watched.at(1.0, watched.first_token())
    watched.at(1.1, watched.token(1))
    watched.at(1.5, ev.SessionLost(Role.DECODE, InstanceId("d0"), (FIRST,), True))
    watched.at(1.6, assignment(SECOND))
    watched.at(2.0, PrefillDone(TokenOutput(SECOND, 2, (SampledToken(7),)), 0))
    watched.at(2.1, watched.token(3, SECOND))
    watched.end(2.1)
    assert watched.why() is Kept.ATTEMPT_LOST
    spans = watched.spans()
    first, second = named(spans, "attempt")
    assert "d0" in first.error and first.attributes["springtide.culprit"] == "d0" and not second.error and not spans[0].error
    assert (first.links, second.links) == ((), (first.span_id,))
    assert [span.error for span in named(spans, "prefill")] == ["", ""], "it had done its part"
    assert [bool(span.error) for span in named(spans, "decode")] == [True, False]
    assert (round(first.end - 100, 4), round(second.begin - 100, 4)) == (1.5, 1.5)
    assert unaccounted_s(spans) < 1e-6


def test_only_the_side_that_was_at_work_has_failed() -> None:
    watched = Watched(ratio=0.0)
    watched.at(0.2, assignment(FIRST))
    watched.at(0.6, ev.SessionLost(Role.PREFILL, InstanceId("p0"), (FIRST,), True))
    watched.at(0.7, assignment(SECOND))
    watched.at(1.0, PrefillDone(TokenOutput(SECOND, 0, (SampledToken(7),)), 0))
    watched.at(1.1, ev.ClientGone(watched.trace.generations[0].request_id))
    watched.end(1.1)
    spans = watched.spans()
    assert [bool(span.error) for span in named(spans, "prefill")] == [True, False]
    assert not any(span.error for span in named(spans, "decode"))


def test_however_often_it_is_asked_again_waiting_for_a_place_is_one_span() -> None:
    watched = Watched()
    for asked, after_s in enumerate((0.2, 0.5, 0.9, 1.4), 1):
        refused = ev.Rejected(AttemptId(f"r0.{asked}"), Rejection(Reason.NO_DECODE, "nobody is there", 1.0))
        watched.at(after_s, refused)
        watched.at(after_s + 0.25, Tick())
    watched.at(1.7, assignment(AttemptId("r0.5")))
    watched.at(1.8, ev.ClientGone(watched.trace.generations[0].request_id))
    watched.end(1.8)
    (schedule,) = named(watched.spans(), "schedule")
    assert (schedule.begin, schedule.end) == (100.1, 101.7)
    assert schedule.attributes["springtide.schedule.asked"] == 5
    assert schedule.attributes["springtide.schedule.refusal"] == "no_decode"


def test_the_time_between_attempts_is_a_span_of_its_own() -> None:
    watched = Watched()
    watched.at(0.2, assignment(FIRST))
    for number, after_s in ((1, 0.3), (2, 0.4)):
        watched.at(after_s, ev.SessionLost(Role.PREFILL, InstanceId("p0"), (AttemptId(f"r0.{number}"),), True))
        if number == 1:
            watched.at(0.3, assignment(SECOND))
    watched.at(2.0, Tick())
    watched.at(2.0, ev.ClientGone(watched.trace.generations[0].request_id))
    watched.end(2.0)
    spans = watched.spans()
    assert [(round(one.begin - 100, 3), round(one.end - 100, 3)) for one in named(spans, "wait")] == [(0.4, 2.0)]
    assert unaccounted_s(spans) < 1e-6


def test_errors_in_the_middle_of_nothing_end_what_is_open() -> None:
    watched = Watched(ratio=0.0)
    watched.at(0.2, assignment(FIRST))
    watched.at(0.5, ev.Shutdown())
    assert isinstance(watched.trace.errors()[0], Unavailable)
    watched.end(0.5, "503")
    assert [span.end for span in named(watched.spans(), "attempt")] == [100.5]


# ---- trace contexts ----


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
    ],
)
def test_what_is_no_traceparent_begins_a_trace_of_its_own(header: str) -> None:
    assert parsed(header) is None
    tracer = Tracer(Sampling(1.0, Objectives(1.0, 1.0)), lambda *kept: None, lambda: None)
    trace = tracer.begin("r", header, "/v1/completions", "text_completion", 0.0, 0)
    assert trace.parent is None and parsed(trace.header) == trace.context


def test_a_later_version_of_traceparent_may_say_more() -> None:
    assert parsed("01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more") == CLIENT


def test_about_as_many_traces_are_chosen_as_the_ratio_says_and_with_a_greater_one_those_too() -> None:
    trace_ids = [new_trace_id() for _ in range(20_000)]
    tenth = {trace_id for trace_id in trace_ids if is_chosen(trace_id, 0.1)}
    assert 0.08 < len(tenth) / len(trace_ids) < 0.12
    assert all(is_chosen(trace_id, 0.2) for trace_id in tenth)
    assert not any(is_chosen(trace_id, 0.0) for trace_id in trace_ids) and all(is_chosen(trace_id, 1.0) for trace_id in trace_ids)


def test_the_log_finds_the_trace_of_a_request_of_its_choices_and_of_their_attempts() -> None:
    known = TraceIds(most=2)
    for name in ("old", "a", "b"):
        known.note(name, CLIENT.header)
    known.note("c", "nonsense")
    assert [known.of("a"), known.of("a/1"), known.of_attempt("a.3"), known.of_attempt("a/1.2")] == [CLIENT.trace_id] * 4
    assert known.of("old") is None and known.of("c") is None


# ---- requests that move ----


def moving(watched: Watched) -> None:
    """At 1.2 s its successor begins at d1, with two tokens of output."""
    watched.at(0.2, assignment(FIRST))
    watched.at(1.0, watched.first_token(), watched.token(1))
    watched.at(1.1, ev.MovesWanted((FIRST,)))
    watched.at(1.2, assignment(SECOND, instance("d1"), instance("d1")))


def done(attempt_id: AttemptId, position: int) -> PrefillDone:
    return PrefillDone(TokenOutput(attempt_id, position, (SampledToken(7),)), 2)


def test_a_request_that_moves_has_both_attempts_and_waits_for_nothing() -> None:
    watched = Watched()
    moving(watched)
    watched.at(1.3, done(SECOND, 2))
    watched.at(1.5, watched.token(3, SECOND))
    watched.end(1.5)
    (trace, why), spans = watched.kept[0], watched.spans()
    assert why is Kept.SAMPLED and [attempt.attempt_id for attempt in trace.generations[0].attempts] == [FIRST, SECOND]
    assert [(span.begin, span.end) for span in named(spans, "attempt")] == [(100.1, 101.3), (101.1, 101.5)]
    assert not named(spans, "wait")


def test_a_move_that_is_refused_leaves_nothing_in_the_trace() -> None:
    watched = Watched()
    watched.at(0.2, assignment(FIRST))
    watched.at(1.0, watched.first_token(), watched.token(1))
    watched.at(1.1, ev.MovesWanted((FIRST,)))
    watched.at(1.2, ev.Rejected(SECOND, Rejection(Reason.NO_DECODE, "no other has room", 1.0)))
    watched.at(1.5, watched.token(2), watched.token(3))
    watched.end(1.5)
    assert [attempt.attempt_id for attempt in watched.kept[0][0].generations[0].attempts] == [FIRST]


def test_a_successor_that_is_far_behind_and_the_one_after_it_are_there_too_and_no_wait_after_the_last() -> None:
    watched = Watched(tokens=40)
    moving(watched)
    for position in range(2, 30):
        watched.at(1.2 + position / 200, watched.token(position))
    watched.at(1.4, done(SECOND, 2))
    third = AttemptId("r0.3")
    watched.at(1.5, ev.SessionLost(Role.DECODE, InstanceId("d1"), (third,), connected=True))
    for position in range(30, 40):
        watched.at(1.5 + position / 200, watched.token(position))
    watched.end(1.695)
    (trace, why), spans = watched.kept[0], watched.spans()
    assert why is Kept.SAMPLED, "nothing was lost that the request depended on"
    attempts = trace.generations[0].attempts
    assert [attempt.attempt_id for attempt in attempts] == [FIRST, SECOND, third]
    assert attempts[2].placed and attempts[2].num_tokens == 3 + 30
    assert not named(spans, "wait")
