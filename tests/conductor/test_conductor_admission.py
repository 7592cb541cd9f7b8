"""Who is refused, why, and when to come back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conductor_support import ask, assigned, bring_up, make_core, report, request

from conductor.core.conductor import ConductorCore
from conductor.core.types.decision import Placement
from conductor.core.types.events import InstanceDown, StoreDown
from springtide.clock import Tick
from springtide.ids import AttemptId, InstanceId, NodeId
from springtide.protocol.attempts import Phase, Progress
from springtide.protocol.instances import Role
from springtide.protocol.scheduling import Reason, Rejection, Schedule, Terms


def refused(core: ConductorCore, event: Schedule, now: float = 0.0) -> Rejection:
    decision = ask(core, event, now).decision
    assert isinstance(decision, Rejection), decision
    return decision


def test_a_queue_that_would_miss_the_ttft_objective_is_refused_until_it_has_drained() -> None:
    core = make_core(prefills=["p0"])
    report(core, "p0", Role.PREFILL, queue_ms=14_600)
    rejection = refused(core, request("a"))
    assert rejection.reason is Reason.TTFT
    assert rejection.retry_after_s == pytest.approx((14_600 + 401 - 10_000) / 1000)
    assert "15001 ms" in rejection.message
    assert "10000 ms" in rejection.message


def test_a_requests_own_objective_goes_before_the_clusters() -> None:
    assert refused(make_core(), request("a", ttft_slo_ms=400.0)).reason is Reason.TTFT
    assert refused(make_core(), request("a", tbt_slo_ms=12.0)).reason is Reason.TBT


def test_a_batch_that_would_miss_the_tbt_objective_is_refused_until_enough_has_finished() -> None:
    core = make_core()
    report(core, "d0", Role.DECODE, running=59, tokens=32_600)
    rejection = refused(core, request("a"))
    tbt_ms = 10 + 60 + 330.01
    assert rejection.reason is Reason.TBT
    assert rejection.retry_after_s == pytest.approx(core.state.lengths.mean_tokens * tbt_ms / 1000 * (1 - 200 / tbt_ms))


def test_recent_outputs_say_how_soon_places_become_free() -> None:
    core = make_core()
    before = core.state.lengths.mean_tokens
    assigned(core, request("a"))
    core.handle(Progress(AttemptId("a"), Phase.DECODE), 0.1)
    core.handle(Progress(AttemptId("a"), Phase.FINISHED, output_tokens=1), 0.2)
    assert core.state.lengths.mean_tokens < before


def test_the_outputs_under_way_say_it_better_than_those_that_ended() -> None:
    """Long outputs have ended here; those in whose turn the last one waits are short."""
    core = make_core(tbt_slo_ms=80.0)
    report(core, "d0", Role.DECODE, max_batch=4)
    for number in range(50):
        assigned(core, request(f"long-{number}", num_tokens=4))
        core.handle(Progress(AttemptId(f"long-{number}"), Phase.FINISHED, output_tokens=400), 0.0)
    for number in range(300):
        last = ask(core, replace(request(f"short-{number}", num_tokens=4), max_new_tokens=8))
    assert isinstance(last.decision, Placement)
    # 296 wait for four places. 75 turns of at most 8 tokens each.
    assert 70 * 8 < last.decision.wait_ms / last.decision.decode.tbt_ms <= 75 * 8


def test_a_request_waits_for_slots_while_its_objective_allows() -> None:
    core = make_core(decodes=["d0", "d1"])
    report(core, "d0", Role.DECODE, slots_available=0, running=10, tokens=1000)
    report(core, "d1", Role.DECODE, slots_available=90, running=10, tokens=1000)
    decided = ask(core, request("a"))
    assert decided.assignment is not None and decided.assignment.waits and decided.assignment.decode.instance_id == "d1"
    # 104 slots are wanted, 14 more than there are: that share of the node is free again in so much of the time of a mean output.
    own_ms = 10 + 11 + 0.01 * 1401
    wait_ms = 14 / 10_000 * core.state.lengths.mean_tokens * own_ms
    assert isinstance(decided.decision, Placement) and decided.decision.decode.wait_ms == pytest.approx(wait_ms)
    assert decided.assignment.predicted_ttft_ms == pytest.approx(wait_ms + 401)
    assert decided.assignment.prediction.ahead_ms == 0, "what it waits for is not the queue"
    assert not ask(make_core(), request("a")).assignment.waits  # type: ignore[union-attr]


def test_a_request_that_would_wait_for_room_beyond_its_objective_is_refused() -> None:
    core = make_core()
    report(core, "d0", Role.DECODE, slots_total=120, slots_available=0, slots_promised=1200, running=10, tokens=1000)
    rejection = refused(core, request("a"))
    assert rejection.reason is Reason.TTFT and rejection.retry_after_s >= 1


def test_a_request_waits_for_a_place_in_a_batch_and_tokens_come_no_slower_for_it() -> None:
    core = make_core(tbt_slo_ms=80.0)
    assigned(core, request("under way", num_tokens=4))
    report(core, "d0", Role.DECODE, running=64, tokens=64, attempt_ids=frozenset({AttemptId("under way")}))
    first, second = ask(core, request("a", num_tokens=4)), ask(core, request("b", num_tokens=4))
    assert isinstance(first.decision, Placement) and isinstance(second.decision, Placement) and first.decision.waits
    assert second.decision.wait_ms > first.decision.wait_ms
    assert first.decision.decode.tbt_ms < 80.0


def test_a_node_with_room_is_chosen_before_one_without_however_fast() -> None:
    core = make_core(decodes=["d0", "d1"])
    report(core, "d0", Role.DECODE, slots_available=103, running=0)
    report(core, "d1", Role.DECODE, slots_available=104, running=30, tokens=3000)
    assert assigned(core, request("a")).decode.instance_id == "d1"


def test_who_waits_at_a_node_has_promised_slots_there() -> None:
    core = make_core(decodes=["d0", "d1"])
    report(core, "d0", Role.DECODE, slots_available=500, slots_promised=400)
    report(core, "d1", Role.DECODE, slots_available=200)
    assert assigned(core, request("a")).decode.instance_id == "d1"


@pytest.mark.parametrize("accepted", [False, True])
def test_the_admission_check_of_a_decode_node_may_refuse_new_requests_under_admission(accepted: bool) -> None:
    assert assigned(make_core(), request("a", accepted=accepted)).refusable == (not accepted)
    assert not assigned(make_core(admission="baseline"), request("a", accepted=accepted)).refusable


def test_what_no_load_would_let_meet_an_objective_is_refused_for_good() -> None:
    for objective, reason in (({"ttft_slo_ms": 400.0}, Reason.TTFT), ({"tbt_slo_ms": 14.0}, Reason.TBT)):
        rejection = refused(make_core(**objective), request("a"))
        assert (rejection.reason, rejection.retry_after_s) == (reason, 0) and "nobody else there" in rejection.message


def test_an_output_that_nothing_ends_before_its_limit_counts_in_full_against_the_deadline() -> None:
    core = make_core()
    for _ in range(40):
        core.state.lengths.record("", 2)
    long = replace(request("a", terms=Terms(deadline_ms=1000.0)), max_new_tokens=1000)
    assert ask(core, long).assignment is not None
    assert refused(core, replace(long, min_new_tokens=1000)).reason is Reason.DEADLINE


def test_the_baseline_lets_everything_wait_that_fits_at_all() -> None:
    core = make_core(admission="baseline")
    report(core, "p0", Role.PREFILL, queue_ms=1e6)
    report(core, "p1", Role.PREFILL, queue_ms=1e6)
    report(core, "d0", Role.DECODE, slots_available=0, running=64, tokens=100_000)
    assert assigned(core, request("a")).decode.instance_id == "d0"


@pytest.mark.parametrize("admission", ["baseline", "early-rejection"])
def test_a_prompt_that_never_fits_is_refused_for_good(admission: str) -> None:
    core = make_core(admission=admission, decodes=["d0", "d1"])
    for name in ("d0", "d1"):
        report(core, name, Role.DECODE, slots_total=100, slots_available=100)
    rejection = refused(core, request("a", num_tokens=386))
    assert (rejection.reason, rejection.retry_after_s) == (Reason.TOO_LARGE, 0)
    assert "101" in rejection.message
    assert "100" in rejection.message
    assert ask(core, request("b", num_tokens=385)).assignment is not None


def test_what_is_too_large_for_the_nodes_that_are_there_waits_while_a_larger_one_is_away() -> None:
    core = make_core(decodes=["d0", "large"])
    report(core, "d0", Role.DECODE, slots_total=100, slots_available=100)
    core.handle(InstanceDown(InstanceId("large"), 1), 1.0)
    assert refused(core, request("a")).reason is Reason.NO_DECODE
    core.handle(Tick(), 40.0)
    assert refused(core, request("b"), now=40.0).reason is Reason.TOO_LARGE
    assert refused(core, request("c", accepted=True), now=40.0).reason is Reason.NO_DECODE, "it did fit once"


def test_without_a_ready_instance_there_is_no_service() -> None:
    assert refused(make_core(prefills=[]), request("a")).reason is Reason.NO_PREFILL
    assert refused(make_core(decodes=[]), request("a", accepted=True)).reason is Reason.NO_DECODE


def test_an_instance_whose_store_is_not_in_view_takes_no_requests() -> None:
    core = make_core(prefills=["p0"])
    core.handle(StoreDown(NodeId("p0")), 1.0)
    assert refused(core, request("a")).reason is Reason.NO_PREFILL
    assert not core.ready


def test_an_instance_is_out_as_soon_as_its_stream_is_lost_and_in_when_it_is_back() -> None:
    core = make_core(prefills=["p0"])
    core.handle(InstanceDown(InstanceId("p0"), 1), 1.0)
    assert refused(core, request("a")).reason is Reason.NO_PREFILL
    bring_up(core, "p0", Role.PREFILL, incarnation=2, now=2.0)
    assert assigned(core, request("b")).prefill.instance_id == "p0"


def test_an_accepted_request_is_never_refused_for_load() -> None:
    core = make_core()
    for name in ("p0", "p1"):
        report(core, name, Role.PREFILL, queue_ms=1e6)
    report(core, "d0", Role.DECODE, slots_available=0, running=64, tokens=1_000_000)
    assert refused(core, request("a")).reason is Reason.TTFT
    assert ask(core, request("b", accepted=True)).assignment is not None


def test_instances_that_just_failed_the_request_are_avoided_while_there_are_others() -> None:
    core = make_core(decodes=["d0", "d1"])
    avoid = frozenset({InstanceId("p0"), InstanceId("d0")})
    assignment = assigned(core, request("a", avoid=avoid))
    assert (assignment.prefill.instance_id, assignment.decode.instance_id) == ("p1", "d1")
    everything = avoid | {InstanceId("p1"), InstanceId("d1")}
    assert ask(core, request("b", avoid=everything)).assignment is not None
