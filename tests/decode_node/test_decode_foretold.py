"""Tokens that are foretold to an attempt, because another has come to them: a step computes them together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from decode_node.core import events as ev
from decode_node.core.actions import RunStep, StepRow
from decode_node.core.drafting import MOST_FORETOLD, Foretold, GuessPrice
from decode_node.core.scheduling import drafts
from decode_node.server.steps import StepRunner
from engine.batch import SamplingRow
from engine.formats.files import describe
from engine.loader import load_model
from engine.runner import ModelRunner
from springtide.cost import DecodeCost
from springtide.ids import AttemptId
from springtide.protocol.outputs import SampledToken
from springtide.protocol.sampling import SamplingParams
from springtide.protocol.starts import ForetellTokens
from tests.support.decode_core import Node, only, prefilled, start
from tests.support.models import make_tiny_llama

A = AttemptId("a")


def test_what_is_foretold_is_found_by_its_position() -> None:
    foretold = Foretold(MOST_FORETOLD)
    foretold.add(3, (30, 40))
    foretold.add(4, (40, 50))
    assert (foretold.draft(3, 9), foretold.draft(4, 1), foretold.end) == ([30, 40, 50], [40], 6)
    assert foretold.draft(2, 9) == foretold.draft(6, 9) == [], "what comes between is not known, or what comes then"
    assert [foretold.expected(position) for position in (2, 3, 6, 8)] == [0, 5, 2, 0]
    foretold.add(8, (80,))
    assert (foretold.draft(3, 9), foretold.draft(8, 9), foretold.end) == ([], [80], 9)


def foretell(node: Node, position: int, *token_ids: int) -> None:
    node.tell(ForetellTokens(A, position, token_ids))


def test_a_step_has_what_was_foretold_and_the_one_after_that_may_have_some_more() -> None:
    node = Node(100, most_foretold=16)
    (run,) = only(node.join(start("a", 10)), RunStep)
    assert run.most_drafted == 0
    foretell(node, 1, 5, 5, 5)
    foretell(node, 4, 6)
    (run,) = only(node.step(run), RunStep)
    (row,) = run.rows
    assert len(row.output_ids) == 2 and row.draft(9) == [5, 5, 6] and row.most_drafted == 5
    run.rows[0].output_ids.extend([5, 5, 6, 7])
    done = ev.StepDone(run.step_id, [[SampledToken(token) for token in (5, 5, 6, 7)]], 2.0, drafted=[3])
    (run,) = only(node.tell(done), RunStep)
    assert run.most_drafted == 1 and run.rows[0].draft(9) == []
    (run,) = only(node.step(run), RunStep)
    assert run.most_drafted == 0


def test_what_was_foretold_before_the_output_began_is_there_when_it_does() -> None:
    node = Node(100, most_foretold=16)
    node.tell(start("a", 10, inlined=True))
    foretell(node, 0, 100, 4, 4)
    (run,) = only(node.prompt_computed("a"), RunStep)
    assert run.rows[0].draft(9) == [4, 4]


def test_nothing_is_guessed_where_there_is_something_foretold_and_it_teaches_nothing_of_guesses() -> None:
    node = Node(100, most_drafted=8, most_foretold=16)
    (run,) = only(node.join(start("a", 10)), RunStep)
    guessing = node.core._attempts[A].guessing
    foretell(node, 1, *[5] * 12)
    (run,) = only(node.step(run), RunStep)
    assert run.rows[0].lookup is None and run.most_drafted == 13
    before = guessing._rate, guessing._unfound
    run.rows[0].output_ids.extend([5] * 11)
    (run,) = only(node.tell(ev.StepDone(run.step_id, [[SampledToken(5)] * 11], 2.0, drafted=[10])), RunStep)
    assert (guessing._rate, guessing._unfound) == before
    for _ in range(2):
        assert run.rows[0].lookup is None
        (run,) = only(node.step(run), RunStep)
    assert run.rows[0].foretold is None and run.rows[0].lookup is not None, "from here on it guesses"


@pytest.mark.parametrize("most", [0, 16])
def test_an_engine_says_how_many_it_computes_in_a_step_and_asks_for_no_slots_beyond_these(most: int) -> None:
    node = Node(100, most_foretold=most)
    node.tell(start("a", 10, inlined=True, max_tokens=400))
    foretell(node, 0, *[5] * 300)
    actions = node.prompt_computed("a", 5)
    assert [done.most_foretold for done in prefilled(actions)] == [most]
    (run,) = only(actions, RunStep)
    (run,) = only(node.step(run), RunStep)
    assert (run.most_drafted, len(run.rows[0].draft(99))) == ((0, 0) if not most else (most, most))
    assert len(node.store.held["a"]) == (3 if not most else 6), "for a step that runs, the next one, and the slot after that"


def test_what_is_foretold_to_nobody_here_changes_nothing() -> None:
    assert Node(100, most_foretold=16).tell(ForetellTokens(AttemptId("gone"), 0, (1,))) == []


def test_foretold_tokens_come_before_guesses_and_keep_to_the_objectives_of_all_who_are_in_the_step() -> None:
    """A step of two takes 10.2 ms, .85 of the objective is 11.25 ms, each token .1."""
    node = Node(100, most_foretold=16)
    node.join(start("a", 10))
    node.join(start("b", 10, tbt_slo_ms=11.25 / 0.85))
    running, cost = list(node.core._holders), DecodeCost(10.0, 0.1, 0.0)
    foretell(node, 1, *[5] * 6)
    assert drafts(running, cost, GuessPrice(), 8, 8) == [7, 3]
    foretell(node, 7, *[5] * 90)
    assert drafts(running, cost, GuessPrice(), 0, 8) == [min(10, running[0].draft_room(8)), 0]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    model: Path = make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=64)
    spec = describe(str(model)).kv_spec("float32", 48)
    return ModelRunner(load_model(describe(str(model)), "float32"), spec, np.zeros(2 * spec.bytes_per_slot, np.uint8), 2)


def test_those_come_in_one_step_that_are_right_up_to_the_first_that_is_not(runner: ModelRunner) -> None:
    """They may be foretold after the step was launched."""

    def counting(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        return [SampledToken(20 + len(row.output_ids)) for row in rows]

    prompt, output, foretold = [20, 21, 22], [20], Foretold(MOST_FORETOLD)
    sampling = SamplingRow(SamplingParams(temperature=0.0, max_tokens=12), prompt, output)
    runs = [RunStep(number, (StepRow(A, 3, (0, 1), sampling, output, 16, None, foretold),)) for number in range(2)]
    foretold.add(0, (20, 21, 22, 23, 99, 25))
    first = StepRunner(runner, counting).run(runs[0])
    assert isinstance(first, ev.StepDone) and first.drafted == [5]
    assert output == [20, 21, 22, 23, 24]
    foretold.add(5, (25, 26, 27, 28, 29, 30, 31, 32))
    second = StepRunner(runner, counting).run(runs[1])
    assert isinstance(second, ev.StepDone)
    assert output == list(range(20, 32)), "and no further than the output goes"
