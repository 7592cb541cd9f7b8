from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from springtide.clock import MOST_PATIENCE_S, ObservedTime, RoundTrips, patience_s


def test_a_pause_of_the_observer_counts_as_one_look() -> None:
    observed = ObservedTime(most_s=0.5)
    for now in (10.0, 10.25, 10.5, 70.0, 70.25):
        observed.look(now)
    assert observed.now == 0.25 + 0.25 + 0.5 + 0.25
    assert observed.stood_still_s == 59.0


def test_on_a_network_that_is_not_slow_patience_is_what_it_was_set_to() -> None:
    trips = RoundTrips()
    assert patience_s(1.2, trips.smoothed_s) == 1.2
    for _ in range(100):
        trips.answered(0.002)
    assert patience_s(1.2, trips.smoothed_s) == 1.2


def test_patience_follows_answers_that_are_slow_and_back() -> None:
    trips = RoundTrips()
    trips.answered(0.002)
    trips.answered(2.0)
    assert patience_s(1.2, trips.smoothed_s) == 1.2, "whoever was asked may have been busy"
    for _ in range(10):
        trips.answered(0.8)
    assert 1.5 < patience_s(1.2, trips.smoothed_s) <= MOST_PATIENCE_S
    for _ in range(50):
        trips.answered(0.002)
    assert patience_s(1.2, trips.smoothed_s) == 1.2


@given(least_s=st.floats(0.1, 10.0), round_trip_s=st.floats(0.0, 1000.0))
def test_patience_is_never_less_than_it_was_set_to_nor_without_end(least_s: float, round_trip_s: float) -> None:
    assert least_s <= patience_s(least_s, round_trip_s) <= max(least_s, MOST_PATIENCE_S)
