"""Which layers each stage takes."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_node.core.split import split


def sizes(ranges: tuple[range, ...]) -> list[int]:
    return [len(layers) for layers in ranges]


def test_equal_layers_are_split_as_evenly_as_they_can_be() -> None:
    assert split([1.0] * 30, 1) == (range(30),)
    assert split([0.1] * 30, 3) == (range(10), range(10, 20), range(20, 30))
    assert sorted(sizes(split([0.1] * 30, 4))) == [7, 7, 8, 8]
    assert sizes(split([0.1] * 30, 30)) == [1] * 30


def test_a_costly_head_is_made_up_for_by_fewer_layers() -> None:
    assert sizes(split([1.0] * 10, 2, head=4.0)) == [7, 3]
    assert sizes(split([1.0] * 10, 2, embedding=2.0)) == [4, 6]


def test_a_few_costly_layers_stand_alone() -> None:
    assert split([1.0, 1.0, 1.0, 6.0, 1.0, 1.0], 3) == (range(3), range(3, 4), range(4, 6))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="3 layers cannot be split among 4"):
        split([1.0] * 3, 4)


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=8), st.data())
def test_no_other_split_has_a_quicker_slowest_stage(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    ranges = split(costs, stages)
    assert [layer for layers in ranges for layer in layers] == list(range(len(costs)))
    assert all(ranges)
    slowest = max(sum(costs[layer] for layer in layers) for layers in ranges)
    for ends in combinations(range(1, len(costs)), stages - 1):
        others = zip((0, *ends), (*ends, len(costs)), strict=True)
        assert slowest <= max(sum(costs[begin:end]) for begin, end in others) * (1 + 1e-6)
