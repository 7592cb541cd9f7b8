"""How many passes a prompt is predicted to take, and how long these."""

from __future__ import annotations

import pytest

from springtide.chunking import LEAST_PART, ROUND_TO, Chunking
from springtide.cost import PrefillCost

LEVEL = PrefillCost(fixed_ms=4.0, per_token_ms=0.5, per_pair_ms=0.0)
RISING = PrefillCost(fixed_ms=5.0, per_token_ms=0.3, per_pair_ms=2e-5)


def chunks_of(chunking: Chunking, new_tokens: int, cached_tokens: int) -> list[tuple[int, int]]:
    """As a node with nothing else to do cuts it: (new, cached)."""
    chunks = []
    while new_tokens:
        size = min(new_tokens, chunking.next_chunk(cached_tokens, chunking.chunk_tokens, chunking.budget_ms))
        chunks.append((size, cached_tokens))
        new_tokens, cached_tokens = new_tokens - size, cached_tokens + size
    return chunks


def test_a_group_of_stages_takes_the_whole_way_for_the_first_chunk_and_its_slowest_stage_for_each_further_one() -> None:
    group = PrefillCost(4.0, 0.5, 0.0, slowest_share=0.6)
    passes_ms = [LEVEL.predict_ms(new) for new in (100, 100, 37)]
    assert Chunking(LEVEL, 100).prompt_ms(237, 50) == pytest.approx(sum(passes_ms))
    assert Chunking(group, 100).prompt_ms(237, 50) == pytest.approx(passes_ms[0] + 0.6 * sum(passes_ms[1:]))
    assert Chunking(group, 100).occupied_ms(237, 50) == pytest.approx(0.6 * sum(passes_ms))
    assert Chunking(group.scaled(2.0), 100).prompt_ms(237, 50) == pytest.approx(2 * Chunking(group, 100).prompt_ms(237, 50))


@pytest.mark.parametrize("chunk_ms", [None, 1.0, 50.0, 400.0])
@pytest.mark.parametrize(("new_tokens", "cached_tokens"), [(1, 0), (300, 0), (513, 0), (5_000, 20_000), (60_000, 0), (60_000, 100_000)])
@pytest.mark.parametrize("slowest_share", [1.0, 0.3])
def test_predicted_is_what_the_chunks_take(chunk_ms: float | None, new_tokens: int, cached_tokens: int, slowest_share: float) -> None:
    """But for what is lost by even sizes."""
    cost = PrefillCost(RISING.fixed_ms, RISING.per_token_ms, RISING.per_pair_ms, slowest_share)
    chunking = Chunking(cost, 512, chunk_ms)
    first_ms, *further_ms = [cost.predict_ms(new, cached) for new, cached in chunks_of(chunking, new_tokens, cached_tokens)]
    assert chunking.prompt_ms(new_tokens, cached_tokens) == pytest.approx(first_ms + slowest_share * sum(further_ms), rel=0.02)


@pytest.mark.parametrize(("per_pair_ms", "chunk_tokens", "new_tokens"), [(2e-5, 64, 5_343), (1e-6, 128, 110_354), (2e-5, 512, 9_000)])
def test_predicted_is_what_small_chunks_take(per_pair_ms: float, chunk_tokens: int, new_tokens: int) -> None:
    """Where a pass has little time beside its fixed part, and evening out would cut off much of each chunk."""
    chunking = Chunking(PrefillCost(40.0, 0.3, per_pair_ms), chunk_tokens, chunk_ms=50.0)
    taken_ms = sum(chunking.cost.predict_ms(new, cached) for new, cached in chunks_of(chunking, new_tokens, 0))
    assert chunking.prompt_ms(new_tokens, 0) == pytest.approx(taken_ms, rel=0.04)


def test_a_long_prompt_is_predicted_to_take_more_passes_than_its_tokens_alone_would_make() -> None:
    whole_ms = RISING.predict_ms(60_000) - RISING.fixed_ms
    passes = (Chunking(RISING, 512).prompt_ms(60_000, 0) - whole_ms) / RISING.fixed_ms
    assert passes == pytest.approx(len(chunks_of(Chunking(RISING, 512), 60_000, 0)), rel=0.1) and passes > 2 * 60_000 / 512


def test_chunks_are_even_no_smaller_than_a_part_and_no_larger_than_what_is_asked_for() -> None:
    chunking = Chunking(RISING, 512)
    sizes = [chunking.next_chunk(cached, 512, chunking.budget_ms) for cached in (0, 5_000, 20_000, 1_000_000)]
    assert sizes[0] == 512 and sizes[-1] == 512 // LEAST_PART and all(size % ROUND_TO == 0 for size in sizes)
    assert chunking.next_chunk(1_000_000, 10, chunking.budget_ms) == 10
    assert chunking.next_chunk(0, 512, -1.0) == 512 // LEAST_PART


def test_a_cost_of_nothing_is_predicted_as_nothing() -> None:
    assert Chunking(PrefillCost(0.0, 0.0, 0.0), 512).prompt_ms(60_000, 0) == 0.0
    assert Chunking(PrefillCost(0.0, 0.0, 0.0, 0.5), 512, chunk_ms=10.0).prompt_ms(60_000, 0) == 0.0
