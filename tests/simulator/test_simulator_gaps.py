"""The histogram of the times between tokens."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from simulator.cluster.gaps import Gaps

gaps_ms = st.lists(st.tuples(st.floats(0.002, 1e6), st.integers(1, 5)), min_size=1, max_size=30)


@given(gaps_ms, st.sampled_from([0.1, 0.5, 0.9, 0.99, 1.0]))
def test_a_percentile_is_within_a_bin_of_the_true_one(entries: list[tuple[float, int]], share: float) -> None:
    gaps = Gaps()
    for gap_ms, count in entries:
        gaps.add(gap_ms, count)
    each = sorted(gap_ms for gap_ms, count in entries for _ in range(count))
    true_ms = each[max(math.ceil(share * len(each)), 1) - 1]
    found_ms = gaps.percentile_ms(share)
    assert found_ms is not None
    assert true_ms < found_ms <= true_ms * 1.035


def test_without_a_gap_there_is_no_percentile_and_none_at_all_is_the_least() -> None:
    gaps = Gaps()
    assert gaps.percentile_ms(0.5) is None
    gaps.add(0.0, 3)
    least_ms = gaps.percentile_ms(0.5)
    assert least_ms is not None and least_ms < 0.002
