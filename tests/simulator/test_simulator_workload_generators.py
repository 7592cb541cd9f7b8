"""Generated workloads: reproducible, at the rate asked for, with prefixes shared as their kind says."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from simulator.workload import Workload, generate, generator_options
from simulator.workload.generate import GENERATORS
from springtide.errors import ConfigError

KINDS = tuple(GENERATORS)


def fields_of(workload: Workload) -> list[tuple[object, ...]]:
    return [
        (r.arrival_s, r.input_tokens, r.output_tokens, list(r.blocks), list(r.output_blocks), r.tenant, r.priority)
        for r in workload.requests
    ]


def caching_line(workload: Workload, index: int) -> list[int]:
    """The ids of all full blocks of a request, in order, once it has ended."""
    request = workload.requests[index]
    return [*request.blocks[: request.input_tokens // workload.block_tokens], *request.output_blocks]


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_makes_the_same_workload_again(kind: str) -> None:
    first, same, other = (generate(kind, 5.0, 60.0, seed) for seed in (4, 4, 5))
    assert fields_of(first) == fields_of(same) != fields_of(other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_is_even_over_the_duration(kind: str) -> None:
    workload = generate(kind, 20.0, 3000.0, 1)
    counts, _ = np.histogram([r.arrival_s for r in workload.requests], 5, (0.0, 3000.0))
    assert len(workload.requests) == pytest.approx(60_000, rel=0.05)
    assert counts / 12_000 == pytest.approx(np.ones(5), rel=0.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_tokens", [512, 48])
def test_an_id_always_follows_the_same_id(kind: str, block_tokens: int) -> None:
    workload = generate(kind, 5.0, 200.0, 2, block_tokens)
    before: dict[int, int] = {}
    for index in range(len(workload.requests)):
        for line in (workload.requests[index].blocks, caching_line(workload, index)):
            for parent, number in pairwise([-1, *line]):
                assert before.setdefault(number, parent) == parent


@pytest.mark.parametrize("kind", KINDS)
def test_a_partial_block_is_nobody_elses(kind: str) -> None:
    workload = generate(kind, 5.0, 200.0, 2)
    full: set[int] = set()
    partial: list[int] = []
    for index, request in enumerate(workload.requests):
        full.update(caching_line(workload, index))
        partial.extend(request.blocks[request.input_tokens // 512 :])
    assert len(set(partial)) == len(partial) > 0
    assert full.isdisjoint(partial)


def test_mean_lengths_are_the_ones_asked_for() -> None:
    requests = generate("poisson", 50.0, 1000.0, 1, input_tokens=1000.0, output_tokens=50.0).requests
    assert np.mean([r.input_tokens for r in requests]) == pytest.approx(1000, rel=0.05)
    assert np.mean([r.output_tokens for r in requests]) == pytest.approx(50, rel=0.05)
    exact = generate("poisson", 5.0, 100.0, 1, input_tokens=1000.0, input_cv=0.0, max_output_tokens=1).requests
    assert {(r.input_tokens, r.output_tokens) for r in exact} == {(1000, 1)}


def test_bursts_come_at_their_ratio() -> None:
    workload = generate("bursts", 50.0, 2000.0, 1, period_s=100.0, burst_share=0.25, burst_ratio=5.0)
    in_burst = np.array([r.arrival_s % 100.0 < 25.0 for r in workload.requests])
    assert in_burst.sum() / 0.25 / ((~in_burst).sum() / 0.75) == pytest.approx(5.0, rel=0.05)


def test_a_next_turn_finds_prompt_and_output_of_the_one_before() -> None:
    workload = generate("chat", 1.0, 2000.0, 1, 16, steps=6.0, prefix_tokens=0)
    ended: dict[int, list[int]] = {}
    found = 0
    for index, request in enumerate(workload.requests):
        line = caching_line(workload, index)
        if line and line[0] in ended:
            found += 1
            earlier = ended[line[0]]
            assert list(request.blocks[: len(earlier)]) == earlier
        if line:
            ended[line[0]] = line
    assert found / len(workload.requests) > 0.75, "five turns in six, but for those that began before"


def test_sessions_and_agents_share_their_beginnings() -> None:
    chat = generate("chat", 5.0, 100.0, 1)
    assert len({r.blocks[0] for r in chat.requests}) == 1
    agents = generate("agents", 20.0, 100.0, 1)
    assert len({tuple(r.blocks[:8]) for r in agents.requests}) == 8
    assert min(r.input_tokens for r in agents.requests) > 4096


def test_sessions_end_before_prompts_are_too_long() -> None:
    workload = generate("agents", 20.0, 200.0, 1, max_input_tokens=8000)
    assert max(r.input_tokens for r in workload.requests) <= 8000


def test_documents_are_asked_about_by_their_popularity() -> None:
    workload = generate("documents", 50.0, 1000.0, 1, documents=3, zipf_exponent=1.0, document_cv=0.0)
    counts = sorted(np.unique([r.blocks[0] for r in workload.requests], return_counts=True)[1], reverse=True)
    assert counts / np.sum(counts) == pytest.approx(np.array([6, 3, 2]) / 11, rel=0.05)
    assert workload.reuse_bound() > 0.99


def test_tenants_have_their_share_and_no_blocks_in_common() -> None:
    workload = generate("documents", 20.0, 500.0, 1, tenants={"large": 3.0, "small": 1.0})
    ids: dict[str, set[int]] = {"large": set(), "small": set()}
    for index, request in enumerate(workload.requests):
        ids[request.tenant].update(caching_line(workload, index))
    assert ids["large"].isdisjoint(ids["small"])
    assert sum(r.tenant == "large" for r in workload.requests) / len(workload.requests) == pytest.approx(0.75, rel=0.05)


def test_priorities_and_deadlines_are_mixed_in() -> None:
    requests = generate("poisson", 50.0, 200.0, 1, priorities={0: 0.9, 10: 0.1}, deadline_ms=5e3).requests
    assert sum(r.priority == 10 for r in requests) / len(requests) == pytest.approx(0.1, rel=0.15)
    assert {r.deadline_ms for r in requests} == {5e3}


def test_a_short_workload_may_be_empty() -> None:
    assert generate("chat", 1e-6, 1.0, 1).requests == []


def test_every_option_is_told_and_can_be_set() -> None:
    assert generator_options("bursts")["burst_ratio"] == 4.0
    for kind in KINDS:
        generate(kind, 1.0, 10.0, 1, **generator_options(kind))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "tides"}, "there is no workload 'tides'; there are poisson, bursts"),
        ({"rate_per_s": 0.0}, "rate_per_s of a workload should be above 0, not 0.0"),
        ({"duration_s": float("inf")}, "duration_s of a workload should be above 0, not inf"),
        ({"block_tokens": 0}, "block_tokens of a workload should be above 0, not 0"),
        ({"deadline_ms": -1.0}, "deadline_ms of a workload should be 0 or more, and at most 86400000, not -1.0"),
        ({"deadline_ms": 86400001.0}, "deadline_ms of a workload should be 0 or more, and at most 86400000, not 86400001.0"),
        ({"turns": 3}, "the workload chat has no option turns; it has prefixes"),
        ({"steps": 0}, "steps of this workload should be a number above 0, not 0"),
        ({"steps": 0.5}, "steps of this workload should be a number not below 1, not 0.5"),
        ({"prefixes": 1.5}, "prefixes of this workload should be a whole number above 0, not 1.5"),
        ({"prefix_tokens": -1}, "prefix_tokens of this workload should be a whole number not below 0, not -1"),
        ({"pause_s": "long"}, "pause_s of this workload should be a number not below 0, not 'long'"),
        ({"name": "bursts", "burst_share": 1.0}, "burst_share of this workload should be a number above 0 and below 1, not 1.0"),
        ({"tenants": {"a": -1.0, "b": 2.0}}, "the shares of tenants should be numbers not below 0"),
        ({"priorities": {1: 0.0}}, "the shares of priorities should be numbers not below 0, not all 0"),
    ],
)
def test_what_cannot_be_generated_is_named(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        generate(**{"name": "chat", "rate_per_s": 1.0, "duration_s": 1.0, "seed": 1, **arguments})  # type: ignore[arg-type]
    assert refused.value.message.startswith(said)
