"""Every endpoint and field of every API has its effect, asks for nothing, or is refused by name, and docs/conformance.md says which."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance import grpc_fields
from tests.conformance.__main__ import PAGE
from tests.conformance.cluster import running
from tests.conformance.expected import SEEN_BY
from tests.conformance.trials import Outcome, Result, all_results, rows, said

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results() -> list[Result]:
    with running() as server:
        return all_results(server)


def test_everything_has_its_effect_or_asks_for_nothing_or_is_refused_by_name(results: list[Result]) -> None:
    assert [result for result in results if result.outcome is Outcome.WRONG] == []
    assert sum(result.outcome is Outcome.CHECKED for result in results) > len(results) / 3


def test_the_page_says_of_each_what_came_of_it_and_has_no_others(results: list[Result]) -> None:
    """`python -m tests.conformance` makes it anew. The SDKs' versions are in constraints.txt."""
    assert rows(PAGE.read_text()) == {(result.surface.lower(), result.name): said(result) for result in results}


def test_whose_effect_no_answer_shows_has_a_test_that_is_there() -> None:
    named = {(name, test) for tests in SEEN_BY.values() for name, test in tests.items()}
    named |= {(name, test) for name, test in {**grpc_fields.METHODS, **grpc_fields.FIELDS}.items()}
    named |= {(name, grpc_fields.REFUSED_BY) for name in grpc_fields.REFUSED}
    for name, test in named:
        file, _, function = test.partition("::")
        assert f"def {function}(" in (REPOSITORY / file).read_text(), (name, test)
