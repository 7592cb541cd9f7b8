"""What a Conductor remembers for people: bounded, and true to what was decided and came of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from conductor_support import GATEWAY, ask, hold, keys_of, make_core, report, request
from hypothesis import given
from hypothesis import strategies as st

from conductor.core.conductor import ConductorCore
from conductor.core.explanation import SHOWN
from conductor.core.history import MOST_EXPLAINED_PER_S, MOST_PLACED, MOST_REFUSED, History, LastHour, Latencies
from conductor.core.types.decision import Placement
from springtide.ids import AttemptId
from springtide.protocol.attempts import Phase, Progress
from springtide.protocol.instances import Role
from springtide.protocol.observation import BUCKET_S, MOST_BUCKETS
from springtide.protocol.scheduling import Reason, Terms
from springtide.slices import at_once

OBJECTIVE_MS = 10_000.0


class Told:
    """A core, and a history that is told of what it does, as the runner tells it."""

    def __init__(self, core: ConductorCore) -> None:
        self.core, self.history = core, History(OBJECTIVE_MS, 0.0)

    def place(self, attempt: str, now: float = 0.0, **fields: object) -> None:
        event = request(attempt, **fields)  # type: ignore[arg-type]
        self.history.decided(event, ask(self.core, event, now), now)

    def advance(self, attempt: str, phase: Phase, now: float, **fields: float) -> None:
        event = Progress(AttemptId(attempt), phase, **fields)  # type: ignore[arg-type]
        known = self.core.state.attempts.get(event.attempt_id)
        self.core.handle(event, now)
        self.history.advanced(event, known, now)
        self.history.validate()


@pytest.fixture
def told() -> Told:
    return Told(make_core(prefills=("p0", "p1", "p2"), decodes=("d0", "d1")))


def test_a_decision_is_remembered_with_what_was_predicted_and_what_came(told: Told) -> None:
    hold(told.core, "p1", keys_of(60))
    told.place("r.1", 5.0)
    told.advance("r.1", Phase.DECODE, 6.0, ttft_ms=900.0, queue_ms=100.0, compute_ms=800.0, cached_tokens=240)
    told.advance("r.1", Phase.FINISHED, 8.0, output_tokens=11)
    (entry,) = told.history.explanation("request-r.1", 9.0).decisions
    decision = entry.decision
    assert decision.prediction is not None
    assert (decision.prefill_id, decision.local_blocks, decision.gateway_id) == ("p1", 60, GATEWAY)
    assert (decision.prediction.ttft_ms, decision.ttft_ms) == (pytest.approx(161.0), 900.0)
    assert (decision.cached_tokens, decision.output_tokens, decision.tbt_ms) == (240, 11, pytest.approx(200.0))
    assert (decision.phase, decision.decided_at, decision.first_token_at, decision.ended_at) == (Phase.FINISHED, 5.0, 6.0, 8.0)
    assert (entry.num_prefills, entry.num_decodes) == (3, 2)
    assert entry.prefills[0].instance_id == "p1" and entry.prefills[0].ttft_ms == pytest.approx(161.0)
    assert {each.instance_id for each in entry.decodes} == {"d0", "d1"}


def test_a_refusal_is_remembered_with_its_reason_and_one_that_waits_for_idle_capacity_is_none(told: Told) -> None:
    for name in ("p0", "p1", "p2"):
        report(told.core, name, Role.PREFILL, queue_ms=60_000.0)
    told.place("r.1", 1.0, tenant="acme")
    told.place("r.2", 1.0, terms=Terms(idle=True))
    (decision,) = told.history.changed_since(0, 10)
    assert (decision.request_id, decision.tenant, decision.reason, decision.phase) == ("request-r.1", "acme", Reason.TTFT, None)
    assert decision.message and decision.retry_after_s > 0 and decision.prediction is None
    assert told.history.hour.since(0, 1.0)[-1].refused == 1


def test_who_has_seen_a_version_is_told_what_has_changed_since(told: Told) -> None:
    told.place("r.1", 1.0)
    told.place("r.2", 1.0)
    seen = told.history.version
    told.place("r.3", 2.0)
    told.advance("r.1", Phase.DECODE, 3.0, ttft_ms=500.0)
    assert [decision.attempt_id for decision in told.history.changed_since(seen, 10)] == ["r.1", "r.3"]
    assert [decision.attempt_id for decision in told.history.changed_since(seen, 1)] == ["r.1"]
    assert told.history.changed_since(told.history.version, 10) == []


def test_an_attempt_that_takes_the_place_of_another_is_no_other_prompt_in_the_hour() -> None:
    told = Told(make_core(decodes=("d0", "d1")))
    told.place("r.1", 1.0, num_tokens=401)
    told.advance("r.1", Phase.DECODE, 2.0, ttft_ms=900.0, cached_tokens=100)
    hold(told.core, "d0", keys_of(101))
    moves = request("r.2", 405, accepted=True, avoid=frozenset({"d0"}), successor_of=AttemptId("r.1"), output_tokens=4)  # type: ignore[arg-type]
    assert isinstance(ask(told.core, moves, 3.0).decision, Placement)
    told.advance("r.2", Phase.DECODE, 4.0, ttft_ms=20_000.0, cached_tokens=400)
    told.advance("r.1", Phase.MOVED, 4.0, output_tokens=6)
    told.advance("r.2", Phase.FINISHED, 9.0, output_tokens=11)
    hour = told.history.hour.since(0, 9.0)[-1]
    assert (hour.prompt_tokens, hour.cached_tokens, hour.first_tokens, hour.in_time) == (401, 100, 1, 1)
    assert (hour.finished, hour.output_tokens) == (1, 17)


def test_the_choices_and_attempts_of_a_request_are_found_by_its_id(told: Told) -> None:
    for attempt in ("r.1", "r.2", "s.1"):
        told.place(attempt)
    assert [entry.decision.attempt_id for entry in told.history.explanation("s.1", 1.0).decisions] == ["s.1"]
    assert [entry.decision.attempt_id for entry in told.history.explanation("request-r.2", 1.0).decisions] == ["r.2"]
    assert told.history.explanation("request-r", 1.0).decisions == (), "the beginning of an id is another's"


def test_of_many_decisions_the_latest_stay_and_so_many_a_second_with_their_alternatives() -> None:
    told = Told(make_core(prefills=[f"p{number}" for number in range(20)], decodes=[f"d{number}" for number in range(20)]))
    for number in range(MOST_PLACED + 50):
        told.place(f"r{number}.1", 1.0, num_tokens=5)
        at_once(told.history.explain())
        told.core.handle(Progress(AttemptId(f"r{number}.1"), Phase.FINISHED), 1.0)
    told.history.validate()
    assert told.history.explanation("r0.1", 1.0).decisions == ()
    assert len(told.history.changed_since(0, 2 * MOST_PLACED)) == MOST_PLACED
    explained = [told.history.explanation(f"r{number}.1", 1.0).decisions for number in range(50, MOST_PLACED + 50)]
    with_alternatives = [entry for (entry,) in explained if entry.prefills]
    assert 0 < len(with_alternatives) <= MOST_EXPLAINED_PER_S
    assert all(len(entry.prefills) == len(entry.decodes) == SHOWN for entry in with_alternatives)
    told.place("later.1", 3.0)
    assert told.history.explanation("later.1", 3.0).decisions[0].prefills


def test_refusals_are_remembered_however_many_are_placed_since_and_no_more_than_so_many(told: Told) -> None:
    for name in ("p0", "p1", "p2"):
        report(told.core, name, Role.PREFILL, queue_ms=60_000.0)
    for number in range(MOST_REFUSED + 10):
        told.place(f"refused{number}.1", 1.0)
    for name in ("p0", "p1", "p2"):
        report(told.core, name, Role.PREFILL, now=2.0)
    for number in range(MOST_PLACED + 10):
        told.place(f"r{number}.1", 3.0, num_tokens=5)
        told.core.handle(Progress(AttemptId(f"r{number}.1"), Phase.FINISHED), 3.0)
    told.history.validate()
    refused = [decision.attempt_id for decision in told.history.changed_since(0, 10_000) if decision.reason is not None]
    assert refused == [f"refused{number}.1" for number in range(MOST_REFUSED + 9, 9, -1)]


def test_the_chosen_ones_lead_the_alternatives_then_come_the_best() -> None:
    core = make_core(prefills=[f"p{number}" for number in range(20)], decodes=("d0", "d1"))
    for number in range(20):
        report(core, f"p{number}", Role.PREFILL, queue_ms=1000.0 * (20 - number))
    told = Told(core)
    event = request("r.1", avoid=frozenset({"p19", "p18"}))  # type: ignore[arg-type]
    decided = ask(core, event)
    told.history.decided(event, decided, 0.0)
    assert isinstance(decided.decision, Placement) and decided.decision.prefill.instance_id == "p17"
    (entry,) = told.history.explanation("r.1", 0.0).decisions
    assert [each.instance_id for each in entry.prefills[:4]] == ["p17", "p19", "p18", "p16"]


@given(st.lists(st.floats(0.2, 1e6), min_size=1, max_size=300))
def test_quantiles_are_told_within_a_twentieth(values: Sequence[float]) -> None:
    latencies = Latencies()
    for value in values:
        latencies.add(value)
    for share, told in zip((0.5, 0.9, 0.99), latencies.quantiles(0.5, 0.9, 0.99), strict=True):
        exact = np.quantile(values, share, method="inverted_cdf")
        assert told == pytest.approx(exact, rel=0.05)


def test_the_hour_is_told_in_buckets_and_forgets_the_one_before() -> None:
    hour = LastHour(OBJECTIVE_MS)
    for number in range(MOST_BUCKETS + 5):
        hour.first_token(100.0 if number % 2 else 20_000.0, number * BUCKET_S + 1)
    now = (MOST_BUCKETS + 4) * BUCKET_S + 2
    told = hour.since(0, now)
    assert [bucket.number for bucket in told] == list(range(5, MOST_BUCKETS + 5))
    assert [(bucket.first_tokens, bucket.in_time) for bucket in told[:2]] == [(1, 1), (1, 0)]
    assert [bucket.number for bucket in hour.since(MOST_BUCKETS + 3, now)] == [MOST_BUCKETS + 3, MOST_BUCKETS + 4]
