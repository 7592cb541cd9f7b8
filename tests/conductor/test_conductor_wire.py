"""Figures that are none never reach the core: a NaN would pass every comparison that admission makes."""

from __future__ import annotations

import math

import pytest

from conductor.core.types.decision import Reason
from conductor.server import wire
from springtide.cost import PrefillCost
from springtide.errors import InvalidRequest
from springtide.rpc import common_pb2, conductor_pb2, node_pb2


@pytest.mark.parametrize("queue_ms", [math.nan, math.inf, -1.0])
def test_a_queue_that_is_no_length_of_time_is_refused(queue_ms: float) -> None:
    with pytest.raises(ValueError, match="queue_ms of prefill-0"):
        wire.load(node_pb2.LoadReport(instance_id="prefill-0", queue_ms=queue_ms))


def test_a_groups_slowest_share_comes_with_its_cost_model() -> None:
    def cost(share: float) -> PrefillCost | None:
        return wire.load(node_pb2.LoadReport(cost=node_pb2.CostModel(prefill=(1.0, 2.0, 3.0), slowest_share=share))).prefill_cost

    assert cost(0.0) == PrefillCost(1.0, 2.0, 3.0)
    assert cost(0.25) == PrefillCost(1.0, 2.0, 3.0, 0.25)
    for share in (-1.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="slowest_share"):
            cost(share)


@pytest.mark.parametrize("coefficients", [(1.0, math.nan, 0.0), (math.inf, 0.0, 0.0), (1.0, -0.1, 0.0), (1.0, 2.0)])
def test_a_cost_model_that_is_none_is_refused(coefficients: tuple[float, ...]) -> None:
    for phase in ("prefill", "decode"):
        with pytest.raises(ValueError, match=rf"cost\.{phase} of some-node"):
            wire.load(node_pb2.LoadReport(instance_id="some-node", cost=node_pb2.CostModel(**{phase: coefficients})))


@pytest.mark.parametrize("objective", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("name", ["ttft_slo_ms", "tbt_slo_ms", "deadline_ms"])
def test_an_objective_that_is_no_length_of_time_is_refused_by_name(name: str, objective: float) -> None:
    context = common_pb2.AttemptContext(attempt_id="a")
    request = conductor_pb2.ScheduleRequest(context=context, num_tokens=10, **{name: objective})
    with pytest.raises(InvalidRequest, match=name):
        wire.schedule_event(request, 64)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("name", ["ttft_ms", "fetch_ms", "queue_ms", "compute_ms"])
def test_a_measurement_that_is_no_length_of_time_counts_as_not_told(name: str, value: float) -> None:
    report = conductor_pb2.AttemptReport(progress=conductor_pb2.Progress(attempt_id="a", **{name: value}))
    (event,) = wire.report_events(conductor_pb2.AdvanceRequest(reports=[report]))
    assert getattr(event, name) == 0


def test_whose_request_it_is_and_how_important_reaches_the_core() -> None:
    context = common_pb2.AttemptContext(attempt_id="a", tenant="acme", priority=-3)
    event = wire.schedule_event(conductor_pb2.ScheduleRequest(context=context, num_tokens=10, deadline_ms=2_500), 64)
    assert (event.tenant, event.priority, event.deadline_ms) == ("acme", -3, 2_500)


def test_every_reason_has_a_name_on_the_wire() -> None:
    names = {conductor_pb2.RejectionReason.Name(wire.REASONS[reason]) for reason in Reason}
    assert names == {f"REJECTION_REASON_{reason.name}" for reason in Reason}
