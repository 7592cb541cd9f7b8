"""The histogram of the times between tokens."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.cluster.records import Gaps, Records
from simulator.result import result_of
from simulator.workload import SimRequest

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


def test_a_stall_before_a_run_of_tokens_is_one_gap_of_its_own() -> None:
    records = Records([SimRequest(0, 0.0, 100, 12, (1,))], lambda: None)
    records.tokens(0, 1, 1.0)
    assert records.gaps.percentile_ms(1.0) is None, "the first token comes after nothing"
    records.tokens(0, 11, 1.0 + 5.0 + 10 * 0.02, step_s=0.02)
    shares = [records.gaps.percentile_ms(share) for share in (0.5, 0.9, 1.0)]
    assert shares == pytest.approx([20.0, 20.0, 5000.0], rel=0.035)


def test_the_summary_tells_every_gap_from_the_requests_means() -> None:
    records = Records([SimRequest(0, 0.0, 100, 101, (1,))], lambda: None)
    records.tokens(0, 1, 1.0)
    records.tokens(0, 100, 1.0 + 10.0 + 99 * 0.02, step_s=0.02)
    records.finish(0, 13.0, 0)
    summary = result_of(records, {}, {}, 30_000.0, 100.0)["summary"]
    assert summary["gap_ms_p99"] == pytest.approx(20.0, rel=0.035)
    assert summary["tbt_ms_p99"] == pytest.approx(119.8)
