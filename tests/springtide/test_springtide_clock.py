from __future__ import annotations

from springtide.clock import ObservedTime


def test_a_pause_of_the_observer_counts_as_one_look() -> None:
    observed = ObservedTime(most_s=0.5)
    for now in (10.0, 10.25, 10.5, 70.0, 70.25):
        observed.look(now)
    assert observed.now == 0.25 + 0.25 + 0.5 + 0.25
    assert observed.stood_still_s == 59.0
