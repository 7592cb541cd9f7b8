"""Who is refused, why, and when to come back."""

from __future__ import annotations

import pytest
from conductor_support import ask, assigned, bring_up, make_core, report, request

from conductor.core.conductor import ConductorCore
from conductor.core.decision import Reason, Rejection
from conductor.core.events import Advance, InstanceDown, Phase, Role, Schedule, StoreDown
from springtide.ids import AttemptId, InstanceId, NodeId


def refused(core: ConductorCore, event: Schedule) -> Rejection:
    outcome = ask(core, event).outcome
    assert isinstance(outcome, Rejection), outcome
    return outcome


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
    assert rejection.retry_after_s == pytest.approx(core.state.mean_output_tokens * tbt_ms / 1000 * (1 - 200 / tbt_ms))


def test_recent_outputs_say_how_soon_places_become_free() -> None:
    core = make_core()
    before = core.state.mean_output_tokens
    assigned(core, request("a"))
    core.handle(Advance(AttemptId("a"), Phase.DECODE), 0.1)
    core.handle(Advance(AttemptId("a"), Phase.FINISHED, output_tokens=1), 0.2)
    assert core.state.mean_output_tokens < before


def test_no_free_slots_at_any_decode_node_is_refused() -> None:
    core = make_core(decodes=["d0", "d1"])
    for name in ("d0", "d1"):
        report(core, name, Role.DECODE, slots_available=100)
    rejection = refused(core, request("a"))
    assert rejection.reason is Reason.NO_SLOTS
    assert rejection.retry_after_s >= 1


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
    rejection = refused(core, request("a", num_tokens=400))
    assert (rejection.reason, rejection.retry_after_s) == (Reason.TOO_LARGE, 0)
    assert "101" in rejection.message
    assert "100" in rejection.message
    assert ask(core, request("b", num_tokens=399)).assignment is not None


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
