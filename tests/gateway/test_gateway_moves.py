"""A request that moves to another decode node, event by event."""

from __future__ import annotations

from collections.abc import Sequence

from gateway_world import assignment, generation, instance, new_core

from gateway import events as ev
from springtide.ids import AttemptId, InstanceId
from springtide.protocol.attempts import Phase
from springtide.protocol.instances import Role
from springtide.protocol.outputs import AttemptFailed, Failure, FailureCode, Finish, PrefillDone, SampledToken, TokenOutput
from springtide.protocol.starts import ForetellTokens

FIRST, SECOND, THIRD = AttemptId("r0.1"), AttemptId("r0.2"), AttemptId("r0.3")


class Moving:
    """One request of `max_tokens` tokens, 0 and on, which decodes at d0 and has sent 2, and whose successor has begun at d1."""

    def __init__(self, max_tokens: int = 40) -> None:
        self.core = new_core()
        self.emitted = list[int]()
        self.told: list[ForetellTokens] = []
        self.feed(ev.Arrived(generation(0, max_tokens)))
        self.feed(assignment(FIRST))
        self.first(FIRST, 0)
        self.tokens(FIRST, 1)
        self.feed(ev.MovesWanted((FIRST,)))
        self.feed(assignment(SECOND, instance("d1"), instance("d1")))

    def feed(self, event: ev.Event) -> list[ev.Action]:
        actions = self.core.handle(event, 100.0)
        self.core.validate()
        for action in actions:
            match action:
                case ev.Emit(_, tokens):
                    self.emitted += [token.token_id for token in tokens]
                case ev.Foretell(instance_id, told):
                    assert instance_id == "d1"
                    self.told.append(told)
        return actions

    def first(self, attempt_id: AttemptId, position: int, *, most_foretold: int = 2) -> list[ev.Action]:
        output = TokenOutput(attempt_id, position, (SampledToken(position),))
        return self.feed(PrefillDone(output, cached_tokens=2, most_foretold=most_foretold))

    def tokens(self, attempt_id: AttemptId, *positions: int, finish: Finish | None = None) -> list[ev.Action]:
        return self.feed(TokenOutput(attempt_id, positions[0], tuple(SampledToken(at) for at in positions), finish))

    def lose(self, name: str, attempt_id: AttemptId) -> list[ev.Action]:
        return self.feed(ev.SessionLost(Role.DECODE, InstanceId(name), (attempt_id,), connected=True))


def moved(actions: Sequence[ev.Action]) -> list[ev.Moved]:
    return [action for action in actions if isinstance(action, ev.Moved)]


def aborted(actions: Sequence[ev.Action]) -> list[AttemptId]:
    return [action.attempt_id for action in actions if isinstance(action, ev.Abort)]


def test_a_successor_is_foretold_what_has_come_since_it_began_and_takes_the_place_when_a_step_computes_what_it_lacks() -> None:
    moving = Moving()
    moving.tokens(FIRST, 2)
    moving.tokens(FIRST, 3, 4, 5)
    assert moving.told == [ForetellTokens(SECOND, 2, (2,)), ForetellTokens(SECOND, 3, (3, 4, 5))]
    assert moving.first(SECOND, 2) == [], "it is 3 behind, and the client waits for nobody"
    moving.tokens(FIRST, 6)
    assert moving.tokens(SECOND, 3) == [], "3 behind"
    actions = moving.tokens(SECOND, 4, 5)
    assert [(one.source, one.target, one.behind) for one in moved(actions)] == [("d0", "d1", 1)] and aborted(actions) == [FIRST]
    assert moving.emitted == [0, 1, 2, 3, 4, 5, 6]
    assert moving.tokens(FIRST, 7) == [], "it is over"
    moving.tokens(SECOND, 6, 7)
    assert moving.emitted == [0, 1, 2, 3, 4, 5, 6, 7]
    assert moving.told[-1] == ForetellTokens(SECOND, 6, (6,)), "who has the place is foretold nothing"


def test_a_successor_that_lacks_no_more_than_a_step_computes_takes_the_place_after_its_first_step() -> None:
    moving = Moving()
    moving.tokens(FIRST, 2, 3, 4)
    assert moving.first(SECOND, 2) == []
    moving.tokens(FIRST, 5)
    (one,) = moved(moving.tokens(SECOND, 3))
    assert one.behind == 2
    moving.tokens(SECOND, 4, 5, 6)
    assert moving.emitted == [0, 1, 2, 3, 4, 5, 6]


def test_a_successor_whose_first_token_is_new_takes_the_place_with_it() -> None:
    moving = Moving()
    assert moved(moving.first(SECOND, 2)) and moving.emitted == [0, 1, 2]


def test_the_tokens_of_a_successor_that_is_ahead_go_to_the_client() -> None:
    moving = Moving()
    moving.tokens(FIRST, 2, 3, 4, 5, 6)
    moving.first(SECOND, 2)
    actions = moving.tokens(SECOND, 3, 4, 5, 6, 7)
    assert moved(actions)[0].behind == 0
    assert moving.emitted == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_successor_that_computes_one_token_at_a_time_takes_the_place_or_makes_room_for_another() -> None:
    moving = Moving()
    moving.tokens(FIRST, 2, 3)
    assert moved(moving.first(SECOND, 2, most_foretold=0))[0].behind == 1
    moving = Moving()
    for at in range(2, 7):
        moving.tokens(FIRST, at)
    actions = moving.first(SECOND, 2, most_foretold=0)
    (start,) = [action for action in actions if isinstance(action, ev.StartAtDecode)]
    assert start.successor and start.start.request.attempt_id == THIRD and start.start.request.first_position == 7
    assert aborted(actions) == [SECOND]
    moving.tokens(FIRST, 7)
    assert moving.told[-1] == ForetellTokens(THIRD, 7, (7,))
    assert moved(moving.first(THIRD, 7, most_foretold=0))


def test_a_successor_that_catches_up_takes_over_where_it_is_when_the_old_place_fails() -> None:
    moving = Moving()
    for at in range(2, 7):
        moving.tokens(FIRST, at)
    moving.first(SECOND, 2)
    actions = moving.lose("d0", FIRST)
    assert [(one.target, one.behind) for one in moved(actions)] == [("d1", None)]
    progress = [action.progress for action in actions if isinstance(action, ev.Report)]
    assert [(one.attempt_id, one.phase) for one in progress] == [(FIRST, Phase.FAILED), (SECOND, Phase.DECODE)]
    moving.tokens(SECOND, 3, 4, 5, 6)
    moving.tokens(SECOND, 7)
    assert moving.emitted == list(range(8))


def test_a_successor_that_fails_while_it_catches_up_is_forgotten() -> None:
    moving = Moving()
    moving.tokens(FIRST, 2, 3, 4, 5)
    moving.first(SECOND, 2)
    failed = AttemptFailed(SECOND, Failure(FailureCode.POOL_FULL, "full"))
    assert any(isinstance(action, ev.MoveGivenUp) for action in moving.feed(ev.SideFailed(Role.DECODE, failed)))
    told = len(moving.told)
    moving.tokens(FIRST, 6)
    assert moving.emitted == [0, 1, 2, 3, 4, 5, 6] and len(moving.told) == told


def test_a_successor_that_comes_to_another_token_or_to_an_end_where_there_was_none_is_given_up() -> None:
    for output in (
        TokenOutput(SECOND, 3, (SampledToken(9),)),
        TokenOutput(SECOND, 3, (), Finish.STOP),
        TokenOutput(SECOND, 5, (SampledToken(5),)),
    ):
        moving = Moving()
        for at in range(2, 7):
            moving.tokens(FIRST, at)
        moving.first(SECOND, 2)
        actions = moving.feed(output)
        assert any(isinstance(action, ev.MoveGivenUp) for action in actions) and aborted(actions) == [SECOND], output


def test_what_a_successor_says_twice_changes_nothing() -> None:
    moving = Moving()
    for at in range(2, 9):
        moving.tokens(FIRST, at)
    moving.first(SECOND, 2)
    moving.tokens(SECOND, 3)
    assert moving.first(SECOND, 2) == [] and moving.tokens(SECOND, 3) == []
    assert moved(moving.tokens(SECOND, 4, 5, 6))


def test_a_successor_that_comes_to_the_end_first_ends_the_request() -> None:
    moving = Moving(max_tokens=8)
    moving.tokens(FIRST, 2, 3, 4, 5, 6)
    moving.first(SECOND, 2)
    actions = moving.tokens(SECOND, 3, 4, 5, 6, 7, finish=Finish.LENGTH)
    assert moving.emitted == list(range(8)) and moved(actions)
    (end,) = [action for action in actions if isinstance(action, ev.Terminal)]
    assert isinstance(end.reply, ev.Finished) and end.reply.reason is Finish.LENGTH
    assert aborted(actions) == [FIRST]


def test_nothing_is_foretold_at_the_end() -> None:
    moving = Moving(max_tokens=3)
    actions = moving.tokens(FIRST, 2, finish=Finish.LENGTH)
    assert moving.told == [] and aborted(actions) == [SECOND]
