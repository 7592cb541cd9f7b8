"""Which attempts are to go on decoding elsewhere, and where."""

from __future__ import annotations

from typing import Any

import pytest
from conductor_support import DECODE_COST, GATEWAY, ask, assigned, hold, keys_of, make_core, report, request

from conductor.core.conductor import ConductorCore
from conductor.core.placement.scheduler import decide
from conductor.core.state import ClusterState
from conductor.core.types.decision import Alternatives, MoveReason, Placement
from conductor.core.types.events import Action, InstanceDown, InstanceUp, MoveAttempts, MovesAsked, Placed, TickPart
from springtide.clock import Tick
from springtide.ids import AttemptId, InstanceId
from springtide.protocol.attempts import LiveAttempt, Phase, Progress, Renew
from springtide.protocol.instances import Role
from springtide.protocol.scheduling import Reason, Rejection, Schedule


def moving(actions: list[Action]) -> list[str]:
    return [attempt_id for action in actions if isinstance(action, MoveAttempts) for attempt_id in action.attempt_ids]


def decoding(core: ConductorCore, count: int, at: str = "d0", now: float = 0.0, **load: Any) -> list[str]:
    """So many attempts that decode at the node, the first one the longest, as gateway and node tell."""
    names = [f"a{number}" for number in range(count)]
    hold(core, at, keys_of(101))
    live = [LiveAttempt(AttemptId(name), InstanceId("p0"), InstanceId(at), Phase.PREFILL, 401) for name in names]
    core.handle(Renew(GATEWAY, tuple(live)), now)
    for place, name in enumerate(names):
        core.handle(Progress(AttemptId(name), Phase.DECODE, ttft_ms=1.0), now + place / 1000)
    fields = {"running": count, "tokens": 401 * count, "attempt_ids": frozenset(map(AttemptId, names))}
    report(core, at, Role.DECODE, now + 0.5, **fields | load)
    return names


def successor(of: str, name: str = "b", num_tokens: int = 405, avoid: str = "d0", **fields: Any) -> Schedule:
    elsewhere = frozenset({InstanceId(avoid)})
    return request(name, num_tokens, accepted=True, avoid=elsewhere, successor_of=AttemptId(of), output_tokens=4, **fields)


# ---- who is to move ----


def test_what_a_leaving_instance_has_moves_few_at_a_time_the_latest_first() -> None:
    core = make_core(decodes=["d0", "d1"])
    names = decoding(core, 6)
    assert moving(core.handle(InstanceDown(InstanceId("d0"), 1, leaving=True), 1.0)) == names[:1:-1]
    assert moving(core.handle(Tick(), 1.1)) == []
    assert moving(core.handle(Progress(AttemptId("a5"), Phase.MOVED), 1.2)) == ["a1"]
    assert moving(core.handle(Progress(AttemptId("a4"), Phase.FINISHED, output_tokens=3), 1.3)) == ["a0"]
    assert moving(core.handle(Progress(AttemptId("a3"), Phase.MOVED), 1.4)) == []


def test_nothing_moves_from_one_that_is_lost_or_hangs() -> None:
    for hung in (False, True):
        core = make_core(decodes=["d0", "d1"])
        decoding(core, 6)
        assert moving(core.handle(InstanceDown(InstanceId("d0"), 1, hung=hung), 1.0)) == []
        assert moving(core.handle(Tick(), 2.0)) == []


def test_one_that_comes_back_keeps_what_has_not_moved() -> None:
    core = make_core(decodes=["d0", "d1"])
    decoding(core, 6)
    core.handle(InstanceDown(InstanceId("d0"), 1, leaving=True), 1.0)
    core.handle(InstanceUp(core.state.instances[InstanceId("d0")].ref, 1), 1.5)
    assert moving(core.handle(Progress(AttemptId("a5"), Phase.MOVED), 2.0)) == []


def test_where_steps_take_longer_than_the_objective_one_at_a_time_goes_if_others_are_far_within_it() -> None:
    slow = {"tbt_slo_ms": 60.0}
    core = make_core(decodes=["d0", "d1"], **slow)
    names = decoding(core, 16)  # 10 + 16 + 16 x 4.01 ms
    assert moving(core.handle(Tick(), 1.0)) == names[-1:]
    assert moving(core.handle(Tick(), 2.0)) == []
    core.handle(Progress(AttemptId(names[-1]), Phase.MOVED), 2.5)
    assert moving(core.handle(Tick(), 3.0)) == names[-2:-1]
    core = make_core(decodes=["d0", "d1"], **slow)
    decoding(core, 16)
    report(core, "d1", Role.DECODE, running=10, tokens=4010)
    assert moving(core.handle(Tick(), 1.0)) == [], "the other is hardly better off"


def test_where_more_slots_are_promised_than_there_are_one_goes_to_where_there_are_many() -> None:
    core = make_core(decodes=["d0", "d1"])
    names = decoding(core, 3, slots_total=400, slots_available=10, slots_promised=40)
    assert moving(core.handle(Tick(), 1.0)) == names[-1:]
    core = make_core(decodes=["d0", "d1"])
    decoding(core, 3, slots_total=400, slots_available=10, slots_promised=40)
    report(core, "d1", Role.DECODE, slots_total=400, slots_available=90)
    assert moving(core.handle(Tick(), 1.0)) == [], "the other has hardly any"


def test_an_operator_has_as_many_move_as_asked_for() -> None:
    core = make_core(decodes=["d0", "d1"])
    names = decoding(core, 4)
    assert moving(core.handle(MovesAsked(InstanceId("d0"), 3), 1.0)) == names[:0:-1]
    assert moving(core.handle(MovesAsked(InstanceId("d0"), 3), 1.1)) == names[:1], "the others are under way"
    assert moving(core.handle(MovesAsked(InstanceId("nobody"), 3), 1.1)) == []


def test_a_move_of_which_nothing_is_heard_counts_no_more_after_a_while() -> None:
    core = make_core(decodes=["d0", "d1"])
    names = decoding(core, 1)
    assert moving(core.handle(MovesAsked(InstanceId("d0"), 1), 1.0)) == names
    core.handle(Tick(), 12.0)
    assert moving(core.handle(MovesAsked(InstanceId("d0"), 1), 12.5)) == names


def test_what_has_moved_and_what_could_not_stays_for_a_while() -> None:
    core = make_core(decodes=["d0", "d1"], tbt_slo_ms=60.0)
    names = decoding(core, 16)
    assert moving(core.handle(Tick(), 1.0)) == names[-1:]
    report(core, "d1", Role.DECODE, now=1.0, slots_total=50, slots_available=50)
    assert isinstance(ask(core, successor(names[-1]), 1.1).decision, Rejection)
    report(core, "d1", Role.DECODE, now=1.2)
    assert moving(core.handle(Tick(), 2.0)) == names[-2:-1]


def test_what_a_leaving_instance_has_not_reported_yet_moves_too() -> None:
    core = make_core(decodes=["d0", "d1"])
    decoding(core, 1)
    core.handle(Placed(GATEWAY, LiveAttempt(AttemptId("late"), InstanceId("p0"), InstanceId("d0"), Phase.PREFILL, 401)), 0.6)
    assert moving(core.handle(InstanceDown(InstanceId("d0"), 1, leaving=True), 1.0)) == ["a0"]
    core.handle(Progress(AttemptId("late"), Phase.DECODE), 1.5)
    assert moving(core.handle(Tick(), 2.0)) == ["late"]


def test_one_that_leaves_is_emptied_however_long_that_takes() -> None:
    core = make_core(decodes=["d0", "d1"])
    (name,), ordered = decoding(core, 1), list[int]()
    core.handle(InstanceDown(InstanceId("d0"), 1, leaving=True), 1.0)
    for second in range(2, 200):
        core.handle(Renew(GATEWAY, (LiveAttempt(AttemptId(name), InstanceId("p0"), InstanceId("d0"), Phase.DECODE, 401),)), float(second))
        ordered += [second for _ in moving(core.handle(Tick(), float(second)))]
    assert ordered[0] > 10 and ordered[-1] > 180 and len(ordered) > 15
    core.handle(Progress(AttemptId(name), Phase.FINISHED, output_tokens=3), 212.0)
    core.handle(Tick(), 260.0)
    assert InstanceId("d0") not in core.state.instances


def test_where_a_successor_fails_others_have_their_turn_and_its_own_comes_again_later() -> None:
    core = make_core(decodes=["d0", "d1"])
    names = decoding(core, 6)
    core.handle(InstanceDown(InstanceId("d0"), 1, leaving=True), 1.0)
    assigned(core, successor(names[5]), 1.1)
    assert moving(core.handle(Progress(AttemptId("b"), Phase.MOVED), 1.2)) == [names[1]]
    assert moving(core.handle(Progress(AttemptId(names[4]), Phase.MOVED), 1.3)) == [names[0]]
    assert moving(core.handle(Progress(AttemptId(names[3]), Phase.MOVED), 6.0)) == [names[5]]


def test_where_another_successor_begins_the_move_goes_on() -> None:
    core = make_core(decodes=["d0", "d1"])
    names = decoding(core, 6)
    core.handle(InstanceDown(InstanceId("d0"), 1, leaving=True), 1.0)
    placed = assigned(core, successor(names[5]), 1.1).decode.instance_id
    again = LiveAttempt(AttemptId("c"), placed, placed, Phase.PREFILL, 409, output_tokens=8, successor_of=AttemptId(names[5]))
    core.handle(Placed(GATEWAY, again), 1.2)
    assert moving(core.handle(Progress(AttemptId("b"), Phase.MOVED), 1.2)) == []
    assert moving(core.handle(Progress(AttemptId(names[5]), Phase.MOVED), 1.3)) == [names[1]]
    # It rests where it has come to, as the first one would.
    core.handle(Progress(AttemptId("c"), Phase.DECODE), 1.3)
    report(core, "d1", Role.DECODE, 1.4, running=1, tokens=409, attempt_ids=frozenset({AttemptId("c")}), slots_promised=20_000)
    assert moving(core.handle(Tick(), 2.0)) == []


def test_of_many_that_an_operator_wants_to_move_a_few_go_at_a_time() -> None:
    core = make_core(decodes=["d0", "d1"])
    names = decoding(core, 10)
    assert moving(core.handle(MovesAsked(InstanceId("d0"), 7), 1.0)) == names[:5:-1] and core.moves.still_asked(InstanceId("d0")) == 3
    gone = [moving(core.handle(Progress(AttemptId(name), Phase.MOVED), 1.5)) for name in names[:5:-1]]
    assert gone == [[names[5]], [names[4]], [names[3]], []]


def test_those_that_have_not_moved_yet_go_before_those_that_have() -> None:
    core = make_core(decodes=["d0", "d1"])
    names = decoding(core, 2)
    moved = LiveAttempt(AttemptId("moved"), InstanceId("d0"), InstanceId("d0"), Phase.PREFILL, 405, output_tokens=4)
    core.handle(Placed(GATEWAY, moved), 0.8)
    core.handle(Progress(AttemptId("moved"), Phase.DECODE), 0.9)
    assert moving(core.handle(MovesAsked(InstanceId("d0"), 3), 1.0)) == [*names[::-1], "moved"]


def test_an_instance_that_goes_between_two_parts_of_a_look_is_not_missed() -> None:
    core = make_core(decodes=["d0", "d1", "d2"], tbt_slo_ms=60.0)
    names = decoding(core, 16, at="d2", slots_total=400, slots_available=10, slots_promised=40)
    told: list[str] = []
    core.handle(TickPart(), 1.0)
    while core.ticks:
        actions = core.handle(TickPart(), 1.0)
        told += moving(actions)
        if told:
            core.handle(InstanceDown(InstanceId("d0"), 1), 1.0)
            core.handle(InstanceDown(InstanceId("d1"), 1), 1.0)
            ask(core, request("other", 41, text=3), 1.0)
    assert told == names[-1:]


# ---- where ----


def test_it_stays_where_nobody_is_known_to_have_its_prefix() -> None:
    core = make_core(decodes=["d0", "d1"])
    decoding(core, 1)
    core.handle(MovesAsked(InstanceId("d0"), 1), 1.0)
    hold(core, "d0", keys_of(90), sequence=1)
    decision = ask(core, successor("a0"), 1.1).decision
    assert isinstance(decision, Rejection) and "its prefix is not known to be anywhere" in decision.message


@pytest.mark.parametrize("policy", ["cache-aware", "load-balance", "random"])
def test_its_prefix_is_brought_there_whatever_the_policy(policy: str) -> None:
    core = make_core(decodes=["d0", "d1"], policy=policy)
    decoding(core, 1)
    core.handle(MovesAsked(InstanceId("d0"), 1), 1.0)
    assert [source.node_id for source in assigned(core, successor("a0"), 1.1).sources] == ["d0"]


def test_it_needs_no_prefill_instance() -> None:
    core = make_core(prefills=["p0"], decodes=["d0", "d1"])
    decoding(core, 1)
    core.handle(InstanceDown(InstanceId("p0"), 1), 0.9)
    core.handle(MovesAsked(InstanceId("d0"), 1), 1.0)
    assert assigned(core, successor("a0"), 1.1).decode.instance_id == "d1"


def test_what_its_fetch_takes_says_nothing_of_when_to_fetch() -> None:
    core = make_core(decodes=["d0", "d1"], kvcache_balancing_threshold="auto")
    decoding(core, 1)
    before = core.transfers.threshold.value
    core.handle(MovesAsked(InstanceId("d0"), 1), 1.0)
    assigned(core, successor("a0"), 1.1)
    core.handle(Progress(AttemptId("b"), Phase.DECODE, remote_tokens=404, fetch_ms=500.0), 1.7)
    assert core.transfers.threshold.value == before


def test_the_forecast_knows_how_long_its_output_is_already() -> None:
    forecast = ClusterState(16, 512).forecast
    for name, earlier in (("new", 0), ("moved", 90)):
        forecast.place(AttemptId(name), InstanceId("d0"), 400 + earlier, 100.0, 0, 0.0)
        forecast.report(InstanceId("d0"), DECODE_COST, 64, 1, 400, 20.0, 0.0)
        forecast.join(AttemptId(name), 1.0, earlier)
    (lengths,) = list(forecast.running_tokens(1.0))
    new, moved = sorted(map(float, lengths))
    assert moved - new == 90


def test_a_successor_goes_elsewhere_with_its_prefix_from_where_it_is() -> None:
    core = make_core(decodes=["d0", "d1"])
    decoding(core, 1)
    core.handle(MovesAsked(InstanceId("d0"), 1), 1.0)
    assignment = assigned(core, successor("a0"), 1.1)
    assert assignment.inlined and assignment.decode.instance_id == "d1"
    assert [(source.node_id, source.num_blocks) for source in assignment.sources] == [("d0", 101)]
    assert core.state.attempts[AttemptId("b")].earlier_tokens == 4
    core.validate()


@pytest.mark.parametrize(
    ("reason", "load", "moves"),
    [
        (MoveReason.LEAVING, {"running": 63, "tokens": 15_000}, True),
        (MoveReason.LEAVING, {"running": 64}, False),
        (MoveReason.LEAVING, {"slots_available": 90}, False),
        (MoveReason.LEAVING, {"slots_total": 100, "slots_available": 100}, False),
        (MoveReason.SLOW, {"running": 30, "tokens": 9_000}, True),
        (MoveReason.SLOW, {"running": 30, "tokens": 12_000}, False),
        (MoveReason.ROOM, {"slots_total": 400, "slots_available": 200}, True),
        (MoveReason.ROOM, {"slots_total": 400, "slots_available": 140}, False),
    ],
)
def test_it_goes_where_it_is_better_off_and_stays_where_nobody_is(reason: MoveReason, load: dict[str, Any], moves: bool) -> None:
    core = make_core(decodes=["d0", "d1"])
    decoding(core, 2)
    report(core, "d1", Role.DECODE, now=1.0, **load)
    core.moves.reason = lambda attempt_id: reason  # type: ignore[method-assign]
    decision = ask(core, successor("a0"), 1.1).decision
    if moves:
        assert isinstance(decision, Placement) and decision.decode.instance_id == "d1"
    else:
        assert isinstance(decision, Rejection) and decision.reason is Reason.NO_DECODE and str(reason) in decision.message


def test_it_is_not_counted_as_a_request_nor_refused_for_load() -> None:
    core = make_core(decodes=["d0", "d1"], admission="early-rejection", tbt_slo_ms=30.0)
    decoding(core, 2)
    core.handle(MovesAsked(InstanceId("d0"), 1), 1.0)
    assert isinstance(ask(core, successor("a1"), 1.1).decision, Placement)
    assert core.totals.decided == 0


def test_the_decision_is_replayed_from_its_log_line() -> None:
    core = make_core(decodes=["d0", "d1", "d2"])
    decoding(core, 2)
    core.handle(MovesAsked(InstanceId("d0"), 1), 1.0)
    decided = ask(core, successor("a1"), 1.1)
    assert decided.alternatives.moves is MoveReason.ASKED
    assert decide(Alternatives.from_json(decided.alternatives.to_json())) == decided.decision


def test_an_output_that_has_moved_teaches_its_whole_length() -> None:
    core = make_core(decodes=["d0", "d1"])
    decoding(core, 1)
    core.handle(MovesAsked(InstanceId("d0"), 1), 1.0)
    assigned(core, successor("a0"), 1.1)
    core.handle(Progress(AttemptId("a0"), Phase.MOVED), 1.2)
    core.handle(Progress(AttemptId("b"), Phase.DECODE), 1.2)
    for _ in range(40):
        core.state.lengths.record("", 100)
    core.handle(Progress(AttemptId("b"), Phase.FINISHED, output_tokens=96), 3.0)
    assert core.state.lengths.predict("", 1000) == 100.0
    core.validate()
