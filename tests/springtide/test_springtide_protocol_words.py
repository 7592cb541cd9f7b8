"""Words of the protocol refuse what makes no sense, by the name of the field: a NaN would pass every comparison that admission makes."""

from __future__ import annotations

import math

import pytest

from springtide.cost import DecodeCost, PrefillCost
from springtide.errors import InvalidRequest
from springtide.ids import AttemptId
from springtide.protocol import wire
from springtide.protocol.attempts import Phase, Progress
from springtide.protocol.scheduling import MAX_DEADLINE_MS, Reason, Terms
from springtide.rpc import common_pb2, conductor_pb2, node_pb2


@pytest.mark.parametrize("queue_ms", [math.nan, math.inf, -1.0])
def test_a_queue_that_is_no_length_of_time_is_refused(queue_ms: float) -> None:
    with pytest.raises(ValueError, match="queue_ms"):
        wire.LOAD_REPORT.decode(node_pb2.LoadReport(instance_id="prefill-0", load=node_pb2.Load(queue_ms=queue_ms)))


def test_a_groups_slowest_share_comes_with_its_cost_model() -> None:
    def cost(share: float) -> PrefillCost | None:
        model = node_pb2.PrefillCost(fixed_ms=1.0, per_token_ms=2.0, per_pair_ms=3.0, slowest_share=share)
        return wire.LOAD.decode(node_pb2.Load(prefill_cost=model)).prefill_cost

    assert cost(1.0) == PrefillCost(1.0, 2.0, 3.0)
    assert cost(0.25) == PrefillCost(1.0, 2.0, 3.0, 0.25)
    for share in (-1.0, 0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="slowest_share"):
            cost(share)


def test_a_load_without_a_cost_model_has_none() -> None:
    load = wire.LOAD.decode(node_pb2.Load(running=3))
    assert (load.running, load.prefill_cost, load.decode_cost) == (3, None, None)


@pytest.mark.parametrize("coefficient", [math.nan, math.inf, -0.1])
def test_a_cost_model_that_is_none_is_refused(coefficient: float) -> None:
    for make in (PrefillCost, DecodeCost):
        with pytest.raises(ValueError, match=f"{make.__name__}.fixed_ms"):
            make(coefficient, 0.0, 0.0)


@pytest.mark.parametrize("objective", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("name", ["ttft_slo_ms", "tbt_slo_ms"])
def test_an_objective_that_is_no_length_of_time_is_refused_by_name(name: str, objective: float) -> None:
    with pytest.raises(InvalidRequest, match=name):
        wire.SCHEDULE.decode(conductor_pb2.ScheduleRequest(attempt_id="a", num_tokens=10, **{name: objective}))


@pytest.mark.parametrize("deadline_ms", [math.nan, math.inf, -1.0, MAX_DEADLINE_MS + 1])
def test_a_deadline_that_is_none_is_refused_by_name(deadline_ms: float) -> None:
    message = conductor_pb2.ScheduleRequest(attempt_id="a", num_tokens=10, terms=common_pb2.Terms(deadline_ms=deadline_ms))
    with pytest.raises(InvalidRequest, match="deadline_ms") as caught:
        wire.SCHEDULE.decode(message)
    assert caught.value.param == "deadline_ms"


def test_what_is_left_of_the_terms_after_a_while() -> None:
    assert Terms(priority=2, deadline_ms=500.0).after(100.0) == Terms(priority=2, deadline_ms=400.0)
    assert Terms(priority=2, deadline_ms=500.0).after(500.0) is None
    assert Terms(priority=2).after(1e9) == Terms(priority=2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("name", ["ttft_ms", "fetch_ms", "queue_ms", "compute_ms"])
def test_a_measurement_that_is_no_length_of_time_counts_as_not_told(name: str, value: float) -> None:
    message = conductor_pb2.Progress(attempt_id="a", phase=conductor_pb2.PHASE_DECODE, **{name: value})
    assert wire.PROGRESS.decode(message) == Progress(AttemptId("a"), Phase.DECODE)


def test_whose_request_it_is_and_how_important_reaches_the_core() -> None:
    terms = common_pb2.Terms(priority=-3, deadline_ms=2_500)
    asked = wire.SCHEDULE.decode(conductor_pb2.ScheduleRequest(attempt_id="a", tenant="acme", num_tokens=10, terms=terms))
    assert (asked.tenant, asked.terms) == ("acme", Terms(priority=-3, deadline_ms=2_500))
    assert wire.SCHEDULE.decode(conductor_pb2.ScheduleRequest(attempt_id="a", num_tokens=10)).terms == Terms()


def test_every_reason_has_a_name_on_the_wire() -> None:
    assert {f"REASON_{reason.name}" for reason in Reason} | {"REASON_UNSPECIFIED"} == set(conductor_pb2.Reason.keys())
