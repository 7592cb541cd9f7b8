"""Requests in idle capacity at the gateway: they wait for it as long as it takes, one of them asks, and what takes it from them is no
failure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gateway_world import LIMITS, assignment, generation, new_core

from gateway import events as ev
from gateway.idle_line import LONGEST_PAUSE_S
from springtide.clock import Tick
from springtide.ids import AttemptId, RequestId
from springtide.protocol.instances import Role
from springtide.protocol.outputs import AttemptFailed, AttemptSign, Failure, FailureCode, Finish, PrefillDone, SampledToken, TokenOutput
from springtide.protocol.scheduling import Reason, Rejection, Schedule

NOT_IDLE = Rejection(Reason.NOT_IDLE, "no decode node has idle capacity just now", 0.1)


class Line:
    """A core with requests in idle capacity."""

    def __init__(self, count: int = 1) -> None:
        self.core = new_core()
        self.now = 100.0
        self.asked: list[str] = []
        self.did: list[ev.Action] = []
        for number in range(count):
            self.feed(ev.Arrived(generation(number, 4, idle=True)))

    def feed(self, event: ev.Event) -> list[ev.Action]:
        self.did = self.core.handle(event, self.now)
        self.core.validate()
        self.asked += [action.attempt_id for action in self.did if isinstance(action, Schedule)]
        return self.did

    def refuse(self) -> None:
        """Whoever asked last finds none."""
        self.feed(ev.Rejected(AttemptId(self.asked[-1]), NOT_IDLE))

    def wait(self) -> float:
        """Until something is due; returns how long that was."""
        due = self.core.next_deadline()
        assert due is not None
        waited, self.now = due - self.now, max(self.now, due)
        self.feed(Tick())
        return waited


def test_however_long_there_is_none_the_request_waits() -> None:
    line = Line()
    for _ in range(5000):
        line.refuse()
        assert not any(isinstance(action, ev.Terminal) for action in line.did)
        line.wait()
    assert line.now > 4900 and set(line.asked) == {f"r0.{tries}" for tries in range(1, 5002)}


def test_a_request_that_has_time_waits_for_a_conductor_or_a_node_as_long_as_one_that_was_accepted() -> None:
    """Its stream may have begun already."""
    nobody = Rejection(Reason.NO_DECODE, "no decode node is ready", 1.0)
    for lack in (lambda name: ev.SchedulerUnreachable(name, "it did not answer"), lambda name: ev.Rejected(name, nobody)):
        line = Line()
        line.refuse()
        line.wait()
        begun = line.now
        while not any(isinstance(action, ev.Terminal) for action in line.feed(lack(AttemptId(line.asked[-1])))):
            line.wait()
        assert line.now - begun == pytest.approx(LIMITS.capacity_wait_s)


def test_pauses_grow_up_to_a_second() -> None:
    line = Line()
    pauses = []
    for _ in range(6):
        line.refuse()
        pauses.append(round(line.wait(), 3))
    assert pauses == [0.1, 0.2, 0.4, 0.8, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


def test_one_at_a_time_asks_each_in_its_turn() -> None:
    line = Line(3)
    assert line.asked == ["r0.1"]
    for _ in range(4):
        line.refuse()
        line.wait()
    assert line.asked == ["r0.1", "r1.1", "r2.1", "r0.2", "r1.2"]


def test_when_one_finds_some_the_next_asks_at_once() -> None:
    line = Line(3)
    for name in ("r0.1", "r1.1", "r2.1"):
        line.feed(assignment(AttemptId(name)))
    assert line.asked == ["r0.1", "r1.1", "r2.1"] and len(line.core.live_attempts()) == 3
    assert all(attempt.idle for attempt in line.core.live_attempts())


def test_when_one_is_over_the_next_need_not_end_its_pause() -> None:
    line = Line(2)
    line.feed(assignment(AttemptId("r0.1")))
    line.refuse()
    line.feed(PrefillDone(TokenOutput(AttemptId("r0.1"), 0, (SampledToken(7),), Finish.STOP), 0))
    assert line.asked == ["r0.1", "r1.1", "r1.2"]


def test_what_was_taken_from_it_it_waits_for_anew_with_the_tokens_that_it_has() -> None:
    line = Line()
    line.feed(assignment(AttemptId("r0.1")))
    line.feed(PrefillDone(TokenOutput(AttemptId("r0.1"), 0, (SampledToken(7),)), 0))
    for tries in range(2, 40):
        line.feed(ev.SideFailed(Role.DECODE, AttemptFailed(AttemptId(line.asked[-1]), Failure(FailureCode.PREEMPTED, "others want it"))))
        while line.asked[-1] != f"r0.{tries}":
            line.wait()
        placed = line.feed(assignment(AttemptId(f"r0.{tries}")))
        (start,) = [action.start for action in placed if isinstance(action, ev.StartAtDecode)]
        assert start.request.token_ids[-1] == 7 and start.request.first_position == 1
        assert not start.waits, "it never waits at a node"


def test_a_client_that_leaves_makes_way_for_the_next() -> None:
    line = Line(3)
    line.feed(ev.ClientGone(RequestId("r1")))
    line.feed(ev.ClientGone(RequestId("r0")))
    assert line.asked == ["r0.1", "r2.1"]
    line.feed(assignment(AttemptId("r0.1")))
    assert line.asked == ["r0.1", "r2.1"], "that answer is for nobody"


class Prompt(Line):
    """One that is to be computed in idle capacity, and has patience."""

    def __init__(self) -> None:
        super().__init__(0)
        self.feed(ev.Arrived(replace(generation(0, 1, idle=True), prompt_only=True, patience_s=60.0)))

    def pass_(self, seconds: float) -> ev.Failed | None:
        """How it has ended, after so long in which a node shows the last sign again and the gateway looks."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            for action in self.feed(Tick()):
                if isinstance(action, ev.Terminal):
                    assert isinstance(action.reply, ev.Failed)
                    return action.reply
        return None

    def show(self, computed_tokens: int, waiting: bool) -> None:
        for side, waits in ((Role.PREFILL, waiting), (Role.DECODE, True)):
            self.feed(ev.Signs(side, (AttemptSign(AttemptId(self.asked[-1]), computed_tokens if side is Role.PREFILL else 0, waits),)))


def test_a_prompt_alone_for_which_nobody_is_idle_for_long_is_given_up() -> None:
    line = Prompt()
    begun = line.now
    while (ended := line.pass_(0.5)) is None:
        assert line.now < begun + 62
        line.refuse()
    assert ended.error.code == "no_progress" and line.now >= begun + 60
    assert not line.core.live_attempts() and line.core.next_deadline() is None


def test_a_prompt_alone_that_gets_on_is_not_given_up_and_one_that_waits_at_its_node_is() -> None:
    line = Prompt()
    line.feed(replace(assignment(AttemptId("r0.1")), predicted_ttft_ms=5000.0))

    def gets_on(computed_tokens: int, seconds: float) -> ev.Failed | None:
        until = line.now + seconds
        while line.now < until:
            line.show(computed_tokens, waiting=True)
            if (ended := line.pass_(0.5)) is not None:
                return ended
        return None

    for computed_tokens in range(3):
        assert gets_on(computed_tokens, 50.0) is None
    assert gets_on(2, 14.0) is None, "all of it may take 5 s"
    ended = gets_on(2, 2.0)
    assert ended is not None and ended.error.code == "no_progress"


def test_others_do_not_wait_in_this_line() -> None:
    line = Line(2)
    line.refuse()
    line.feed(ev.Arrived(generation(9, 4)))
    assert line.asked == ["r0.1", "r9.1"]
