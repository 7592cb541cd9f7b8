from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from engine.batch import SamplingRow
from engine.sampling.device_sampling import sample_together
from engine.sampling.sampler import sample, uniform
from springtide.protocol.outputs import SampledToken
from springtide.protocol.sampling import REPETITION_PENALTIES, LogitBias, SamplingParams

VOCAB = 5000

Draw = Callable[[torch.Tensor, Sequence[SamplingRow]], list[SampledToken]]


def row(prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), prompt, output)


def drawn_together(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    return sample_together(logits, [each.params for each in rows], [uniform(each.params.seed, len(each.output_ids)) for each in rows])


def logits_of(probabilities: dict[int, float], vocab: int = 12) -> torch.Tensor:
    logits = torch.full((vocab,), -30.0)
    for token, probability in probabilities.items():
        logits[token] = torch.tensor(probability).log()
    return logits


def frequencies(logits: torch.Tensor, draws: int = 4000, **params: Any) -> dict[int, float]:
    rows = [row(seed=seed, **params) for seed in range(draws)]
    counts = Counter(token.token_id for token in sample(logits.expand(draws, -1), rows))
    return {token: count / draws for token, count in counts.items()}


def test_zero_temperature_takes_the_likeliest() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    assert [token.token_id for token in sample(logits, [row(temperature=0.0)] * 6)] == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, {3: 0.5, 7: 0.3, 1: 0.15, 9: 0.05}),
        ({"top_k": 2}, {3: 0.625, 7: 0.375}),
        ({"top_k": 1}, {3: 1.0}),
        ({"top_p": 0.75}, {3: 0.625, 7: 0.375}),
        ({"top_p": 0.5}, {3: 1.0}),
        ({"top_p": 0.01}, {3: 1.0}),
        ({"top_p": 0.0}, {3: 1.0}),
        ({"min_p": 0.25}, {3: 0.5 / 0.95, 7: 0.3 / 0.95, 1: 0.15 / 0.95}),
        ({"top_k": 3, "top_p": 0.8}, {3: 0.625, 7: 0.375}),
        ({"temperature": 0.5}, {3: 0.25 / 0.365, 7: 0.09 / 0.365, 1: 0.0225 / 0.365, 9: 0.0025 / 0.365}),
        ({"logit_bias": LogitBias.of({3: -100.0, 7: -100.0})}, {1: 0.75, 9: 0.25}),
    ],
)
def test_tokens_are_drawn_as_often_as_the_filters_say(params: dict[str, Any], expected: dict[int, float]) -> None:
    found = frequencies(logits_of({3: 0.5, 7: 0.3, 1: 0.15, 9: 0.05}), **params)
    assert set(found) <= set(expected)
    for token, probability in expected.items():
        assert found.get(token, 0.0) == pytest.approx(probability, abs=0.03)


def test_top_p_looks_beyond_the_first_candidates_of_a_flat_distribution() -> None:
    found = frequencies(torch.zeros(VOCAB), draws=6000, top_p=0.9)
    assert 2800 < len(found) <= 0.9 * VOCAB


def test_the_same_seed_and_position_give_the_same_token_whatever_else_is_in_the_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, VOCAB, generator=generator)
    rows = [row((1, 2), (3,) * i, seed=40 + i, temperature=0.9, top_p=0.9 if i % 2 else 1.0, repetition_penalty=1.2) for i in range(5)]
    together = sample(logits, rows)
    for i in (4, 2, 0, 1, 3):
        assert sample(logits[i : i + 1], [rows[i]]) == [together[i]]


def test_the_draw_changes_with_seed_and_position_and_is_uniform() -> None:
    draws = [uniform(seed, position) for seed in (0, 1, 2**64 - 1) for position in range(1000)]
    assert len(set(draws)) == 3000 and all(0 <= draw < 1 for draw in draws)
    assert sum(draws) / 3000 == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.9, "min_p": 0.05}], ids=str
)
def test_a_small_change_of_the_logits_rarely_changes_the_token(filters: dict[str, float]) -> None:
    """So that another order of additions on another node does not, also where it decides which of two tokens is the likelier."""
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(400, VOCAB // 2, generator=generator) * 3).repeat(1, 2)
    nudged = logits * (1 + torch.randn(logits.shape, generator=generator) * 1e-5)
    rows = [row(seed=seed, **filters) for seed in range(400)]
    for draw in (sample, drawn_together):
        assert sum(a != b for a, b in zip(draw(logits, rows), draw(nudged, rows), strict=True)) <= 4


def test_repetition_penalty_counts_prompt_and_output_once() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[5, 5, 9, 11]]), logits.clone())
    [sampled] = sample(logits, [row((5, 5), (9, 11), temperature=0.0, repetition_penalty=1.7, logprobs=20)])
    reference = torch.log_softmax(wanted, -1)[0]
    assert sampled.token_id == int(reference.argmax())
    assert [token for token, _ in sampled.top] == reference.topk(20).indices.tolist()
    assert [logprob for _, logprob in sampled.top] == pytest.approx(reference.topk(20).values.tolist(), abs=1e-5)


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    logits = torch.zeros(1, 10)
    [sampled] = sample(logits, [row((1, 1), (2, 2, 2, 3), temperature=0.0, presence_penalty=0.5, frequency_penalty=1.0, logprobs=10)])
    logprobs = dict(sampled.top)
    assert logprobs[0] == pytest.approx(logprobs[1])
    assert logprobs[0] - logprobs[2] == pytest.approx(3.5, abs=1e-5)
    assert logprobs[0] - logprobs[3] == pytest.approx(1.5, abs=1e-5)


def test_logprobs_are_those_before_temperature_and_only_for_rows_that_ask() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    none, chosen, top = sample(logits, [row(), row(temperature=0.3, logprobs=0), row(temperature=0.0, logprobs=5)])
    reference = torch.log_softmax(logits, -1)
    assert none.logprob is None and none.top == ()
    assert chosen.logprob == pytest.approx(float(reference[1, chosen.token_id]), abs=1e-5) and chosen.top == ()
    assert [token for token, _ in top.top] == reference[2].topk(5).indices.tolist()
    assert top.logprob == top.top[0][1]


def test_the_logits_are_left_as_they_are() -> None:
    logits = torch.randn(1, VOCAB)
    before = logits.clone()
    sample(logits, [row((1,), (2,), repetition_penalty=2.0, presence_penalty=1.0, logit_bias=LogitBias.of({4: 5.0}), top_p=0.5)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_towards_zero_temperature_the_likeliest_token_is_drawn(temperature: float, filters: dict[str, float]) -> None:
    """On a CPU and on a device, also where logits divided by it are beyond single precision."""
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(5)) * 4
    rows = [row(temperature=temperature, seed=seed, **filters) for seed in range(8)]
    likeliest = logits.argmax(-1).tolist()
    assert [token.token_id for token in sample(logits, rows)] == likeliest
    assert [token.token_id for token in drawn_together(logits, rows)] == likeliest


@pytest.mark.parametrize("penalty", REPETITION_PENALTIES)
def test_logprobs_are_numbers_with_the_strongest_repetition_penalties(penalty: float) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(6)) * 100
    [sampled] = sample(logits, [row((5, 6), (7, 8), repetition_penalty=penalty, logprobs=20)])
    assert all(math.isfinite(logprob) for _, logprob in (*sampled.top, (0, sampled.logprob or 0.0)))


def test_a_bias_on_every_token_is_added_to_every_row() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(7))
    biases = torch.randn(VOCAB, generator=torch.Generator().manual_seed(8)) * 10
    biased = row(temperature=0.0, logit_bias=LogitBias.of(dict(enumerate(biases.tolist()))), logprobs=3)
    expected = torch.log_softmax(logits + biases, -1).topk(3)
    for sampled, tokens, logprobs in zip(sample(logits, [biased] * 4), expected.indices.tolist(), expected.values.tolist(), strict=True):
        assert [token for token, _ in sampled.top] == tokens
        assert [logprob for _, logprob in sampled.top] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("draw", [sample, drawn_together])
def test_whether_a_token_is_left_makes_no_difference_to_a_draw_of_another(draw: Draw) -> None:
    """It may be a matter of rounding, which another batch does differently."""
    logits = torch.linspace(4.0, 0.0, 300)[torch.randperm(300, generator=torch.Generator().manual_seed(9))].expand(500, -1)
    likeliest = logits[0].argsort(descending=True).tolist()
    share = float(torch.softmax(logits[0], -1).sort(descending=True).values.double().cumsum(-1)[99])
    among_all, among_100, among_101 = (
        draw(logits, [row(seed=seed, top_p=p) for seed in range(500)]) for p in (0.9999, share - 1e-6, share + 1e-6)
    )
    assert len(set(among_100)) > 50 and likeliest[100] in [token.token_id for token in among_101]
    for wider, narrower, count in ((among_101, among_100, 100), (among_all, among_101, 101)):
        for one, other in zip(wider, narrower, strict=True):
            assert one == other or one.token_id in likeliest[count:]
