"""The threshold of fetching that learns from what fetching came to."""

from __future__ import annotations

import random

from conductor_support import ask, assigned, hold, keys_of, make_core, request
from hypothesis import given
from hypothesis import strategies as st

from conductor.core.conductor import ConductorCore
from conductor.core.placement.transfer import AdaptiveThreshold
from springtide.ids import AttemptId
from springtide.protocol.attempts import Phase, Progress


def test_while_nothing_is_known_every_fetch_is_tried() -> None:
    assert AdaptiveThreshold().value == 1.0


def test_fetches_that_gain_keep_the_threshold_low() -> None:
    threshold = AdaptiveThreshold()
    for _ in range(50):
        threshold.fetched(1.2, saved_ms=100.0, fetch_ms=60.0)
    assert threshold.value == 1.0


def test_the_threshold_rises_to_the_ratio_from_which_on_fetching_is_as_quick_as_computing() -> None:
    """A fetch takes 50 ms and more, whatever it brings; computing a local prefix's length takes 100 ms: even at a ratio of 1.5."""
    threshold, chance = AdaptiveThreshold(), random.Random(1)
    for _ in range(400):
        ratio = chance.uniform(1.01, 4.0)
        threshold.fetched(ratio, saved_ms=100 * (ratio - 1), fetch_ms=50.0)
    assert threshold.value == 1.5


def test_a_class_that_was_shut_out_is_tried_again_after_a_while() -> None:
    threshold = AdaptiveThreshold()
    for _ in range(20):
        threshold.fetched(1.2, saved_ms=10.0, fetch_ms=60.0)
    assert threshold.value > 1.2
    needed = 0
    while threshold.value > 1.2:
        threshold.fetched(10.0, saved_ms=1000.0, fetch_ms=60.0)
        needed += 1
    assert 50 < needed < 1000


@given(st.lists(st.tuples(st.floats(1.0, 1e9), st.floats(0, 1e6), st.floats(0, 1e6))))
def test_it_is_always_one_that_can_be_configured(fetches: list[tuple[float, float, float]]) -> None:
    threshold = AdaptiveThreshold()
    for fetch in fetches:
        threshold.fetched(*fetch)
        assert 1.0 <= threshold.value <= 8.0


def fetch_once(core: ConductorCore, attempt: str, ms_per_token: float) -> bool:
    """Whether the attempt fetches; if so, it took so long."""
    sources = assigned(core, request(attempt)).sources
    tokens = 4 * (sources[0].num_blocks - 40) if sources else 0
    core.handle(Progress(AttemptId(attempt), Phase.DECODE, remote_tokens=tokens, fetch_ms=ms_per_token * tokens), 0.0)
    return bool(sources)


def test_auto_stops_fetching_little_where_transfers_take_longer_than_predicted() -> None:
    """Most of the best prefix is at hand. By the predictions alone the rest would be fetched for ever."""
    core = make_core(["p0"], ["d0"], kvcache_balancing_threshold="auto", admission="baseline")
    hold(core, "p0", keys_of(40))
    hold(core, "d0", keys_of(56))
    assert fetch_once(core, "first", 0.1)
    assert core.scheduler.fetch_threshold == 1.0
    for number in range(10):
        core.transfers.threshold.fetched(1.4, saved_ms=64.0, fetch_ms=100.0 + number)
    assert core.scheduler.fetch_threshold > 1.4
    assert not fetch_once(core, "later", 0.1)
    assert ask(core, request("estimate")).alternatives.prefills[0].branch == "cache-aware"


def test_a_number_stays_what_it_is() -> None:
    core = make_core(["p0"], ["d0"], kvcache_balancing_threshold=1.5)
    core.transfers.threshold.fetched(1.4, saved_ms=0.0, fetch_ms=100.0)
    assert core.scheduler.fetch_threshold == 1.5
