"""Workloads: what holds of every request, how much can be reused, and changes of speed and size."""

from __future__ import annotations

import pytest

from simulator.workload import SimRequest, Workload


def request(
    number: int, arrival_s: float, input_tokens: int, blocks: list[int], output_tokens: int = 1, output: tuple[int, ...] = ()
) -> SimRequest:
    return SimRequest(number, arrival_s, input_tokens, output_tokens, blocks, output)


def test_reuse_counts_the_full_blocks_that_came_before() -> None:
    first = request(0, 0.0, 10, [1, 2, 3])
    again = request(1, 1.0, 10, [1, 2, 3])
    other = request(2, 2.0, 12, [1, 4, 5])
    assert Workload("w", 4, [first]).reuse_bound() == 0.0
    assert Workload("w", 4, [first, again]).reuse_bound() == 2 / 4, "the partial third block is not cached"
    assert Workload("w", 4, [first, again, other]).reuse_bound() == 3 / 7


def test_reuse_counts_blocks_that_an_output_filled() -> None:
    first = request(0, 0.0, 5, [1, 2], output_tokens=8, output=(3, 4))
    assert Workload("w", 4, [first, request(1, 1.0, 13, [1, 3, 4, 5])]).reuse_bound() == 3 / 4


def test_prompts_shorter_than_a_block_reuse_nothing() -> None:
    assert Workload("w", 4, [request(0, 0.0, 3, [1]), request(1, 0.0, 3, [1])]).reuse_bound() == 0.0


def test_the_last_output_token_has_no_kv_and_fills_no_block() -> None:
    Workload("w", 4, [request(0, 0.0, 4, [1], output_tokens=5, output=(2,))])
    with pytest.raises(ValueError, match="its output fills 0 blocks, not 1"):
        Workload("w", 4, [request(0, 0.0, 4, [1], output_tokens=4, output=(2,))])


def test_speed_changes_arrivals_and_nothing_else() -> None:
    workload = Workload("w", 4, [request(0, 2.0, 4, [1]), request(1, 6.0, 4, [2])])
    faster = workload.sped_up(2.0)
    assert [r.arrival_s for r in faster.requests] == [1.0, 3.0]
    assert (workload.duration_s, faster.duration_s) == (4.0, 2.0)
    assert [(r.request_id, r.blocks) for r in faster.requests] == [(0, [1]), (1, [2])]
    for factor in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="more than 0"):
            workload.sped_up(factor)


def test_the_first_requests_are_a_workload_too() -> None:
    workload = Workload("w", 4, [request(0, 2.0, 4, [1]), request(1, 6.0, 4, [2])])
    assert [r.request_id for r in workload.first(1).requests] == [0]
    assert workload.first(5).requests == workload.requests
    assert workload.first(0).duration_s == 0.0
    with pytest.raises(ValueError):
        workload.first(-1)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="not in order of arrival"):
        Workload("w", 4, [request(0, 2.0, 4, [1]), request(1, 1.0, 4, [2])])
    with pytest.raises(ValueError, match="1 blocks of 4 for 5 tokens"):
        Workload("w", 4, [request(0, 2.0, 5, [1])])
    with pytest.raises(ValueError, match="block_tokens is 0"):
        Workload("w", 0, [])
    times = [{"arrival_s": -1.0}, {"arrival_s": float("nan")}, {"deadline_ms": -1.0}, {"deadline_ms": float("inf")}]
    for wrong in ({"input_tokens": 0}, {"output_tokens": 0}, *times):
        with pytest.raises(ValueError, match="request 7"):
            SimRequest(**{"request_id": 7, "arrival_s": 0.0, "input_tokens": 1, "output_tokens": 1, "blocks": (1,), **wrong})
