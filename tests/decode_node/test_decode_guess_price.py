"""What guesses are taken to cost: what steps with guesses took. Nothing else is concluded from these."""

from __future__ import annotations

import pytest

from decode_node.core import drafting
from decode_node.core import events as ev
from decode_node.core.actions import RunStep
from decode_node.core.drafting import GuessPrice
from decode_node.core.scheduling import drafts
from springtide.cost import DecodeCost
from springtide.protocol.outputs import SampledToken
from tests.support.decode_core import Node, only, start

COST = DecodeCost(10.0, 0.5, 0.0)


class Copying:
    """A node with one sequence of which each guess is right."""

    def __init__(self, most_drafted: int = 4) -> None:
        self.node = Node(4000, most_drafted=most_drafted)
        (self.run,) = only(self.node.join(start("a", 10, max_tokens=20_000)), RunStep)

    def step(self, guess_ms: float, slowdown: float = 1.0) -> int:
        """Runs one, in which each guess takes so long; returns how many there were."""
        run, drafted = self.run, self.run.rows[0].most_drafted
        elapsed_ms = slowdown * (2.0 + 0.01 * run.context_tokens) + drafted * guess_ms
        tokens = [5] * (1 + drafted)
        run.rows[0].output_ids.extend(tokens)
        done = ev.StepDone(run.step_id, [[SampledToken(token) for token in tokens]], elapsed_ms, drafted=[drafted] if drafted else ())
        (self.run,) = only(self.node.tell(done), RunStep)
        return drafted


def test_guesses_cost_what_most_steps_with_them_took_more() -> None:
    price = GuessPrice()
    assert price.row_ms(COST, 10.5) == 0.5, "nothing is known yet"
    for extra_ms in (8.0, 8.4, 900.0, 7.6, 8.0):
        price.observe(4, extra_ms)
    assert price.row_ms(COST, 10.5) == 2.0


def test_no_guess_is_free() -> None:
    price = GuessPrice()
    assert price.row_ms(DecodeCost(10.0, 0.0, 0.0), 10.0) == pytest.approx(0.1), "a fit may say that rows take nothing"
    for _ in range(4):
        price.observe(4, -3.0)
    assert price.row_ms(COST, 10.0) == pytest.approx(0.1)


def test_where_a_row_takes_nothing_by_the_fit_who_is_never_right_guesses_nothing_and_objectives_hold() -> None:
    node = Node(100)
    node.join(start("a", 10, tbt_slo_ms=10.35 / 0.85))
    (attempt,) = node.core._holders
    free, price = DecodeCost(10.0, 0.0, 0.0), GuessPrice()
    assert drafts([attempt], free, price, 8, 8) == [3], "by the objective"
    for _ in range(30):
        (drafted,) = drafts([attempt], free, price, 8, 8)
        attempt.guessing.observe(drafted, 0)
    assert drafts([attempt], free, price, 8, 8) == [0]


def test_guesses_that_are_dearer_than_what_they_save_are_not_made_until_they_are_tried_again() -> None:
    copying = Copying()
    drafted = [copying.step(30.0) for _ in range(10 + 2 * drafting._STEPS_TO_RETRY)]
    assert drafted[0] > 0 and 1 <= sum(count > 0 for count in drafted[10:]) <= 2, "the cost model says 1.0, for which they would pay"
    assert copying.node.core.foreseen().unguessed_ms == pytest.approx(30.0)
    later = [copying.step(0.1) for _ in range(4 * drafting._STEPS_TO_RETRY)]
    assert sum(count == 4 for count in later[-50:]) >= 48, "they have become cheap"


def test_guesses_that_take_nothing_are_made_though_more_sequences_would_take_long() -> None:
    copying = Copying()
    for _ in range(20):
        copying.step(0.0)
    foreseen = copying.node.core.foreseen()
    assert foreseen.most_drafted == 4 and foreseen.unguessed_ms < 0.1
    without_ms = copying.node.core.cost.predict_ms(1, copying.run.context_tokens)
    assert foreseen.predicted_ms == pytest.approx(without_ms + 4 * foreseen.unguessed_ms)


def test_what_steps_with_guesses_take_changes_nothing_else_that_is_known_of_steps() -> None:
    copying = Copying()
    for _ in range(drafting._STEPS_TO_COMPARE):
        assert copying.step(0.9) > 0
    assert copying.node.core.cost == DecodeCost(1.0, 1.0, 0.01)
    assert not copying.node.core._disturbance._alone


def test_now_and_then_a_step_has_no_guesses_and_tells_how_slow_the_machine_is() -> None:
    copying = Copying()
    drafted = [copying.step(0.0, slowdown=1.2) for _ in range(8 * drafting._STEPS_TO_COMPARE)]
    assert sum(not count for count in drafted) == pytest.approx(8, abs=1)
    assert copying.node.core.cost.per_sequence_ms == pytest.approx(1.2)


def test_what_is_reported_of_steps_is_the_time_between_tokens() -> None:
    copying = Copying()
    for _ in range(20):
        copying.step(0.0)
    assert copying.run.most_drafted == 4
    elapsed_ms = 2.0 + 0.01 * copying.run.context_tokens
    for _ in range(20):
        copying.step(0.0)
    assert copying.node.load().step_ms == pytest.approx(elapsed_ms / 5, rel=0.3)
