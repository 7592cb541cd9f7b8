"""A record of a run, replayed into a fresh core, gives the same decisions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from conductor_support import SETTINGS, idle, keys_of, ref, request
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.core.admission.rules import ADMISSIONS
from conductor.core.conductor import ConductorCore
from conductor.core.recording import Recorder, read, replay
from conductor.core.settings import PoolBalanceSettings
from conductor.core.types.decision import Placement
from conductor.core.types.events import (
    Action,
    Decided,
    Event,
    InstanceDown,
    InstanceUp,
    LoadReported,
    Placed,
    Renewed,
    StoreDown,
    StoreStillHere,
    StoreWatched,
    SwitchFailed,
    TickPart,
)
from springtide.clock import Tick
from springtide.ids import AttemptId, GatewayId, Incarnation, InstanceId, NodeId
from springtide.protocol.attempts import LiveAttempt, Phase, Prediction, Progress, Renew
from springtide.protocol.instances import Role
from springtide.protocol.scheduling import Terms
from springtide.protocol.storage import BlocksRemoved, BlocksStored, SnapshotPart, Tier

INSTANCES = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
NAMES = st.sampled_from(sorted(INSTANCES))
ATTEMPTS = st.integers(0, 30).map(lambda number: AttemptId(f"a{number}"))
KEYS = st.integers(0, 12).map(keys_of).map(tuple)

EVENTS = st.one_of(
    st.builds(
        request,
        ATTEMPTS,
        num_tokens=st.integers(1, 900),
        text=st.integers(0, 2),
        accepted=st.booleans(),
        avoid=st.frozensets(NAMES.map(InstanceId), max_size=2),
        tenant=st.sampled_from(["", "acme", "zeta"]),
        terms=st.builds(Terms, priority=st.integers(-1, 2), deadline_ms=st.sampled_from([0.0, 1500.0, 1e6])),
        tbt_slo_ms=st.sampled_from([0.0, 25.0]),
    ),
    st.builds(
        Progress,
        ATTEMPTS,
        st.sampled_from(Phase),
        output_tokens=st.integers(0, 400),
        ttft_ms=st.floats(0, 5000),
        remote_tokens=st.integers(0, 40),
        fetch_ms=st.sampled_from([0.0, 0.1, 3.3]),
        queue_ms=st.sampled_from([0.0, 7.0]),
        compute_ms=st.sampled_from([0.0, 401.0]),
    ),
    st.builds(
        LoadReported,
        NAMES.map(InstanceId),
        st.just(1),
        st.builds(
            lambda role, **fields: idle(role, **fields),
            st.sampled_from(Role),
            running=st.integers(0, 64),
            tokens=st.integers(0, 20_000),
            queue_ms=st.floats(0, 12_000),
            step_ms=st.sampled_from([0.0, 12.5]),
            slots_available=st.integers(0, 10_000),
            attempt_ids=st.frozensets(ATTEMPTS, max_size=4),
        ),
    ),
    st.builds(
        Renew,
        st.just(GatewayId("gateway-1")),
        st.lists(
            st.builds(
                LiveAttempt,
                ATTEMPTS,
                st.sampled_from(["p0", "p1"]).map(InstanceId),
                st.sampled_from(["d0", "d1"]).map(InstanceId),
                st.sampled_from(Phase),
                st.just(30),
            ),
            max_size=3,
        ),
    ),
    st.builds(
        Renewed,
        st.just(GatewayId("gateway-1")),
        st.lists(ATTEMPTS, max_size=3, unique=True),
        st.lists(
            st.builds(LiveAttempt, ATTEMPTS, st.just(InstanceId("p0")), st.just(InstanceId("d0")), st.sampled_from(Phase), st.just(30)),
            max_size=2,
        ),
    ),
    st.builds(
        Placed,
        st.just(GatewayId("gateway-1")),
        st.builds(
            LiveAttempt,
            ATTEMPTS,
            st.just(InstanceId("p0")),
            st.just(InstanceId("d0")),
            st.sampled_from(Phase),
            st.just(30),
            tenant=st.sampled_from(["", "acme"]),
            max_new_tokens=st.sampled_from([0, 7]),
            prediction=st.sampled_from([None, Prediction(50.0, 20.0, 0.0, 30.0, 12.5, 128.0, 40.0)]),
        ),
    ),
    st.builds(SwitchFailed, NAMES.map(InstanceId)),
    st.builds(InstanceDown, NAMES.map(InstanceId), st.just(1)),
    st.builds(lambda name: InstanceUp(ref(name, INSTANCES[name]), 1), NAMES),
    st.builds(BlocksStored, NAMES.map(NodeId), st.just(1), st.integers(1, 3), KEYS, st.sampled_from(Tier)),
    st.builds(BlocksRemoved, NAMES.map(NodeId), st.just(1), st.integers(1, 3), KEYS, st.sampled_from(Tier)),
    st.builds(SnapshotPart, NAMES.map(NodeId), st.just(1), st.integers(0, 3), KEYS, st.just(Tier.DRAM), st.booleans()),
    st.builds(StoreWatched, NAMES.map(NodeId), st.just("store:2")),
    st.builds(StoreStillHere, NAMES.map(NodeId), st.integers(0, 3)),
    st.builds(StoreDown, NAMES.map(NodeId)),
    st.just(Tick()),
    st.just(TickPart()),
)


def brought_up() -> Iterator[Event]:
    for name, role in INSTANCES.items():
        yield StoreWatched(NodeId(name), f"{name}:2")
        yield SnapshotPart(NodeId(name), Incarnation(1), 0, tuple(keys_of(5)), Tier.DRAM, complete=True)
        yield InstanceUp(ref(name, role), 1)
        yield LoadReported(InstanceId(name), 1, idle(role))


def decisions(actions: list[Action]) -> list[object]:
    """What can be compared: the estimates as the line that is logged of them."""
    return [
        (action.attempt_id, action.decision, action.assignment, action.alternatives.to_json()) if isinstance(action, Decided) else action
        for action in actions
    ]


@given(st.sampled_from(sorted(ADMISSIONS)), st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 0.001, 0.37, 12.0])), min_size=5, max_size=80))
@settings(max_examples=60, deadline=None)
def test_a_recorded_run_replays_to_the_same_actions(admission: str, run: list[tuple[Event, float]]) -> None:
    core = ConductorCore(replace(SETTINGS, admission=admission, tenant_weights={"acme": 2.0}))
    lines: list[str] = []
    recorder = Recorder(core.settings, lines.append)
    done: list[list[object]] = []
    now = 0.0
    for event, seconds in [*((event, 0.0) for event in brought_up()), *run]:
        now += seconds
        recorder.event(event, now)
        done.append(decisions(core.handle(event, now)))
        core.validate()
    assert [decisions(actions) for _, _, actions in replay(lines)] == done


def in_parts(core: ConductorCore, now: float) -> list[Action]:
    actions = core.handle(TickPart(), now)
    while core.ticks:
        core.validate()
        actions = [*actions, *core.handle(TickPart(), now)]
    return actions


@given(st.lists(st.tuples(EVENTS.filter(lambda event: event != TickPart()), st.sampled_from([0.0, 0.37, 12.0])), min_size=5, max_size=60))
@settings(max_examples=60, deadline=None)
def test_a_tick_in_parts_comes_to_what_one_at_once_does(run: list[tuple[Event, float]]) -> None:
    at_once, part_by_part = (ConductorCore(replace(SETTINGS, pool_balance=PoolBalanceSettings(0.1, 1.1, 1.0, 1.0, 1.0))) for _ in range(2))
    now = 0.0
    for event, seconds in [*((event, 0.0) for event in brought_up()), *run]:
        now += seconds
        done = in_parts(part_by_part, now) if event == Tick() else part_by_part.handle(event, now)
        assert decisions(done) == decisions(at_once.handle(event, now))


def test_a_record_holds_the_events_as_they_were() -> None:
    events: list[Event] = [*brought_up(), request("a", tenant="acme", avoid=frozenset({InstanceId("p1"), InstanceId("p0")})), Tick()]
    lines: list[str] = []
    recorder = Recorder(SETTINGS, lines.append)
    for event in events:
        recorder.event(event, 0.1)
    assert all(line.endswith("\n") for line in lines)
    read_settings, read_events = read(lines)
    assert read_settings == SETTINGS
    assert list(read_events) == [(event, 0.1) for event in events]


def test_a_replay_decides_as_the_run_did() -> None:
    lines: list[str] = []
    recorder = Recorder(SETTINGS, lines.append)
    for event in [*brought_up(), request("a")]:
        recorder.event(event, 0.0)
    *_, (_, _, actions) = replay(lines)
    (decided,) = actions
    assert isinstance(decided, Decided)
    assert isinstance(decided.decision, Placement)


@pytest.mark.parametrize(
    ("line", "complaint"), [("{", "line 2 .* not JSON"), ("[]", "line 2 .* not a JSON object"), ('{"now": 1, "event": "Nap"}', "line 2")]
)
def test_a_broken_line_is_named(line: str, complaint: str) -> None:
    lines: list[str] = []
    Recorder(SETTINGS, lines.append)
    with pytest.raises(ValueError, match=complaint):
        list(replay([*lines, line]))
    with pytest.raises(ValueError, match="line 1"):
        list(replay(["{}"]))
