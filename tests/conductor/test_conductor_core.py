"""The core as a whole: its life with attempts, and its invariants under random orders of events."""

from __future__ import annotations

from dataclasses import replace

from conductor_support import ask, assigned, bring_up, hold, idle, keys_of, make_core, ref, report, request
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from conductor.core.conductor import ConductorCore
from conductor.core.types.decision import Placement
from conductor.core.types.events import (
    Action,
    Decided,
    Event,
    Forgot,
    HungChanged,
    InstanceDown,
    InstanceUp,
    LoadReported,
    Placed,
    PrefillFinished,
    Renewed,
    RequestSnapshot,
    StoreDown,
    StoreStillHere,
    StoreWatched,
    TickPart,
)
from springtide.clock import Tick
from springtide.ids import AttemptId, GatewayId, Incarnation, InstanceId, NodeId, RequestId
from springtide.protocol.attempts import LiveAttempt, Phase, Progress, Renew
from springtide.protocol.instances import Role
from springtide.protocol.storage import BlocksRemoved, BlocksStored, SnapshotPart, Tier

GATEWAY = GatewayId("gateway-0")


def live(attempt: str, phase: Phase = Phase.PREFILL, num_tokens: int = 401) -> LiveAttempt:
    return LiveAttempt(AttemptId(attempt), InstanceId("p0"), InstanceId("d0"), phase, num_tokens)


def test_late_repeated_and_unknown_reports_of_an_attempt_change_nothing() -> None:
    core = make_core()
    assigned(core, request("a"))
    first = Progress(AttemptId("a"), Phase.DECODE, cached_tokens=0, ttft_ms=400)
    assert core.handle(first, 0.4) == [PrefillFinished(AttemptId("a"), 401.0, 400, 401, 0)]
    for late in (first, Progress(AttemptId("a"), Phase.PREFILL), Progress(AttemptId("stranger"), Phase.FINISHED)):
        assert core.handle(late, 0.5) == []
    core.handle(Progress(AttemptId("a"), Phase.FINISHED, output_tokens=5), 1.0)
    assert core.handle(Progress(AttemptId("a"), Phase.DECODE), 1.1) == []
    assert core.state.attempts == {}
    assert (core.totals.prompt_tokens, core.totals.cached_tokens) == (401, 0)


def test_a_prompt_that_is_scheduled_anew_counts_once_for_the_hit_rate() -> None:
    core = make_core()
    for name, cached in (("a", 100), ("b", 400)):
        assigned(core, replace(request(name), request_id=RequestId("one")))
        core.handle(Progress(AttemptId(name), Phase.DECODE, cached_tokens=cached, ttft_ms=1), 1.0)
        core.handle(Progress(AttemptId(name), Phase.FAILED), 2.0)
    assert (core.totals.prompt_tokens, core.totals.cached_tokens) == (401, 100)


def test_a_late_renewal_does_not_bring_a_finished_attempt_back() -> None:
    core = make_core()
    assigned(core, request("a"))
    core.handle(Progress(AttemptId("a"), Phase.FINISHED), 1.0)
    core.handle(Renew(GATEWAY, [live("a")]), 1.1)
    assert core.state.attempts == {}


def test_nor_one_that_this_conductor_only_hears_the_end_of() -> None:
    core = make_core()
    core.handle(Progress(AttemptId("a"), Phase.FINISHED), 1.0)
    core.handle(Renew(GATEWAY, [live("a"), live("b")]), 1.1)
    assert list(core.state.attempts) == ["b"]
    core.validate()


def test_an_attempt_that_two_renewals_on_end_lack_is_over_whatever_was_lost_on_the_way() -> None:
    core = make_core(prefills=["p0"])
    for name in ("ended", "runs", "strangers"):
        assigned(core, request(name, gateway_id=GatewayId("other")) if name == "strangers" else request(name))
    core.handle(Renew(GATEWAY, [live("runs")]), 2.0)
    assert list(core.state.attempts) == ["ended", "runs", "strangers"], "a placement's answer may be on its way to the gateway"
    core.handle(Renew(GATEWAY, [live("runs")]), 4.0)
    assert list(core.state.attempts) == ["runs", "strangers"]
    core.handle(Renew(GATEWAY, [live("ended"), live("runs")]), 4.1)
    assert list(core.state.attempts) == ["runs", "strangers"], "that renewal is late"
    assert core.state.instances[InstanceId("p0")].queue_ms(0.0) == 2 * 401
    core.validate()


def test_an_attempt_that_is_listed_again_in_between_is_not_over() -> None:
    core = make_core()
    assigned(core, request("a"))
    for attempts in ([], [live("a")], []):
        core.handle(Renew(GATEWAY, attempts), 1.0)
    assert list(core.state.attempts) == ["a"]


def test_what_a_part_of_a_tick_does_it_does_at_its_own_time() -> None:
    core = make_core()
    assigned(core, request("silent"))
    assert core.handle(TickPart(), 29.0) == []
    actions = []
    while core.ticks:
        actions += core.handle(TickPart(), 31.0)
    assert actions == [Forgot((AttemptId("silent"),))]
    core.validate()


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(Phase)), unique_by=lambda told: told[0]), st.integers(0, 2))
@settings(deadline=None)
def test_a_renewal_that_names_alone_what_is_no_news_comes_to_the_same(told: list[tuple[int, Phase]], ended: int) -> None:
    attempts = tuple(live(f"a{number}", phase) for number, phase in told)
    states = []
    for in_full in (True, False):
        core = make_core()
        for number in range(4):
            assigned(core, request(f"a{number}"))
        core.handle(Progress(AttemptId("a1"), Phase.DECODE, ttft_ms=1), 1.0)
        core.handle(Progress(AttemptId(f"a{ended}"), Phase.FINISHED), 1.0)
        for now in (2.0, 4.0):
            news = tuple(attempt for attempt in attempts if in_full or core.is_news(attempt.attempt_id, attempt.phase))
            unchanged = tuple(attempt.attempt_id for attempt in attempts if attempt not in news)
            core.handle(Renew(GATEWAY, news) if in_full else Renewed(GATEWAY, unchanged, news), now)
            core.validate()
        states.append((core.state.attempts, core.state.instances))
    assert states[0] == states[1]


def test_what_ended_while_its_renewal_was_taken_in_stays_so() -> None:
    core = make_core()
    core.handle(Renewed(GATEWAY, (AttemptId("ended"),), ()), 1.0)
    assert core.state.attempts == {}


def test_attempts_are_forgotten_when_their_gateway_is_silent_for_a_lease() -> None:
    core = make_core()
    assigned(core, request("kept"))
    assigned(core, request("silent", gateway_id=GatewayId("gateway-1")))
    core.handle(Renew(GATEWAY, [live("kept")]), 20.0)
    assert core.handle(Tick(), 29.0) == []
    assert core.handle(Tick(), 31.0) == [Forgot((AttemptId("silent"),))]
    assert list(core.state.attempts) == ["kept"]
    core.validate()


def test_a_gateway_that_asks_again_is_answered_again_and_counted_once() -> None:
    core = make_core(prefills=["p0"])
    assigned(core, request("a"))
    assigned(core, request("a"))
    assert core.state.instances[InstanceId("p0")].queue_ms(0.0) == 401
    core.validate()


def test_a_restarted_conductor_learns_what_runs_from_renewals() -> None:
    core = make_core(prefills=["p0"])
    core.handle(Renew(GATEWAY, [live("a"), live("b", Phase.DECODE)]), 0.1)
    (prefill,), (decode,) = (getattr(ask(core, request("c"), now=0.1).alternatives, side) for side in ("prefills", "decodes"))
    assert prefill.queue_ms == 401
    assert decode.batch == 3
    core.validate()


def test_a_restarted_conductor_may_hear_of_attempts_before_it_sees_their_instances() -> None:
    core = make_core(prefills=[], decodes=[])
    core.handle(Renew(GATEWAY, [live("a")]), 0.1)
    bring_up(core, "p0", Role.PREFILL)
    core.handle(StoreWatched(NodeId("d0"), "d0:2"), 0.1)
    hold(core, "d0", [])
    core.handle(InstanceUp(ref("d0", Role.DECODE), 1), 0.2)
    report(core, "d0", Role.DECODE, now=0.2, attempt_ids=frozenset({AttemptId("a")}))
    assert ask(core, request("b"), now=0.2).alternatives.decodes[0].batch == 2
    core.validate()


def test_a_restarted_instance_starts_without_the_work_of_its_last_life() -> None:
    core = make_core(prefills=["p0"])
    assigned(core, request("a"))
    core.handle(InstanceDown(InstanceId("p0"), 1), 1.0)
    bring_up(core, "p0", Role.PREFILL, incarnation=2, now=2.0)
    assert ask(core, request("b"), now=2.0).alternatives.prefills[0].queue_ms == 0
    core.validate()


def test_a_broken_stream_that_comes_back_finds_its_work_again() -> None:
    core = make_core(prefills=["p0"])
    assigned(core, request("a"))
    core.handle(InstanceDown(InstanceId("p0"), 1), 1.0)
    bring_up(core, "p0", Role.PREFILL, incarnation=1, now=1.2)
    assert ask(core, request("b"), now=1.2).alternatives.prefills[0].queue_ms == 401


def test_news_of_another_incarnation_is_not_believed() -> None:
    core = make_core(prefills=["p0"])
    core.handle(LoadReported(InstanceId("p0"), 7, idle(Role.PREFILL, queue_ms=1e6)), 1.0)
    core.handle(InstanceDown(InstanceId("p0"), 7), 1.0)
    assert ask(core, request("a"), now=1.0).alternatives.prefills[0].queue_ms == 0


def hung(core: ConductorCore, name: str, now: float = 1.0) -> list[Action]:
    return core.handle(InstanceDown(InstanceId(name), 1, hung=True), now)


def test_gateways_are_told_who_hangs_and_when_it_goes_on() -> None:
    core = make_core(prefills=["p0", "p1"])
    assert hung(core, "p0") == [HungChanged((ref("p0", Role.PREFILL),))]
    assert core.handle(InstanceUp(ref("p0", Role.PREFILL), 1), 2.0) == [HungChanged(())]


def test_an_instance_that_left_may_be_ending_its_work_and_does_not_hang() -> None:
    core = make_core(prefills=["p0", "p1"])
    assert core.handle(InstanceDown(InstanceId("p0"), 1), 1.0) == []


def test_work_is_left_where_it_is_while_nobody_else_could_do_it() -> None:
    core = make_core(prefills=["p0", "p1"], decodes=["d0"])
    assert hung(core, "d0") == []
    assert hung(core, "p0") != []
    assert hung(core, "p1") == [HungChanged(())], "nobody is left who could take it over"
    bring_up(core, "p1", Role.PREFILL, now=2.0)
    core.handle(Tick(), 2.5)
    assert core.hung == (ref("p0", Role.PREFILL),)


def test_who_hangs_for_a_lease_is_forgotten() -> None:
    core = make_core(prefills=["p0", "p1"])
    hung(core, "p0")
    report(core, "p1", Role.PREFILL, now=31.0)
    assert HungChanged(()) in core.handle(Tick(), 32.0)


def test_an_instance_that_stays_away_is_forgotten_after_a_lease() -> None:
    core = make_core()
    core.handle(InstanceDown(InstanceId("p1"), 1), 1.0)
    core.handle(Tick(), 30.0)
    assert InstanceId("p1") in core.state.instances
    core.handle(Tick(), 32.0)
    assert InstanceId("p1") not in core.state.instances


def test_missed_store_events_ask_for_one_snapshot() -> None:
    core = make_core()

    def removed(sequence: int) -> BlocksRemoved:
        return BlocksRemoved(NodeId("p0"), Incarnation(1), sequence, tuple(keys_of(1)), Tier.DRAM)

    missed = BlocksStored(NodeId("p0"), Incarnation(1), 5, tuple(keys_of(3)), Tier.DRAM)
    assert core.handle(missed, 0.0) == [RequestSnapshot(NodeId("p0"))]
    assert core.handle(missed, 0.0) == []
    assert core.ready
    hold(core, "p0", keys_of(3), sequence=5)
    assert core.handle(removed(6), 0.0) == []
    assert core.handle(removed(9), 0.0) == [RequestSnapshot(NodeId("p0"))]


def test_a_store_whose_last_event_was_missed_is_asked_for_a_snapshot_though_nothing_follows() -> None:
    core, here = make_core(), StoreStillHere
    hold(core, "p0", keys_of(3), sequence=5)
    assert core.handle(here(NodeId("p0"), 5), 0.0) == []
    assert core.handle(here(NodeId("p0"), 6), 0.0) == [RequestSnapshot(NodeId("p0"))]
    assert core.handle(here(NodeId("p0"), 6), 0.0) == [], "it has been asked"
    hold(core, "p0", keys_of(3), sequence=6)
    assert core.handle(here(NodeId("p0"), 6), 0.0) == []
    core.handle(SnapshotPart(NodeId("p0"), Incarnation(2), 40, tuple(keys_of(3)), Tier.DRAM, complete=False), 0.0)
    assert core.handle(here(NodeId("p0"), 40), 0.0) == [], "the rest of its snapshot is to come"


INSTANCES = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}


class RandomEvents(RuleBasedStateMachine):
    """Any event may follow any other; the core answers each Schedule once and never counts work that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.core = make_core(prefills=[], decodes=[], ttft_slo_ms=1500)
        self.now = 0.0
        self.replies = 0
        self.asked = 0

    attempts = st.sampled_from([AttemptId(f"a{number}") for number in range(6)])
    names = st.sampled_from(sorted(INSTANCES))
    incarnations = st.integers(1, 2)
    blocks = st.integers(0, 12)

    def feed(self, event: Event) -> None:
        actions = self.core.handle(event, self.now)
        replies = [action for action in actions if isinstance(action, Decided)]
        self.replies += len(replies)
        for decided in replies:
            assert (decided.assignment is not None) == isinstance(decided.decision, Placement)
            assert (decided.assignment is not None) == (decided.attempt_id in self.core.state.attempts)

    @rule(attempt=attempts, num_tokens=st.integers(1, 60), accepted=st.booleans(), avoid=st.sets(names))
    def schedule(self, attempt: AttemptId, num_tokens: int, accepted: bool, avoid: set[str]) -> None:
        self.asked += 1
        self.feed(request(attempt, num_tokens, accepted=accepted, avoid=frozenset(map(InstanceId, avoid))))

    @rule(attempt=attempts, phase=st.sampled_from(Phase), remote=st.integers(0, 40), fetch_ms=st.sampled_from([0.0, 0.5, 30.0]))
    def advance(self, attempt: AttemptId, phase: Phase, remote: int, fetch_ms: float) -> None:
        self.feed(Progress(attempt, phase, remote_tokens=remote, fetch_ms=fetch_ms, output_tokens=3))

    @rule(names_of=st.lists(st.tuples(attempts, st.sampled_from(["p0", "p1"]), st.sampled_from(["d0", "d1"]), st.sampled_from(Phase))))
    def renew(self, names_of: list[tuple[AttemptId, str, str, Phase]]) -> None:
        self.feed(Renew(GATEWAY, [LiveAttempt(a, InstanceId(p), InstanceId(d), phase, 30) for a, p, d, phase in names_of]))

    @rule(attempt=attempts, phase=st.sampled_from(Phase), gateway=st.sampled_from([GATEWAY, GatewayId("gateway-1")]))
    def placed(self, attempt: AttemptId, phase: Phase, gateway: GatewayId) -> None:
        self.feed(Placed(gateway, LiveAttempt(attempt, InstanceId("p0"), InstanceId("d0"), phase, 30)))

    @rule(name=names, incarnation=incarnations)
    def up(self, name: str, incarnation: int) -> None:
        self.feed(InstanceUp(ref(name, INSTANCES[name]), incarnation))

    @rule(name=names, incarnation=incarnations)
    def down(self, name: str, incarnation: int) -> None:
        self.feed(InstanceDown(InstanceId(name), incarnation))

    @rule(
        name=names,
        incarnation=incarnations,
        ids=st.frozensets(attempts),
        queue_ms=st.sampled_from([0.0, 100.0, 2000.0]),
        slots=st.sampled_from([3, 10, 1000]),
    )
    def load(self, name: str, incarnation: int, ids: frozenset[AttemptId], queue_ms: float, slots: int) -> None:
        load = idle(INSTANCES[name], queue_ms=queue_ms, attempt_ids=ids, slots_total=slots, slots_available=slots, running=len(ids))
        self.feed(LoadReported(InstanceId(name), incarnation, load))

    @rule(name=names, incarnation=incarnations, sequence=st.integers(0, 3), blocks=blocks, complete=st.booleans())
    def snapshot(self, name: str, incarnation: int, sequence: int, blocks: int, complete: bool) -> None:
        self.feed(StoreWatched(NodeId(name), f"{name}:2"))
        self.feed(SnapshotPart(NodeId(name), Incarnation(incarnation), sequence, tuple(keys_of(blocks)), Tier.DRAM, complete))

    @rule(name=names, incarnation=incarnations, sequence=st.integers(0, 6), blocks=blocks, stored=st.booleans())
    def store_event(self, name: str, incarnation: int, sequence: int, blocks: int, stored: bool) -> None:
        kind = BlocksStored if stored else BlocksRemoved
        self.feed(kind(NodeId(name), Incarnation(incarnation), sequence, tuple(keys_of(blocks)), Tier.DRAM))

    @rule(name=names, sequence=st.integers(0, 6))
    def store_still_here(self, name: str, sequence: int) -> None:
        self.feed(StoreStillHere(NodeId(name), sequence))

    @rule(name=names)
    def store_down(self, name: str) -> None:
        self.feed(StoreDown(NodeId(name)))

    @rule(seconds=st.sampled_from([0.0, 0.5, 20.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    @invariant()
    def holds(self) -> None:
        self.core.validate()
        assert self.replies == self.asked == self.core.totals.decided

    def teardown(self) -> None:
        """In the end nothing is left of attempts that nobody speaks of any more."""
        self.now += 61.0
        self.feed(Tick())
        self.core.validate()
        assert not self.core.state.attempts
        assert all(not instance.unreported and not instance.arriving for instance in self.core.state.instances.values())


RandomEvents.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestRandomEvents = RandomEvents.TestCase
