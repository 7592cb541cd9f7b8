"""Every field of every API has its effect, asks for nothing, or is refused by name, and docs/conformance.md says which."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.__main__ import PAGE
from tests.conformance.cluster import running
from tests.conformance.expected import UNSEEN
from tests.conformance.trials import Outcome, Result, all_results, rows


@pytest.fixture(scope="module")
def results() -> list[Result]:
    with running() as server:
        return all_results(server)


def test_every_field_has_its_effect_or_asks_for_nothing_or_is_refused_by_name(results: list[Result]) -> None:
    assert [result for result in results if result.outcome is Outcome.WRONG] == []
    assert sum(result.outcome is Outcome.CHECKED for result in results) > len(results) / 3


def test_the_page_says_what_came_of_it(results: list[Result]) -> None:
    """Of a newer SDK than the page was made with, further fields are not in it yet."""
    page = rows(PAGE.read_text())
    for result in results:
        row = result.surface.lower(), result.name
        assert page.get(row, result.outcome) == result.outcome, result
    assert len(page) > 0.9 * len(results)


def test_whose_effect_no_answer_shows_has_a_test_of_its_own() -> None:
    named = {test for tests in UNSEEN.values() for test in tests.values()}
    assert all((Path(__file__).parents[2] / test).is_file() for test in named)
