"""How long an output is expected to get."""

from __future__ import annotations

import random

import numpy as np
import pytest
from conductor_oracles.forecast import share_longer

from conductor._native import BINS_PER_ROOT
from conductor.core.forecast.output_lengths import CLUSTER, INITIAL_MEAN_TOKENS, OutputLengths, RunningOutputs


def fed(lengths_of: dict[str, list[int]], seed: int = 7) -> OutputLengths:
    """The tenants' outputs in a random order."""
    outputs = [(tenant, tokens) for tenant, all_tokens in lengths_of.items() for tokens in all_tokens]
    random.Random(seed).shuffle(outputs)
    lengths = OutputLengths()
    for tenant, tokens in outputs:
        lengths.record(tenant, tokens)
    return lengths


def test_without_a_history_there_is_an_assumption() -> None:
    lengths = OutputLengths()
    assert lengths.mean_tokens == pytest.approx(INITIAL_MEAN_TOKENS)
    assert lengths.predict("anybody", float("inf")) == pytest.approx(INITIAL_MEAN_TOKENS)


def test_what_the_request_may_have_at_most_bounds_its_prediction() -> None:
    assert OutputLengths().predict("anybody", 16) < 16
    assert fed({"a": [100] * 2000}).predict("a", 16) == 16


def test_a_tenants_own_history_is_used_once_it_predicts_better_than_the_clusters() -> None:
    lengths = fed({"short": [10] * 100, "long": [1000] * 100})
    assert (lengths.law("short"), lengths.law("long")) != (CLUSTER, CLUSTER)
    assert lengths.predict("short", float("inf")) == pytest.approx(10)
    assert lengths.predict("long", float("inf")) == pytest.approx(1000)
    assert lengths.predict("stranger", float("inf")) == pytest.approx(lengths.mean_tokens)


def test_a_tenant_like_all_others_goes_by_the_clusters_history() -> None:
    source = random.Random(3)
    lengths = fed({name: [source.randint(1, 400) for _ in range(120)] for name in ("a", "b", "c", "d")})
    errors = [abs(lengths.predict(name, float("inf")) - 200) for name in "abcd"]
    assert max(errors) < 40


def test_the_window_slides() -> None:
    lengths = fed({"a": [1000] * 3000})
    for _ in range(3000):
        lengths.record("a", 10)
    assert lengths.predict("a", float("inf")) == pytest.approx(10)
    assert lengths.mean_tokens == pytest.approx(10)


def test_survival_is_the_share_of_longer_outputs_and_never_none() -> None:
    lengths = fed({"a": list(range(1, 1025)) * 2})
    laws = np.zeros(4, np.int64)
    shares = share_longer(lengths.survival, laws, np.array([0.0, 256.0, 768.0, 1e9]))
    assert shares[:3] == pytest.approx([1.0, 0.75, 0.25], abs=0.03)
    assert 0 < shares[3] < 0.01


def test_outputs_that_have_not_ended_yet_count_as_far_as_they_are() -> None:
    """Of lengths between 1 and 1,000, those above 200 have not ended: by the short ones alone all would be over by then."""
    lengths = fed({"a": [1 + number % 200 for number in range(2000)]})
    at = np.array([100.0, 190.0])
    laws = np.zeros(2, np.int64)
    assert share_longer(lengths.survival, laws, at)[1] < 0.1
    running = RunningOutputs()
    for _ in range(4):
        running.add(np.full(1024, 200.0))
    lengths.watch(running)
    assert share_longer(lengths.survival, laws, at) == pytest.approx([0.9, 0.81], abs=0.02)


def test_outputs_that_run_are_counted_by_edges_of_the_bins_an_edge_itself_included() -> None:
    lengths, edges = RunningOutputs(), [0.0, 0.25, 1.0, 4.0]
    assert [(edge * BINS_PER_ROOT**2) ** 0.5 % 1 for edge in edges] == [0.0] * 4
    lengths.add(np.array([0.0, 0.25, 0.26, 4.0]))
    lengths.add(np.array([1e9]))
    at_most = [int(lengths.at_most[round(edge**0.5 * BINS_PER_ROOT)]) for edge in edges]
    assert (at_most, lengths.count, lengths.at_most[-1]) == ([1, 2, 3, 4], 5, 5)


def test_memory_is_bounded_however_many_tenants_there_are() -> None:
    lengths = OutputLengths()
    for number in range(2000):
        for _ in range(20):
            lengths.record(f"tenant-{number}", 10 + number % 5)
    laws = [lengths.law(f"tenant-{number}") for number in range(2000)]
    assert max(laws) < 256
    assert all(law == CLUSTER for law in laws[:1700]), "forgotten"
