"""When a decode node computes a prompt itself. A sequence more takes 1 ms of a step of 10 ms, a context token 0.001 ms."""

from __future__ import annotations

from typing import Any

import pytest
from conductor_support import ask, assigned, hold, keys_of, make_core, report, request

from conductor.core.conductor import ConductorCore
from conductor.core.placement.scheduler import decide
from conductor.core.types.decision import Alternatives, Placement
from conductor.server.grpc_service import schedule_reply
from springtide.cost import DecodeCost
from springtide.ids import AttemptId, Incarnation, InstanceId, NodeId
from springtide.protocol.attempts import Phase, Progress
from springtide.protocol.instances import Role
from springtide.protocol.scheduling import Assignment
from springtide.protocol.storage import BlocksStored, Tier

NUM_TOKENS = 415
"""103 full blocks: 15 tokens are left of a decode node's 100."""
COST = DecodeCost(fixed_ms=10.0, per_sequence_ms=1.0, per_context_token_ms=0.001)


def report_d0(core: ConductorCore, **fields: Any) -> None:
    report(core, "d0", Role.DECODE, decode_cost=COST, **fields)


def cluster(queue_ms: float = 50.0, **changes: Any) -> ConductorCore:
    """Both prefill instances and d0 have the same prefix; a prefill group is slow to begin."""
    core = make_core(decodes=["d0", "d1"], **{"inline_tokens": 20, **changes})
    hold(core, "d0", keys_of(100))
    report_d0(core)
    for name in ("p0", "p1"):
        hold(core, name, keys_of(100))
        report(core, name, Role.PREFILL, queue_ms=queue_ms)
    return core


def place(core: ConductorCore, name: str = "a", **fields: Any) -> Assignment:
    return assigned(core, request(name, num_tokens=NUM_TOKENS, **fields))


def placement(core: ConductorCore, name: str) -> Placement:
    decision = ask(core, request(name, num_tokens=NUM_TOKENS)).decision
    assert isinstance(decision, Placement)
    return decision


def inlined(assignment: Assignment) -> bool:
    return assignment.prefill == assignment.decode


def test_a_prompt_that_is_computed_as_a_whole_goes_to_a_prefill_group_and_is_predicted_without_reuse() -> None:
    core = cluster(queue_ms=0.0)
    reusing, whole = place(cluster(inline_tokens=0, queue_ms=0.0)), place(core, whole_prompt=True)
    assert not inlined(whole) and (whole.local_blocks, whole.sources) == (0, ())
    assert whole.prediction.prefill_ms > 2 * reusing.prediction.prefill_ms


def test_a_prompt_whose_prefix_a_decode_node_has_is_computed_there_when_that_is_sooner() -> None:
    assignment = place(cluster())
    assert inlined(assignment) and assignment.decode.instance_id == "d0"
    assert (assignment.local_blocks, assignment.sources) == (100, ())
    assert assignment.predicted_ttft_ms == pytest.approx(10 + 15 * (1 + 0.415))
    assert assignment.predicted_tbt_ms == pytest.approx(11 + 0.415)


def test_each_token_of_a_prompt_is_charged_for_the_whole_prefix() -> None:
    core = cluster(queue_ms=500)
    for name in ("d0", "p0", "p1"):
        hold(core, name, keys_of(2000), sequence=1)
    assignment = assigned(core, request("a", num_tokens=8015))
    assert inlined(assignment) and assignment.predicted_ttft_ms == pytest.approx(10 + 15 * (1 + 8.015))


def test_steps_in_flight_are_waited_for() -> None:
    core = cluster()
    report_d0(core, running=2, tokens=0)
    assert place(core).predicted_ttft_ms == pytest.approx(1.5 * (13 + 0.415) + 13 + 0.415 + 14 * (1 + 0.415))


def test_prompts_that_the_node_is_to_compute_before_are_waited_for() -> None:
    core = cluster(queue_ms=500)
    first, second = placement(core, "a"), placement(core, "b")
    assert first.inlined and second.inlined
    assert first.prefill.queue_ms == 0.0
    assert second.prefill.queue_ms == pytest.approx(1.5 * second.decode.tbt_ms + first.prefill.prefill_ms)
    assert not inlined(place(core, "elsewhere", avoid=frozenset({InstanceId("d0")})))
    core.handle(Progress(AttemptId("a"), Phase.DECODE, cached_tokens=400, ttft_ms=40.0, queue_ms=1.0, compute_ms=29.0), 1.0)
    third = placement(core, "c")
    assert third.inlined
    assert third.prefill.queue_ms == pytest.approx(1.5 * third.decode.tbt_ms + second.prefill.prefill_ms)


def test_a_node_whose_batch_is_full_computes_no_prompt() -> None:
    core = cluster(queue_ms=500)
    report_d0(core, running=4, max_batch=5)
    assert placement(core, "a").inlined
    assert not placement(core, "b").inlined


def test_a_prefill_group_that_is_sooner_computes_it() -> None:
    core = cluster()
    report(core, "p1", Role.PREFILL)
    assert place(core).prefill.instance_id == "p1"


@pytest.mark.parametrize("changes", [{"inline_tokens": 0}, {"inline_tokens": 14}, {"policy": "round-robin"}])
def test_it_is_left_to_a_prefill_group_where_it_is_not_wanted_or_too_much(changes: dict[str, Any]) -> None:
    assert not inlined(place(cluster(**changes)))


def test_a_step_that_would_miss_the_objective_is_not_inlined_into() -> None:
    assert not inlined(place(cluster(), tbt_slo_ms=30.0))
    assert inlined(place(cluster(), tbt_slo_ms=35.0))


def test_not_where_it_just_failed_nor_where_there_are_no_slots() -> None:
    assert place(cluster(), avoid=frozenset({InstanceId("d0")})).decode.instance_id == "d1"
    core = cluster()
    report_d0(core, slots_available=100)
    assert place(core).decode.instance_id == "d1"


def test_a_prefill_group_computes_it_where_the_only_decode_node_did_not() -> None:
    core = make_core(decodes=["d0"], inline_tokens=20)
    hold(core, "d0", keys_of(100))
    report_d0(core)
    assert inlined(place(core))
    again = place(core, "b", avoid=frozenset({InstanceId("d0")}), accepted=True)
    assert again.prefill.instance_id in ("p0", "p1") and again.decode.instance_id == "d0"


def test_blocks_on_an_ssd_do_not_count() -> None:
    core = cluster()
    hold(core, "d0", keys_of(90))
    rest = keys_of(100)[90:]
    core.handle(BlocksStored(NodeId("d0"), Incarnation(1), 1, tuple(rest), Tier.SSD), 0.0)
    assert not inlined(place(core))


def test_its_work_counts_once_and_is_gone_when_it_ends() -> None:
    core = cluster()
    place(core)
    assert list(core.state.instances[InstanceId("d0")].arriving) == ["a"]
    core.validate()
    core.handle(Progress(AttemptId("a"), Phase.DECODE, cached_tokens=400, ttft_ms=40.0, queue_ms=1.0, compute_ms=29.0), 1.0)
    core.validate()
    core.handle(Progress(AttemptId("a"), Phase.FINISHED, output_tokens=5), 2.0)
    core.validate()
    assert not core.state.attempts and not core.state.instances[InstanceId("d0")].unreported


def test_a_decision_to_inline_is_replayed_from_its_log_line_and_explained_to_who_asks() -> None:
    decided = ask(cluster(), request("a", num_tokens=NUM_TOKENS))
    assert decide(Alternatives.from_json(decided.alternatives.to_json())) == decided.decision
    message = schedule_reply(decided, debug=True, epoch=0)
    (estimate,) = [estimate for estimate in message.estimates if "inlined" in estimate.note]
    assert (estimate.instance_id, estimate.note) == ("d0", "inlined: 15 tokens in a step")
    assert message.assignment.prefill == message.assignment.decode
