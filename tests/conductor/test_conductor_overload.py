"""What is predicted to go wrong under load, and who goes first. A token takes 1 ms to compute; a decode step takes 10 ms, 1 ms more for
each attempt and 0.01 ms for each token of context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from conductor_support import ask, assigned, make_core, ref, report, request

from conductor.core.admission.rules import ADMISSIONS
from conductor.core.conductor import ConductorCore
from conductor.core.placement.scheduler import decide
from conductor.core.scoring import ErrorWindow
from conductor.core.types.decision import Alternatives, Placement
from conductor.core.types.events import InstanceDown, InstanceUp, PrefillFinished, Quantity, Score, Scored
from springtide.ids import AttemptId, InstanceId
from springtide.protocol.attempts import Phase, Progress
from springtide.protocol.instances import Role
from springtide.protocol.scheduling import Reason, Rejection, Schedule, Terms
from springtide.slices import at_once

PREDICTED = "early-rejection-predicted"
REJECTING = [name for name in ADMISSIONS if name != "baseline"]


def refused(core: ConductorCore, event: Schedule, now: float = 0.0) -> Rejection:
    decided = ask(core, event, now)
    assert isinstance(decided.decision, Rejection), decided.decision
    assert decide(Alternatives.from_json(decided.alternatives.to_json())) == decided.decision, "the log line says otherwise"
    return decided.decision


def admitted(core: ConductorCore, event: Schedule, now: float = 0.0) -> bool:
    decided = ask(core, event, now)
    assert decide(Alternatives.from_json(decided.alternatives.to_json())) == decided.decision, "the log line says otherwise"
    return isinstance(decided.decision, Placement)


def learn_outputs(core: ConductorCore, output_tokens: int, tenant: str = "") -> None:
    """As many as make everybody forget what was before."""
    for _ in range(1100):
        core.state.lengths.record(tenant, output_tokens)


def decoding(core: ConductorCore, names: list[str], num_tokens: int = 401, now: float = 0.0) -> None:
    """These attempts are in d0's batch, and it has said so."""
    for name in names:
        assigned(core, request(name, num_tokens=num_tokens, accepted=True), now)
        core.handle(Progress(AttemptId(name), Phase.DECODE), now)
    count = len(names)
    report(core, "d0", Role.DECODE, now, running=count, tokens=count * num_tokens, attempt_ids=frozenset(map(AttemptId, names)))


# ---- the load now, and the load at the end of the prefill ----


def test_early_rejection_does_not_see_who_is_still_in_prefill_and_the_prediction_does() -> None:
    """Twelve prompts at once: their decodes together miss the objective of 60 ms, but none of them decodes yet."""
    for admission, number in (("early-rejection", 12), (PREDICTED, 9), ("early-rejection-request", 9)):
        core = make_core(prefills=[f"p{i}" for i in range(12)], admission=admission, tbt_slo_ms=60.0)
        learn_outputs(core, 10_000)
        assert sum(admitted(core, request(f"a{i}", text=i)) for i in range(12)) == number, "5 ms an attempt of 401 tokens"


def test_early_rejection_refuses_for_who_will_have_left_and_the_prediction_does_not() -> None:
    """A full batch that needs 10 more tokens each, and a prefill of 4 s."""
    for admission, is_in in (("early-rejection", False), (PREDICTED, True), ("early-rejection-request", True)):
        core = make_core(prefills=["p0"], admission=admission, tbt_slo_ms=60.0)
        learn_outputs(core, 10)
        decoding(core, [f"b{i}" for i in range(12)])
        assert admitted(core, request("a", num_tokens=4001)) is is_in


def test_the_prediction_is_for_the_moment_when_this_requests_prefill_ends() -> None:
    """Long prompts are in flight, which end in 7 s. A short one is over before; one that ends with them is not."""
    core = make_core(prefills=[f"p{i}" for i in range(5)], admission=PREDICTED, tbt_slo_ms=1000.0)
    learn_outputs(core, 20)
    for i in range(4):
        assigned(core, request(f"long{i}", num_tokens=7001, text=i))
    assert admitted(core, request("short", num_tokens=101, tbt_slo_ms=200.0))
    assert refused(core, request("like them", num_tokens=7001, text=9, tbt_slo_ms=200.0)).reason is Reason.TBT


def test_the_request_level_counts_who_joins_its_node_while_it_decodes() -> None:
    for admission, is_in in ((PREDICTED, True), ("early-rejection-request", False)):
        core = make_core(prefills=[f"p{i}" for i in range(5)], admission=admission, tbt_slo_ms=1000.0)
        learn_outputs(core, 2000)
        for i in range(4):
            assigned(core, request(f"long{i}", num_tokens=7001, text=i))
        short = request("short", num_tokens=101, tbt_slo_ms=200.0)
        assert admitted(core, replace(short, attempt_id=AttemptId("soon over")))
        assert admitted(core, replace(short, max_new_tokens=2000)) is is_in


@pytest.mark.parametrize("admission", REJECTING)
def test_an_instance_whose_stream_came_back_is_judged_by_its_last_report(admission: str) -> None:
    core = make_core(admission=admission)
    core.handle(InstanceDown(InstanceId("d0"), 1), 1.0)
    core.handle(InstanceUp(ref("d0", Role.DECODE), 1), 1.2)
    assert admitted(core, request("a"), now=1.3)


@pytest.mark.parametrize("admission", REJECTING)
def test_a_node_that_keeps_its_objective_takes_requests_whatever_the_others_do(admission: str) -> None:
    core = make_core(decodes=["d0", "d1"], admission=admission)
    report(core, "d0", Role.DECODE, running=60, tokens=2_000_000)
    assert assigned(core, request("a")).decode.instance_id == "d1"


# ---- priorities ----


def test_low_priority_is_refused_at_a_lower_load_than_high() -> None:
    core = make_core(prefills=["p0"], admission=PREDICTED)
    for number in range(10):
        assert admitted(core, request(f"a{number}", num_tokens=5, terms=Terms(priority=number % 2)))
    report(core, "p0", Role.PREFILL, queue_ms=8_500)
    rejection = refused(core, request("low", terms=Terms(priority=0)))
    assert rejection.reason is Reason.PRIORITY
    assert rejection.retry_after_s >= 1
    assert admitted(core, request("high", terms=Terms(priority=1)))
    report(core, "p0", Role.PREFILL, queue_ms=9_700)
    assert refused(core, request("high too", terms=Terms(priority=1))).reason is Reason.TTFT
    assert refused(core, request("low too", terms=Terms(priority=0))).reason is Reason.TTFT, "that would not have helped"


def test_an_idle_cluster_refuses_nobody_for_a_low_priority() -> None:
    core = make_core(admission=PREDICTED, ttft_slo_ms=405.0, tbt_slo_ms=15.05)
    for number in range(5):
        assert admitted(core, request(f"high{number}", num_tokens=5, terms=Terms(priority=9)))
        core.handle(Progress(AttemptId(f"high{number}"), Phase.FINISHED), 0.0)
    assert admitted(core, request("a", terms=Terms(priority=0))), "it takes 401 ms, and 15.01 ms a token"


def test_slots_are_kept_free_for_high_priority_too() -> None:
    core = make_core(prefills=["p0"], admission=PREDICTED)
    for number in range(10):
        assert admitted(core, request(f"a{number}", num_tokens=5, terms=Terms(priority=1)))
    report(core, "d0", Role.DECODE, slots_available=1_500)
    assert refused(core, request("low", terms=Terms(priority=0))).reason is Reason.PRIORITY
    assert admitted(core, request("high", terms=Terms(priority=1)))


# ---- size ----


BUSY = {"running": 25, "tokens": 100}
"""A step of d0 takes 36 ms then."""


def sized_core(busy: Mapping[str, int], **changes: object) -> ConductorCore:
    """With d0 so busy, it has been asked for nine short requests. One with a context of 401 tokens takes some 9 times the mean with it."""
    core = make_core(prefills=["p0"], admission=PREDICTED, overload_short_first=True, **changes)
    report(core, "d0", Role.DECODE, **busy)
    for number in range(9):
        assert admitted(core, request(f"short{number}", num_tokens=5, text=number))
        core.handle(Progress(AttemptId(f"short{number}"), Phase.FINISHED), 0.0)
    return core


def test_under_load_what_takes_much_of_the_decode_pool_is_refused_before_what_takes_little() -> None:
    core = sized_core(BUSY, tbt_slo_ms=45.0)
    rejection = refused(core, request("long"))
    assert rejection.reason is Reason.SIZE and "several smaller requests" in rejection.message
    assert admitted(core, request("short", num_tokens=5))
    report(core, "d0", Role.DECODE, running=50, tokens=100)
    assert refused(core, request("long too")).reason is Reason.TBT, "a smaller one would fare no better"


def test_a_long_output_is_large_too() -> None:
    core = sized_core(BUSY, tbt_slo_ms=45.0)
    learn_outputs(core, 1000)
    long = replace(request("long", num_tokens=5), max_new_tokens=1000)
    assert refused(core, long).reason is Reason.SIZE
    assert admitted(core, replace(long, attempt_id=AttemptId("short"), max_new_tokens=1))


def test_what_takes_much_may_wait_less_for_slots() -> None:
    core = sized_core({"slots_available": 0, "slots_promised": 45_000})
    rejection = refused(core, request("long"))
    assert rejection.reason is Reason.SIZE and "the wait for a first token would be 86" in rejection.message
    assert admitted(core, request("short", num_tokens=5))
    alone = make_core(admission=PREDICTED)
    report(alone, "d0", Role.DECODE, slots_available=0, slots_promised=45_000)
    assert admitted(alone, request("long")), "its objective of 10 s would be met"


def test_a_pool_that_was_not_busy_of_late_keeps_nothing_free() -> None:
    core = sized_core({})
    report(core, "d0", Role.DECODE, slots_available=1_500)
    assert admitted(core, request("long"))


def test_a_queue_before_the_prefill_is_no_reason_to_refuse_the_large_first() -> None:
    core = sized_core({})
    report(core, "p0", Role.PREFILL, queue_ms=9_000)
    assert admitted(core, request("long"))


def test_an_idle_cluster_refuses_nobody_for_being_large() -> None:
    core = sized_core({}, ttft_slo_ms=405.0, tbt_slo_ms=15.05)
    assert admitted(core, request("long")), "it takes 401 ms, and 15.01 ms a token"


def test_what_has_a_higher_priority_gives_way_to_nothing_smaller_below_it() -> None:
    core = sized_core(BUSY, tbt_slo_ms=45.0)
    assert admitted(core, request("important", terms=Terms(priority=1)))


# ---- tenants ----


def test_under_load_a_tenant_above_its_share_is_refused_first() -> None:
    core = make_core(prefills=["p0"], admission=PREDICTED)
    for number in range(40):
        assigned(core, request(f"g{number}", num_tokens=100, tenant="greedy"))
        core.handle(Progress(AttemptId(f"g{number}"), Phase.FINISHED), 0.0)
    report(core, "p0", Role.PREFILL, queue_ms=20_000)
    for number in range(80):
        assert refused(core, request(f"h{number}", num_tokens=100, tenant="hungry")).reason is Reason.TTFT
    report(core, "p0", Role.PREFILL, queue_ms=9_000, now=1.0)
    assert refused(core, request("more", num_tokens=100, tenant="greedy"), now=1.0).reason is Reason.TENANT_SHARE
    assert admitted(core, request("some", num_tokens=100, tenant="hungry"), now=1.0)
    report(core, "p0", Role.PREFILL, queue_ms=1_000, now=1.1)
    assert admitted(core, request("again", num_tokens=100, tenant="greedy"), now=1.1), "there is no overload any more"


# ---- deadlines ----


@pytest.mark.parametrize("admission", sorted(ADMISSIONS))
def test_a_deadline_that_prefill_and_decode_cannot_keep_is_refused(admission: str) -> None:
    core = make_core(prefills=["p0"], admission=admission)
    learn_outputs(core, 16)
    decode_ms = 16 * (10 + 1 + 4.01)
    assert admitted(core, request("a", terms=Terms(deadline_ms=401 + decode_ms + 1)))
    core.handle(Progress(AttemptId("a"), Phase.FAILED), 0.0)
    rejection = refused(core, request("b", terms=Terms(deadline_ms=401 + decode_ms - 1)))
    assert (rejection.reason, rejection.retry_after_s) == (Reason.DEADLINE, 0), "an idle cluster could not keep it either"
    report(core, "p0", Role.PREFILL, queue_ms=5_000)
    rejection = refused(core, request("c", terms=Terms(deadline_ms=401 + decode_ms + 1)))
    assert rejection.reason is Reason.DEADLINE
    assert rejection.retry_after_s == pytest.approx(5.0, abs=0.01)


# ---- what was predicted, and what came ----


def test_an_attempt_that_ended_is_scored_by_what_was_predicted_of_it() -> None:
    core = make_core(prefills=["p0"])
    learn_outputs(core, 16)
    assigned(core, request("a"))
    prefilled = Progress(AttemptId("a"), Phase.DECODE, ttft_ms=500, queue_ms=50, compute_ms=400)
    assert core.handle(prefilled, 0.5) == [PrefillFinished(AttemptId("a"), 401.0, 500, 401, 0)]
    (scored,) = core.handle(Progress(AttemptId("a"), Phase.FINISHED, output_tokens=11), 0.8)
    assert isinstance(scored, Scored)
    assert {score.quantity: (score.predicted, score.actual) for score in scored.scores} == {
        Quantity.TTFT: (401.0, 500),
        Quantity.QUEUE: (0.0, 50),
        Quantity.PREFILL: (401.0, 400),
        Quantity.OUTPUT_TOKENS: (16.0, 11),
        Quantity.TBT: (pytest.approx(15.01), pytest.approx(30.0)),
    }
    assert [Quantity(summary.quantity) for summary in core.scores.errors.summaries()] == [
        Quantity.TTFT,
        Quantity.QUEUE,
        Quantity.PREFILL,
        Quantity.TBT,
        Quantity.OUTPUT_TOKENS,
    ]


def test_what_failed_or_was_placed_by_another_conductor_is_not_scored() -> None:
    core = make_core()
    assigned(core, request("a"))
    assert core.handle(Progress(AttemptId("a"), Phase.FAILED, output_tokens=3), 0.8) == []
    assert core.scores.errors.summaries() == []


def test_errors_are_summed_up_over_the_recent_predictions() -> None:
    errors = ErrorWindow()
    for _ in range(2000):
        errors.record(Score(Quantity.TTFT, 1.0, 1000.0))
    for number in range(1024):
        errors.record(Score(Quantity.TTFT, 120.0 if number % 4 else 50.0, 100.0))
    (summary,) = errors.summaries()
    assert (summary.count, summary.median_error, summary.p90_error) == (1024, pytest.approx(0.2), pytest.approx(0.5))
    assert summary.bias == pytest.approx((3 * 0.2 - 0.5) / 4)


# ---- load ----


def test_load_is_the_objectives_satisfaction() -> None:
    core = make_core(prefills=["p0", "p1"], decodes=["d0", "d1"])
    assert (at_once(core.pool_loads(0.0)).prefill, at_once(core.pool_loads(0.0)).decode) == (0, 0)
    report(core, "p0", Role.PREFILL, queue_ms=5_000)
    decoding(core, [f"b{i}" for i in range(10)], num_tokens=201)
    loads = at_once(core.pool_loads(0.0))
    assert loads.prefill == pytest.approx((5_000 / 10_000 + 0) / 2)
    assert loads.by_instance[InstanceId("p0")] == pytest.approx(0.5)
    assert loads.by_instance[InstanceId("d0")] > 0
    assigned(core, request("in prefill", num_tokens=1001))
    assert at_once(core.pool_loads(0.0)).decode == loads.decode, "what is in prefill counts there"
    assert at_once(core.pool_loads(0.0)).prefill > loads.prefill
