"""The gateway's core: one terminal reply to each request, each token once, nothing left running."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import TypeGuard

import pytest
from gateway_world import LIMITS, TokensAsKeys, World, assignment, generation, instance, new_core
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import events as ev
from gateway.core import GatewayCore
from gateway.state import MOST_WAITS, AttemptState, Move
from springtide.clock import Tick
from springtide.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from springtide.ids import AttemptId, BlockKey, InstanceId, RequestId
from springtide.protocol.attempts import Phase, Progress
from springtide.protocol.instances import Role
from springtide.protocol.outputs import (
    AttemptFailed,
    AttemptSign,
    Failure,
    FailureCode,
    Finish,
    PrefillDone,
    PromptLogprobs,
    SampledToken,
    TokenOutput,
)
from springtide.protocol.scheduling import Reason, Rejection, Schedule, Terms

FIRST = AttemptId("r0.1")
SECOND = AttemptId("r0.2")


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(10, 150))
def test_whatever_happens_each_request_gets_one_terminal_reply_and_each_token_once(seed: int, steps: int) -> None:
    world = World(seed)
    for _ in range(steps):
        world.step()
    for _ in range(2000):
        if not world.unfinished():
            break
        world.step(smooth=True)
    assert not world.unfinished(), "a request without a terminal reply"
    for request in world.requests.values():
        assert len(request.terminals) == 1
    for attempt in world.attempts.values():
        assert attempt.reported_over == 1
        assert Role.DECODE not in attempt.running
    assert world.core.live_attempts() == []
    assert world.core.next_deadline() is None


def test_requests_move_again_and_again_whatever_else_happens_and_no_token_is_lost_or_doubled() -> None:
    moves = foretold = 0
    for seed in range(150):
        world = World(seed, most_tokens=60, moving=8)
        for step in range(400):
            world.step(smooth=step % 4 > 0)
            if step % 3 == 0:
                world.move()
        for _ in range(3000):
            if not world.unfinished():
                break
            world.step(smooth=True)
        assert not world.unfinished(), f"a request without a terminal reply, seed {seed}"
        assert all(attempt.reported_over == 1 and Role.DECODE not in attempt.running for attempt in world.attempts.values())
        assert world.core.live_attempts() == []
        moves += world.moves
        foretold += world.foretold
    assert moves > 1000 and foretold > 2000


@pytest.mark.parametrize(
    ("behind", "judged"),
    [
        ([1], "close"),
        ([2], "again"),
        ([19, 2], "again"),
        ([19, 2, 2], "close"),
        ([19, 2, 4], "close"),
        ([4, 39], "again"),
        ([40, 30, 20, 10], "close"),
        ([40, 30, 20, 17], "far"),
        ([40, 50, 60, 70], "far"),
    ],
)
def test_where_tokens_are_computed_one_by_one_a_successor_goes_on_when_it_is_close_or_another_would_be_no_closer(
    behind: list[int], judged: str
) -> None:
    move, placed = Move(asked=None), AttemptState(assignment(FIRST), 0, 3, 0.0, {})
    for tokens in behind:
        move.begin(placed)
        verdict = move.judge(tokens, 0)
    assert verdict == judged


def test_a_successor_goes_on_when_what_it_lacks_is_one_step_and_has_its_time_to_come_so_far() -> None:
    move, placed = Move(asked=None), AttemptState(assignment(FIRST), 0, 3, 0.0, {})
    move.begin(placed)
    assert [move.judge(behind, 16) for behind in (40, 30, 17, 16)] == ["wait", "wait", "wait", "close"]
    for first in (0, 5, 16):
        move.begin(placed)
        assert [move.judge(first, 16), move.judge(first, 16)] == ["wait", "close"], "its first step is behind another one, maybe"
    move.begin(placed)
    assert move.judge(-1, 16) == "close", "the client has not had it"
    move = Move(asked=None)
    move.begin(placed)
    assert [move.judge(20, 16) for _ in range(MOST_WAITS + 1)] == ["wait"] * MOST_WAITS + ["again"]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_shutdown_answers_everything_at_once(seed: int) -> None:
    world = World(seed)
    for _ in range(60):
        world.step()
    world.feed(ev.Shutdown())
    assert not world.unfinished()
    world.arrive()
    assert not world.unfinished()


# ---- particular courses of events ----


def keys(*token_ids: int) -> tuple[BlockKey, ...]:
    return TokensAsKeys().keys(generation(0, 4), token_ids)


class Course:
    """One request, fed by hand."""

    def __init__(self, *, accepted: bool = False, deadline_ms: float = 0.0, max_tokens: int = 4) -> None:
        self.core = new_core()
        self.now = 100.0
        self.did = self.feed(ev.Arrived(replace(generation(0, max_tokens, accepted=accepted), terms=Terms(deadline_ms=deadline_ms))))

    def feed(self, event: ev.Event) -> list[ev.Action]:
        self.did = self.core.handle(event, self.now)
        self.core.validate()
        return self.did

    def assign(self, attempt_id: AttemptId = FIRST, *, waits: bool = False, refusable: bool = False) -> list[ev.Action]:
        placed = assignment(attempt_id, ttft_slo_ms=500.0, waits=waits, refusable=refusable)
        return self.feed(placed)

    def first_token(self, attempt_id: AttemptId = FIRST, position: int = 0) -> list[ev.Action]:
        return self.feed(PrefillDone(TokenOutput(attempt_id, position, (SampledToken(position),)), cached_tokens=2))

    def tokens(self, position: int, *token_ids: int, attempt_id: AttemptId = FIRST, finish: Finish | None = None) -> list[ev.Action]:
        return self.feed(TokenOutput(attempt_id, position, tuple(SampledToken(t) for t in token_ids), finish))

    def fail(self, code: FailureCode, side: Role = Role.DECODE, attempt_id: AttemptId = FIRST) -> list[ev.Action]:
        return self.feed(ev.SideFailed(side, AttemptFailed(attempt_id, Failure(code, "broken"))))

    def lose(self, side: Role, attempt_id: AttemptId = FIRST, *, connected: bool = True) -> list[ev.Action]:
        name = instance("p0" if side is Role.PREFILL else "d0").instance_id
        return self.feed(ev.SessionLost(side, name, (attempt_id,), connected))

    def reject(self, reason: Reason, attempt_id: AttemptId = FIRST) -> list[ev.Action]:
        return self.feed(ev.Rejected(attempt_id, Rejection(reason, "too busy", 3.0)))

    def schedule(self) -> Schedule:
        (action,) = [action for action in self.did if isinstance(action, Schedule)]
        return action

    def error(self) -> Exception:
        (action,) = [action for action in self.did if isinstance(action, ev.Terminal)]
        assert isinstance(action.reply, ev.Failed)
        return action.reply.error


def emitted(actions: list[ev.Action]) -> list[int]:
    return [token.token_id for action in actions if isinstance(action, ev.Emit) for token in action.tokens]


def test_decode_and_prefill_are_started_together() -> None:
    course = Course()
    starts = course.assign()
    assert [type(action) for action in starts] == [ev.StartAtDecode, ev.StartAtPrefill]
    assert isinstance(starts[1], ev.StartAtPrefill) and starts[1].start.ttft_budget_ms == 500.0


def inlined(course: Course, attempt_id: AttemptId = FIRST) -> list[ev.Action]:
    """The Conductor has the decode node compute the prompt."""
    return course.feed(assignment(attempt_id, instance("d0"), instance("d0"), ttft_slo_ms=500.0))


def test_an_inlined_prompt_is_started_at_the_decode_node_alone() -> None:
    course = Course()
    assert [type(action) for action in inlined(course)] == [ev.StartAtDecode]
    assert emitted(course.first_token()) == [0]
    assert emitted(course.tokens(1, 1, 2, 3, finish=Finish.LENGTH)) == [1, 2, 3]
    assert not any(isinstance(action, ev.Abort) for action in course.did)


def test_an_inlined_request_that_its_first_token_ends_needs_no_abort() -> None:
    course = Course()
    inlined(course)
    done = course.feed(PrefillDone(TokenOutput(FIRST, 0, (), Finish.STOP), cached_tokens=2))
    assert [type(action) for action in done] == [ev.Report, ev.Report, ev.Terminal]


class PromptOnly(Course):
    """One request whose prompt alone is wanted."""

    def __init__(self) -> None:
        self.core = new_core()
        self.now = 100.0
        self.did = self.feed(ev.Arrived(replace(generation(0, 1), prompt_only=True)))


@pytest.mark.parametrize("at_decode_node", [False, True])
@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH])
def test_of_a_prompt_that_is_wanted_alone_nobody_gets_the_token_that_nodes_sample(at_decode_node: bool, finish: Finish) -> None:
    course = PromptOnly()
    inlined(course) if at_decode_node else course.assign()
    tokens = (SampledToken(7),) if finish is Finish.LENGTH else ()
    course.feed(PrefillDone(TokenOutput(FIRST, 0, tokens, finish), cached_tokens=2))
    assert emitted(course.did) == []
    computed_at = instance("d0" if at_decode_node else "p0")
    assert course.did[-1] == ev.Terminal(RequestId("r0"), ev.Finished(Finish.LENGTH, 2, prompt_at=computed_at))
    aborted = [action.side for action in course.did if isinstance(action, ev.Abort)]
    assert aborted == ([] if at_decode_node else [Role.DECODE])


def test_a_prompt_that_is_wanted_alone_is_computed_elsewhere_when_its_node_is_lost() -> None:
    course = PromptOnly()
    course.assign()
    course.lose(Role.PREFILL)
    course.assign(SECOND)
    course.feed(PrefillDone(TokenOutput(SECOND, 0, (), Finish.STOP), cached_tokens=0))
    assert course.did[-1] == ev.Terminal(RequestId("r0"), ev.Finished(Finish.LENGTH, 0, prompt_at=instance("p0")))


SCORES = PromptLogprobs(bytes(8), bytes(8))


class Scored(Course):
    """One request that asks for its prompt's log-probabilities."""

    def __init__(self) -> None:
        self.core = new_core()
        self.now = 100.0
        asked = generation(0, 4)
        self.did = self.feed(ev.Arrived(replace(asked, sampling=replace(asked.sampling, prompt_logprobs=0))))

    def first_token(self, attempt_id: AttemptId = FIRST, position: int = 0, scores: PromptLogprobs | None = SCORES) -> list[ev.Action]:
        return self.feed(PrefillDone(TokenOutput(attempt_id, position, (SampledToken(position),)), 0, prompt_logprobs=scores))


def scores_told(actions: list[ev.Action]) -> list[PromptLogprobs]:
    return [action.logprobs for action in actions if isinstance(action, ev.EmitPrompt)]


def test_a_prompt_s_log_probabilities_are_told_once_before_its_first_token() -> None:
    course = Scored()
    assert course.schedule().whole_prompt
    course.assign()
    course.lose(Role.PREFILL)
    assert course.schedule().whole_prompt, "nobody has computed them yet"
    course.assign(SECOND)
    did = course.first_token(SECOND)
    kinds = [type(action) for action in did]
    assert scores_told(did) == [SCORES] and kinds.index(ev.EmitPrompt) < kinds.index(ev.Emit)
    course.lose(Role.DECODE, SECOND)
    course.now += 1
    course.feed(Tick())
    assert not course.schedule().whole_prompt, "they have been told"
    third = AttemptId("r0.3")
    course.assign(third)
    assert scores_told(course.first_token(third, position=1, scores=None)) == []


def test_a_node_that_does_not_send_a_prompt_s_log_probabilities_has_failed() -> None:
    course = Scored()
    course.assign()
    assert emitted(course.first_token(scores=None)) == [] and InstanceId("p0") in course.schedule().avoid


def test_a_failed_inlined_prompt_is_scheduled_again_elsewhere() -> None:
    course = Course()
    inlined(course)
    course.lose(Role.DECODE)
    assert course.schedule().avoid == {"d0"} and not any(isinstance(action, ev.Abort) for action in course.did)
    course.assign(SECOND)
    assert emitted(course.first_token(SECOND)) == [0]


def test_the_only_node_of_an_inlined_prompt_is_to_blame_for_a_lost_peer() -> None:
    course = Course()
    inlined(course)
    course.fail(FailureCode.PEER_LOST)
    (over,) = [action for action in course.did if isinstance(action, ev.Report)]
    assert over.culprit == "d0" and course.schedule().avoid == {"d0"}


def test_a_prompt_that_the_decode_node_does_not_compute_after_all_is_scheduled_again_elsewhere_and_accepted() -> None:
    course = Course()
    inlined(course)
    course.fail(FailureCode.INTERNAL)
    assert course.schedule().avoid == {"d0"} and course.schedule().accepted
    assert [type(action) for action in course.assign(SECOND)] == [ev.StartAtDecode, ev.StartAtPrefill]


def test_a_lost_decode_node_is_replaced_with_the_tokens_already_received() -> None:
    course = Course()
    course.assign()
    course.first_token()
    course.tokens(1, 1)
    course.lose(Role.DECODE)
    again = course.schedule()
    assert again.block_keys == keys(0, 0, 0, 0, 1)
    assert again.accepted and again.avoid == {"d0"} and again.max_new_tokens == 2
    course.assign(SECOND)
    assert emitted(course.first_token(SECOND, position=2)) == [2]
    last = course.tokens(3, 3, attempt_id=SECOND, finish=Finish.LENGTH)[-1]
    assert last == ev.Terminal(RequestId("r0"), ev.Finished(Finish.LENGTH, 2, prompt_at=instance("p0")))


def test_tokens_that_overtake_the_first_one_wait_for_it() -> None:
    course = Course()
    course.assign()
    assert course.tokens(1, 1, 2) == []
    assert emitted(course.first_token()) == [0, 1, 2]


def test_repeated_and_overlapping_outputs_add_only_what_is_new() -> None:
    course = Course()
    course.assign()
    course.first_token()
    assert emitted(course.tokens(1, 1)) == [1]
    assert emitted(course.tokens(1, 1)) == []
    assert emitted(course.tokens(1, 1, 2)) == [2]


def test_a_gap_is_a_failure_of_the_node() -> None:
    course = Course()
    course.assign()
    course.first_token()
    course.tokens(2, 2)
    assert course.schedule().avoid == {"d0"}


def test_the_prefill_side_may_fail_the_attempt_until_decode_has_shown_life() -> None:
    course = Course()
    course.assign()
    course.first_token()
    assert course.lose(Role.PREFILL) and course.schedule().block_keys == keys(0, 0, 0, 0)
    course = Course()
    course.assign()
    course.first_token()
    course.tokens(1, 1)
    assert course.lose(Role.PREFILL) == []


def test_a_first_token_that_ends_the_request_aborts_the_decode_side() -> None:
    course = Course()
    course.assign()
    actions = course.feed(PrefillDone(TokenOutput(FIRST, 0, (), Finish.STOP), 0))
    assert ev.Abort(Role.DECODE, instance("d0").instance_id, FIRST) in actions
    assert isinstance(actions[-1], ev.Terminal)


def test_a_rejection_of_a_new_request_is_an_overload_that_says_when_to_come_back() -> None:
    course = Course()
    course.reject(Reason.TTFT)
    error = course.error()
    assert isinstance(error, Overloaded) and error.retry_after_s == 3.0 and error.code == "ttft"


def test_what_never_fits_is_an_invalid_request() -> None:
    course = Course()
    course.reject(Reason.TOO_LARGE)
    assert isinstance(course.error(), InvalidRequest)


def test_a_refusal_at_the_admission_check_gets_one_more_chance() -> None:
    course = Course()
    course.assign(refusable=True)
    course.fail(FailureCode.OVERLOADED)
    assert not course.schedule().accepted, "the Conductor may now reject it"
    course.assign(SECOND, refusable=True)
    course.fail(FailureCode.OVERLOADED, attempt_id=SECOND)
    assert isinstance(course.error(), Overloaded)


NO_ROOM = [FailureCode.POOL_FULL, FailureCode.QUOTA_USED, FailureCode.PREEMPTED, FailureCode.OVERLOADED]


@pytest.mark.parametrize("code", NO_ROOM, ids=str)
@pytest.mark.parametrize("side", [Role.PREFILL, Role.DECODE])
def test_an_accepted_request_waits_for_room_however_often_it_finds_none(side: Role, code: FailureCode) -> None:
    course = Course()
    for number in range(1, 1500):
        attempt_id = AttemptId(f"r0.{number}")
        assert course.schedule().accepted == (number > 1) and course.schedule().avoid == frozenset()
        course.assign(attempt_id)
        if number > 1:
            course.feed(ev.DecodeReserved(attempt_id))
        full = [action for action in course.fail(code, side, attempt_id) if isinstance(action, ev.Report)]
        assert [(report.full, report.culprit) for report in full] == [(True, "")], "nobody is at fault"
        if (deadline := course.core.next_deadline()) is not None:
            assert course.now < deadline <= course.now + LIMITS.crowded_pause_max_s, "no busy loop, and no long sleep"
            course.now = deadline
            course.feed(Tick())
    course.assign(AttemptId("r0.1500"))
    course.feed(ev.DecodeReserved(AttemptId("r0.1500")))
    assert emitted(course.first_token(AttemptId("r0.1500"))) == [0]


def test_a_refusal_at_the_admission_check_after_a_token_is_no_refusal_any_more() -> None:
    """The first token comes over another connection and may overtake it."""
    course = Course()
    course.assign(refusable=True)
    course.first_token()
    course.fail(FailureCode.OVERLOADED)
    assert course.schedule().accepted and course.schedule().block_keys == keys(0, 0, 0, 0)


@pytest.mark.parametrize("waits", [False, True], ids=["in prefill", "waiting for room"])
def test_the_time_at_a_node_is_no_waiting_for_somebody_to_be_there(waits: bool) -> None:
    """Nobody is there for a moment, then a node that has it for minutes, and is lost together with all others."""
    course = Course()
    course.assign()
    course.lose(Role.DECODE)
    course.reject(Reason.NO_DECODE, SECOND)
    attempt_id = asked_again(course)
    course.assign(attempt_id, waits=waits)
    course.now += 10 * LIMITS.capacity_wait_s
    course.lose(Role.DECODE, attempt_id)
    course.reject(Reason.NO_DECODE, asked_again(course))
    assert not any(isinstance(action, ev.Terminal) for action in course.did)
    course.now += LIMITS.capacity_wait_s
    course.reject(Reason.NO_DECODE, asked_again(course))
    assert isinstance(course.error(), Unavailable), "now there has been nobody for as long as it waits"


def asked_again(course: Course) -> AttemptId:
    """The attempt that the Conductor is asked about next."""
    while not course.core._asked:
        course.now = max(course.now, course.core.next_deadline() or 0.0)
        course.feed(Tick())
    (attempt_id,) = course.core._asked
    return attempt_id


def test_waiting_for_room_is_not_waiting_for_somebody_to_be_there() -> None:
    course = Course()
    course.assign()
    course.lose(Role.DECODE)
    course.reject(Reason.NO_DECODE, SECOND)
    course.now = course.core.next_deadline() or 0.0
    course.feed(Tick())
    course.assign(SECOND if not course.core._asked else next(iter(course.core._asked)), waits=True)
    (attempt_id,) = course.core._by_attempt
    course.now += 10 * LIMITS.capacity_wait_s
    course.fail(FailureCode.POOL_FULL, attempt_id=attempt_id)
    course.reject(Reason.NO_DECODE, course.schedule().attempt_id)
    assert not any(isinstance(action, ev.Terminal) for action in course.did)


def test_where_there_is_no_room_prefill_begins_when_the_decode_node_has_some() -> None:
    course = Course()
    (start,) = course.assign(waits=True)
    assert isinstance(start, ev.StartAtDecode) and start.start.waits
    course.now += 2.0
    (begin,) = course.feed(ev.DecodeReserved(FIRST))
    assert isinstance(begin, ev.StartAtPrefill) and begin.start.request.age_s == 2.0
    assert course.feed(ev.DecodeReserved(FIRST)) == [], "a repeat changes nothing"
    assert emitted(course.first_token()) == [0]


def test_who_waits_for_room_has_nothing_at_the_prefill_side() -> None:
    course = Course()
    course.assign(waits=True)
    assert course.lose(Role.PREFILL) == []
    course.feed(ev.ClientGone(RequestId("r0")))
    assert [action.side for action in course.did if isinstance(action, ev.Abort)] == [Role.DECODE]


def test_a_request_keeps_its_age_over_its_attempts() -> None:
    course = Course()
    course.assign()
    course.now += 3.0
    course.fail(FailureCode.PREEMPTED)
    (start,) = course.assign(SECOND)
    assert isinstance(start, ev.StartAtDecode) and start.start.request.age_s == 3.0


def test_what_is_too_large_for_the_nodes_that_are_left_waits_for_the_others() -> None:
    course = Course()
    course.assign()
    course.lose(Role.DECODE)
    assert course.reject(Reason.TOO_LARGE, SECOND) == [] and course.core.next_deadline() is not None


def test_a_node_that_cannot_take_what_another_has_begun_is_avoided() -> None:
    course = Course()
    course.assign()
    course.first_token()
    course.fail(FailureCode.INVALID)
    assert course.schedule().avoid == {"d0"} and course.schedule().accepted


def test_an_objective_that_no_load_would_let_it_meet_is_no_overload() -> None:
    course = Course()
    course.feed(ev.Rejected(FIRST, Rejection(Reason.TTFT, "takes 9000 ms with nobody else there")))
    error = course.error()
    assert isinstance(error, InvalidRequest) and error.code == "objective_unattainable"


def test_a_deadline_that_passes_ends_the_request_wherever_it_is() -> None:
    for at in ("asked", "waiting", "running"):
        course = Course(deadline_ms=1500.0)
        if at != "asked":
            course.assign(waits=at == "waiting")
        if at == "running":
            course.first_token()
        course.now += 1.0
        assert course.feed(Tick()) == []
        course.now += 1.0
        course.feed(Tick())
        error = course.error()
        assert isinstance(error, DeadlineExceeded) and ("with 1 tokens" in error.message) == (at == "running")


def test_attempts_without_progress_are_limited_and_progress_starts_the_count_anew() -> None:
    course = Course()
    course.assign()
    course.lose(Role.DECODE)
    course.assign(SECOND)
    course.first_token(SECOND)
    course.tokens(1, 1, attempt_id=SECOND)
    course.lose(Role.DECODE, SECOND)
    for number in (3, 4, 5):
        course.assign(AttemptId(f"r0.{number}"))
        course.lose(Role.DECODE, AttemptId(f"r0.{number}"))
        if (deadline := course.core.next_deadline()) is not None:
            course.now = deadline
            course.feed(Tick())
    assert isinstance(course.error(), Unavailable)


def test_an_instance_that_cannot_be_reached_is_waited_for_and_costs_no_attempt() -> None:
    course = Course()
    started = course.now
    number = 1
    while not any(isinstance(action, ev.Terminal) for action in course.did):
        attempt_id = AttemptId(f"r0.{number}")
        course.assign(attempt_id)
        course.lose(Role.DECODE, attempt_id, connected=False)
        if (deadline := course.core.next_deadline()) is not None:
            course.now = deadline
            course.feed(Tick())
        number += 1
    assert number > LIMITS.max_attempts + 2
    assert LIMITS.capacity_wait_s <= course.now - started < LIMITS.capacity_wait_s + 1
    assert isinstance(course.error(), Unavailable)


@pytest.mark.parametrize(("accepted", "patience_s"), [(False, LIMITS.arrival_wait_s), (True, LIMITS.capacity_wait_s)])
def test_a_request_waits_for_instances_before_it_fails(accepted: bool, patience_s: float) -> None:
    course = Course(accepted=accepted)
    started = course.now
    number = 1
    while not any(isinstance(action, ev.Terminal) for action in course.reject(Reason.NO_DECODE, AttemptId(f"r0.{number}"))):
        deadline = course.core.next_deadline()
        assert deadline is not None
        course.now = deadline
        course.feed(Tick())
        number += 1
    assert patience_s <= course.now - started < patience_s + 1
    assert isinstance(course.error(), Unavailable)


def asked_at(core: GatewayCore, until_s: float, answer: Callable[[AttemptId], ev.Event]) -> list[float]:
    """When it asks the Conductor, which answers so, from 0 on."""
    asked, now = [], 0.0
    waiting = [action.attempt_id for number in range(3) for action in core.handle(ev.Arrived(generation(number, 4)), now) if asks(action)]
    while now < until_s:
        for attempt_id in waiting:
            core.handle(answer(attempt_id), now)
            core.validate()
        now = core.next_deadline() or until_s
        waiting = [action.attempt_id for action in core.handle(Tick(), now) if asks(action)]
        asked += [now] * len(waiting)
    return asked


def asks(action: ev.Action) -> TypeGuard[Schedule]:
    return isinstance(action, Schedule)


@pytest.mark.parametrize("silent", [False, True])
def test_all_who_wait_for_somebody_to_be_there_ask_together_as_often_as_one(silent: bool) -> None:
    nobody, within_s = Rejection(Reason.NO_PREFILL, "no prefill instance is ready", 3.0), 0.9 * LIMITS.scheduler_wait_s
    asked = asked_at(
        new_core(), within_s, lambda attempt: ev.SchedulerUnreachable(attempt, "gone") if silent else ev.Rejected(attempt, nobody)
    )
    assert len(asked) == pytest.approx(within_s * LIMITS.asked_per_s, abs=3)


def test_who_waits_for_somebody_to_be_there_asks_as_soon_as_another_has_found_somebody() -> None:
    core = new_core()
    nobody = Rejection(Reason.NO_DECODE, "no decode node is ready", 3.0)
    for number in range(40):
        core.handle(ev.Arrived(generation(number, 4)), 0.0)
        core.handle(ev.Rejected(AttemptId(f"r{number}.1"), nobody), 0.0)
    (first,) = (action for action in core.handle(ev.Arrived(generation(40, 4)), 0.01) if asks(action))
    answers, asked = [first.attempt_id], []
    while answers:
        follow = [action.attempt_id for action in core.handle(assignment(answers.pop(0)), 0.01) if asks(action)]
        assert len(follow) < 10, "not thousands at once"
        core.validate()
        answers += follow
        asked += follow
    assert sorted(asked) == sorted(AttemptId(f"r{number}.2") for number in range(40))


def test_an_unanswered_question_is_asked_again_for_the_same_attempt() -> None:
    course = Course()
    course.feed(ev.SchedulerUnreachable(FIRST, "gone"))
    course.now += 1
    course.feed(Tick())
    assert course.schedule().attempt_id == FIRST


def test_an_assignment_that_comes_after_the_client_has_gone_is_given_back() -> None:
    course = Course()
    course.feed(ev.ClientGone(RequestId("r0")))
    assert course.assign() == [ev.Report(Progress(FIRST, Phase.FINISHED))]


def test_a_client_that_goes_frees_both_sides() -> None:
    course = Course()
    course.assign()
    actions = course.feed(ev.ClientGone(RequestId("r0")))
    assert [action.side for action in actions if isinstance(action, ev.Abort)] == [Role.DECODE, Role.PREFILL]
    assert actions[-1] == ev.Terminal(RequestId("r0"), ev.Cancelled())


def test_a_lost_peer_makes_both_instances_suspect() -> None:
    course = Course()
    course.assign()
    course.fail(FailureCode.PEER_LOST)
    assert course.schedule().avoid == {"p0", "d0"}


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_a_token_that_ends_the_answer_may_be_overtaken_by_the_hand_over_that_is_given_up_for_it(max_tokens: int) -> None:
    course = Course(max_tokens=max_tokens)
    course.assign()
    assert course.fail(FailureCode.ABORTED) == []
    only = TokenOutput(FIRST, 0, (SampledToken(7),), Finish.LENGTH if max_tokens == 1 else Finish.STOP)
    actions = course.feed(PrefillDone(only, cached_tokens=2))
    assert emitted(actions) == [7] and isinstance(actions[-1], ev.Terminal)


def test_a_token_that_is_not_the_last_and_is_handed_over_to_nobody_makes_another_attempt() -> None:
    course = Course(max_tokens=2)
    course.assign()
    course.fail(FailureCode.ABORTED)
    actions = course.first_token()
    assert emitted(actions) == [0], "it is the client's all the same"
    assert course.schedule().avoid == {"p0", "d0"}


@pytest.mark.parametrize("code", [FailureCode.ABORTED, FailureCode.PEER_LOST])
def test_who_parts_once_the_first_token_is_out_makes_both_instances_suspect(code: FailureCode) -> None:
    course = Course(max_tokens=2)
    course.assign()
    course.first_token()
    course.fail(code)
    assert course.schedule().avoid == {"p0", "d0"}


@pytest.mark.parametrize("lost", [False, True])
def test_who_gives_the_hand_over_up_and_fails_is_replaced_alone(lost: bool) -> None:
    course = Course()
    course.assign()
    course.fail(FailureCode.ABORTED)
    if lost:
        course.lose(Role.PREFILL)
    else:
        course.fail(FailureCode.INTERNAL, Role.PREFILL)
    assert course.schedule().avoid == {"p0"}


def test_who_gives_the_hand_over_up_for_want_of_room_is_waited_for() -> None:
    course = Course()
    course.assign()
    course.fail(FailureCode.ABORTED)
    course.fail(FailureCode.PREEMPTED, Role.PREFILL)
    assert course.schedule().avoid == frozenset()


@pytest.mark.parametrize("started", [False, True])
def test_a_hand_over_that_the_decode_node_has_given_up_for_want_of_room_is_waited_for(started: bool) -> None:
    course = Course()
    course.assign()
    if started:
        course.first_token()
    assert course.fail(FailureCode.ABORTED, Role.PREFILL) == []
    course.fail(FailureCode.PREEMPTED)
    assert course.schedule().avoid == frozenset()


def test_who_both_say_that_the_other_has_given_it_up_have_parted() -> None:
    course = Course()
    course.assign()
    course.fail(FailureCode.ABORTED)
    course.fail(FailureCode.ABORTED, Role.PREFILL)
    assert course.schedule().avoid == {"p0", "d0"}


def test_what_was_told_ahead_of_the_first_token_counts_though_the_hand_over_was_given_up() -> None:
    course = Course(max_tokens=5)
    course.assign()
    course.tokens(1, 1, 2)
    course.fail(FailureCode.ABORTED)
    assert emitted(course.first_token()) == [0, 1, 2]
    assert course.schedule().avoid == {"p0", "d0"}


def test_who_goes_on_from_a_token_that_nobody_has_made_is_not_believed() -> None:
    course = Course()
    course.assign()
    course.fail(FailureCode.ABORTED, Role.PREFILL)
    assert emitted(course.tokens(1, 1, 2)) == []
    assert course.schedule().avoid == {"p0", "d0"}


def test_a_preempted_request_may_come_back_to_the_same_instance() -> None:
    course = Course()
    course.assign()
    course.fail(FailureCode.PREEMPTED)
    assert course.schedule().avoid == frozenset()


# ---- nodes that hang ----


def ticks(course: Course, seconds: float, signs: Callable[[], list[ev.Signs]] = list) -> None:
    """Time goes by as it does for a gateway that is not held up, until the attempt has failed."""
    course.feed(Tick())
    for _ in range(round(2 * seconds)):
        if not course.core.live_attempts():
            return
        course.now += 0.5
        for event in signs():
            course.feed(event)
        course.feed(Tick())


def test_a_node_that_does_not_name_the_attempt_has_lost_it() -> None:
    course = Course()
    course.assign()
    course.first_token()
    ticks(course, LIMITS.silence_s - 0.5)
    course.feed(ev.Signs(Role.DECODE, ()))
    ticks(course, 0.5)
    assert course.schedule().avoid == {"d0"}


def test_before_the_first_token_both_sides_owe_a_sign_and_either_alone_is_not_enough() -> None:
    course = Course()
    course.assign()
    ticks(course, LIMITS.silence_s, lambda: [ev.Signs(Role.DECODE, (AttemptSign(FIRST, 0, True),))])
    assert course.schedule().avoid == {"p0"}


def test_a_decode_node_whose_hand_over_is_given_up_owes_no_sign() -> None:
    course = Course()
    course.assign()
    course.fail(FailureCode.ABORTED)
    ticks(course, 2 * LIMITS.silence_s, lambda: [ev.Signs(Role.PREFILL, (AttemptSign(FIRST, 0, True),))])
    assert course.lose(Role.DECODE) == []
    only = TokenOutput(FIRST, 0, (SampledToken(7),), Finish.STOP)
    actions = course.feed(PrefillDone(only, cached_tokens=2))
    assert emitted(actions) == [7] and isinstance(actions[-1], ev.Terminal)


def test_who_gives_the_hand_over_up_and_does_not_say_why_is_replaced() -> None:
    course = Course()
    course.assign()
    course.fail(FailureCode.ABORTED)
    ticks(course, LIMITS.silence_s)
    assert course.schedule().avoid == {"p0"}


def test_a_prompt_of_minutes_goes_on_as_long_as_it_gets_on() -> None:
    course = Course()
    course.assign()
    done = itertools.count()

    def computing() -> list[ev.Signs]:
        return [
            ev.Signs(Role.PREFILL, (AttemptSign(FIRST, next(done) // 16, False),)),
            ev.Signs(Role.DECODE, (AttemptSign(FIRST, 0, True),)),
        ]

    ticks(course, 600, computing)
    assert course.core.live_attempts()


def test_who_waits_for_its_turn_need_not_get_on() -> None:
    course = Course()
    course.assign()
    ticks(course, 600, lambda: [ev.Signs(side, (AttemptSign(FIRST, 0, True),)) for side in Role])
    assert course.core.live_attempts()


def test_an_attempt_that_its_node_works_on_without_any_headway_is_stuck() -> None:
    course = Course()
    course.assign()
    course.first_token()

    def stuck() -> list[ev.Signs]:
        return [ev.Signs(Role.DECODE, (AttemptSign(FIRST, 4, False),))]

    ticks(course, LIMITS.standstill_s - 1, stuck)
    assert course.core.live_attempts()
    ticks(course, 3, stuck)
    assert course.schedule().avoid == {"d0"}


def test_a_gateway_that_was_held_up_itself_blames_no_node() -> None:
    course = Course()
    course.assign()
    course.feed(Tick())
    course.now += 60
    course.feed(Tick())
    assert course.core.live_attempts()


def test_attempts_at_an_instance_that_hangs_go_on_elsewhere_at_once() -> None:
    course = Course()
    course.assign()
    course.first_token()
    course.feed(ev.InstancesHung(frozenset({(InstanceId("d1"), "d1:1"), (InstanceId("d0"), "d0:0")})))
    assert course.core.live_attempts(), "neither another instance nor an earlier life of this one concerns it"
    course.feed(ev.InstancesHung(frozenset({(InstanceId("d0"), "d0:1")})))
    again = course.schedule()
    assert again.avoid == {"d0"} and again.accepted
