"""Every field of every API is served or refused by name, and docs/conformance.md says which."""

from __future__ import annotations

import pytest

from tests.conformance.__main__ import PAGE
from tests.conformance.trials import Outcome, Result, all_results
from tests.support.cluster import Cluster


@pytest.fixture(scope="module")
def results() -> list[Result]:
    with Cluster() as cluster:
        return all_results(cluster.url, cluster.model)


def test_every_field_and_every_endpoint_is_served_or_refused_by_name(results: list[Result]) -> None:
    assert [result for result in results if result.outcome is Outcome.WRONG] == []
    assert sum(result.outcome is Outcome.SERVED for result in results) > len(results) / 2


def test_the_page_says_what_came_of_it(results: list[Result]) -> None:
    """Of a newer SDK than the page was made with, further fields are not in it yet."""
    page, surface, served, refused = PAGE.read_text(), "", set(), set()
    for line in page.splitlines():
        if line.startswith("## "):
            surface = line.removeprefix("## ").lower()
        elif line.startswith("Served ("):
            served |= {(surface, name) for name in line.split("`")[1::2]}
        elif line.startswith("| `"):
            refused.add((surface, line.split("`")[1]))
    for result in results:
        row = (result.surface.lower(), result.name)
        if row in served | refused:
            assert (row in served) is (result.outcome is Outcome.SERVED), result
    assert len(served | refused) > 0.9 * len(results)
