"""Instances that prefill and decode: whether a request is disaggregated is decided for each one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from conductor_support import DECODE_COST, PREFILL_COST, ask, assigned, hold, keys_of, make_core, ref, report, request

from conductor.core.conductor import ConductorCore
from conductor.core.placement.scheduler import decide
from conductor.core.settings import PoolBalanceSettings
from conductor.core.types.decision import Alternatives, Placement
from conductor.core.types.events import InstanceDown, InstanceUp, SwitchRole
from springtide.clock import Tick
from springtide.ids import AttemptId, InstanceId, NodeId
from springtide.protocol.attempts import Phase, Progress
from springtide.protocol.instances import Role
from springtide.protocol.scheduling import Terms


def bring_up_both(core: ConductorCore, node: str) -> None:
    """An engine of both roles: as a decode node it has the node's name."""
    hold(core, node, [])
    for name, role in ((node, Role.DECODE), (f"{node}.prefill", Role.PREFILL)):
        core.handle(InstanceUp(replace(ref(node, role), instance_id=InstanceId(name)), 1), 0.0)
        report(core, name, role)


def cluster(nodes: int = 2, **changes: Any) -> ConductorCore:
    core = make_core(prefills=[], decodes=[], **changes)
    for number in range(nodes):
        bring_up_both(core, f"n{number}")
    return core


def pair(core: ConductorCore, name: str = "a", **fields: Any) -> tuple[str, str, bool]:
    assignment = assigned(core, request(name, **fields))
    return assignment.prefill.instance_id, assignment.decode.instance_id, assignment.inlined


def test_a_request_is_decoded_where_it_is_prefilled() -> None:
    core = cluster()
    hold(core, "n1", keys_of(100))
    assert pair(core) == ("n1.prefill", "n1", True)


def test_its_work_counts_in_both_roles_until_each_is_over() -> None:
    core = cluster(nodes=1)
    pair(core)
    prefill, decode = core.state.instances[InstanceId("n0.prefill")], core.state.instances[InstanceId("n0")]
    assert prefill.queue_ms(0.0) > 0 and len(decode.arriving) == 1
    core.handle(Progress(AttemptId("a"), Phase.DECODE), 1.0)
    assert prefill.queue_ms(1.0) == 0 and len(decode.unreported) == 1
    core.handle(Progress(AttemptId("a"), Phase.FINISHED, output_tokens=3), 2.0)
    assert not decode.unreported
    core.validate()


@pytest.mark.parametrize(
    "load",
    [
        {"running": 64},
        {"slots_available": 10},
        {"slots_total": 50, "slots_available": 50},
        {"decode_cost": replace(DECODE_COST, fixed_ms=300.0)},
    ],
    ids=["no place", "no slots", "too small", "beyond the objective"],
)
def test_it_is_handed_over_where_there_is_no_room_for_it(load: dict[str, Any]) -> None:
    core = cluster(admission="baseline")
    hold(core, "n1", keys_of(100))
    report(core, "n1", Role.DECODE, **load)
    assert pair(core) == ("n1.prefill", "n0", False)


def test_a_queue_sends_it_to_another_whoever_holds_its_prefix() -> None:
    core = cluster()
    hold(core, "n1", keys_of(100))
    report(core, "n1.prefill", Role.PREFILL, queue_ms=5_000.0)
    assert pair(core) == ("n0.prefill", "n0", True)


def test_instances_of_one_role_serve_beside_them() -> None:
    core = make_core(prefills=["p0"], decodes=["d0"])
    bring_up_both(core, "n0")
    report(core, "n0.prefill", Role.PREFILL, queue_ms=5_000.0)
    prefill, _, inlined = pair(core)
    assert prefill == "p0" and not inlined


@pytest.mark.parametrize("policy", ["load-balance", "round-robin", "random"])
def test_policies_that_look_at_nothing_choose_each_side_by_itself(policy: str) -> None:
    core = cluster(nodes=3, policy=policy)
    report(core, "n0", Role.DECODE, running=9)
    assert len({pair(core, f"a{i}")[:2] for i in range(12)}) > 1


def test_the_decision_is_replayed_from_its_log_line() -> None:
    core = cluster()
    hold(core, "n1", keys_of(100))
    decided = ask(core, request("a"))
    again = decide(Alternatives.from_json(decided.alternatives.to_json()))
    assert isinstance(again, Placement) and again == decided.decision
    assert (again.prefill.instance_id, again.decode.instance_id) == ("n1.prefill", "n1")


def test_when_one_of_the_two_is_lost_the_other_still_serves() -> None:
    core = cluster()
    hold(core, "n1", keys_of(100))
    core.handle(InstanceDown(InstanceId("n1"), 1), 0.0)
    assert pair(core) == ("n1.prefill", "n0", False)
    assert core.scheduler.ready_prefills().node_ids == (NodeId("n0"), NodeId("n1"))


@pytest.mark.parametrize(("running", "decode"), [(0, "n1"), (1, "n2"), (5, "n1")], ids=["none", "one", "many"])
def test_an_output_goes_where_others_are_as_long_as_steps_are_hardly_longer_there(running: int, decode: str) -> None:
    core = cluster(nodes=3)
    hold(core, "n1", keys_of(100))
    report(core, "n2", Role.DECODE, running=running, tokens=20 * running)
    assert pair(core) == ("n1.prefill", decode, decode == "n1")


def test_an_output_is_not_gathered_where_others_are_only_promised() -> None:
    """Passes there are not held to the objective yet, and the first outputs would wait for the end of one."""
    core = cluster(nodes=3)
    hold(core, "n1", keys_of(100))
    assert pair(core, "first", num_tokens=41) == ("n1.prefill", "n1", True)
    report(core, "n1.prefill", Role.PREFILL, queue_ms=5_000.0)
    _, decode, stays = pair(core, "second", text=2, num_tokens=41)
    assert stays and decode != "n1"


def test_outputs_are_concentrated_once_prompts_want_the_time_of_the_others() -> None:
    """A prompt takes 4 s of prefill, and a step of the few that run some 15 of the 200 ms."""
    core = cluster(nodes=4, admission="baseline")
    assert all(pair(core, f"calm-{i}", text=i + 1)[2] for i in range(4))
    for i in range(20):
        ask(core, request(f"busy-{i}", num_tokens=4001, text=i + 10), now=1.0 + i / 10)
    for i in range(4):
        core.handle(Progress(AttemptId(f"calm-{i}"), Phase.FINISHED, output_tokens=3), 4.0)
    for i in range(20):
        core.handle(Progress(AttemptId(f"busy-{i}"), Phase.FINISHED, output_tokens=3), 4.0)
    report(core, "n2", Role.DECODE, now=4.0, running=3, tokens=100)
    assert [pair(core, f"late-{i}", text=i + 100, num_tokens=41)[1] for i in range(4)] == ["n2"] * 4


@pytest.mark.parametrize(("work", "up_to"), [(2.2, 0.0), (2.27, 0.6), (2.35, 0.9)], ids=["little", "much", "more"])
def test_outputs_are_concentrated_the_more_prompts_want(work: float, up_to: float) -> None:
    """Of four instances two decode, for 15 of 200 ms: 3.85 are left to prompts, and 3.73 would be if the others did, for 11."""
    core = cluster(nodes=4)
    for name in ("n2", "n3"):
        report(core, name, Role.DECODE, running=2, tokens=200)
    asked = request("a", num_tokens=41)
    assert core.scheduler.estimate(asked, 3.0, 0, work, 1.0).concentrated_up_to == up_to


def test_a_request_that_waits_for_room_waits_at_one_engine_alone() -> None:
    core = cluster(admission="baseline")
    hold(core, "n1", keys_of(100))
    for name, available in (("n0", 10), ("n1", 5)):
        report(core, name, Role.DECODE, slots_available=available, slots_total=200)
    assignment = assigned(core, request("a"))
    assert assignment.waits and assignment.inlined


def test_an_engine_that_failed_it_is_avoided_under_both_of_its_names() -> None:
    core = cluster()
    hold(core, "n1", keys_of(100))
    assert pair(core, "a", avoid=frozenset({InstanceId("n1")})) == ("n0.prefill", "n0", True)
    assert pair(core, "b", avoid=frozenset({InstanceId("n1.prefill")})) == ("n0.prefill", "n0", True)


def test_a_request_in_idle_capacity_stays_where_it_is_prefilled() -> None:
    core = cluster()
    hold(core, "n1", keys_of(100))
    assert pair(core, terms=Terms(idle=True)) == ("n1.prefill", "n1", True)


def test_work_is_counted_as_long_as_it_takes_alone() -> None:
    core = cluster(nodes=1)
    slowed = replace(PREFILL_COST, per_token_ms=4.0)
    report(core, "n0.prefill", Role.PREFILL, prefill_cost=slowed, slowed_by=3.0)
    ask(core, request("a", num_tokens=401), now=1.0)
    assert core.demand.recent_work(2.0).prefill == pytest.approx(0.4, rel=0.1)


def test_nobody_asks_an_engine_of_both_roles_to_switch_its_role() -> None:
    balance = PoolBalanceSettings(ratio=1.1, least_load=0.01, after_s=0.0, pause_s=0.0, drain_s=1.0)
    core = cluster(nodes=3, pool_balance=balance)
    for number in range(3):
        report(core, f"n{number}.prefill", Role.PREFILL, queue_ms=50_000.0)
    for second in range(5):
        assert not [action for action in core.handle(Tick(), 1.0 + second) if isinstance(action, SwitchRole)]


def test_where_nodes_have_both_roles_there_is_no_division_to_speak_of() -> None:
    core = make_core(prefills=["p0"], decodes=["d0"])
    assert core.scheduler.is_split
    bring_up_both(core, "n0")
    assert not core.scheduler.is_split
    for name in ("n0", "n0.prefill"):
        core.handle(InstanceDown(InstanceId(name), 1), 1.0)
    assert core.scheduler.is_split
