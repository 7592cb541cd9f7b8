"""Drawn together, rows get the tokens that they get one by one."""

from __future__ import annotations

import random

import torch

from engine.batch import SamplingRow
from engine.sampling.device_sampling import sample_together
from engine.sampling.sampler import sample, uniform
from springtide.protocol.sampling import SamplingParams

CHOICES = {
    "temperature": [0.0, 0.2, 0.7, 1.0, 1.5],
    "top_k": [0, 0, 1, 5, 50, 3000],
    "top_p": [1.0, 0.999, 0.9, 0.5],
    "min_p": [0.0, 0.0, 0.05, 1e-4],
    "logprobs": [None, None, 0, 3, 20],
}


def random_rows(dice: random.Random, count: int) -> list[SamplingRow]:
    return [
        SamplingRow(
            SamplingParams(seed=dice.randrange(1 << 40), **{name: dice.choice(values) for name, values in CHOICES.items()}),
            prompt_ids=[1],
            output_ids=[2] * dice.randrange(5),
        )
        for _ in range(count)
    ]


def together(logits: torch.Tensor, rows: list[SamplingRow]) -> list[tuple[int, float | None, tuple[tuple[int, float], ...]]]:
    sampled = sample_together(logits, [row.params for row in rows], [uniform(row.params.seed, len(row.output_ids)) for row in rows])
    return [(token.token_id, token.logprob, token.top) for token in sampled]


def test_rows_together_get_the_tokens_that_they_get_one_by_one() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for _ in range(60):
        rows = random_rows(dice, dice.randint(1, 9))
        noise = torch.Generator().manual_seed(dice.randrange(1 << 32))
        vocab = dice.choice([30, 2000, 5000])
        # No two are equal: of those it may be either.
        logits = torch.stack([torch.randperm(vocab, generator=noise) for _ in rows]) * (dice.choice([2.0, 8.0, 30.0]) / vocab)
        kept = logits.clone()
        assert together(logits, rows) == [(token.token_id, token.logprob, token.top) for token in sample(logits, rows)]
        assert torch.equal(logits, kept)


def test_among_equals_a_row_gets_the_same_token_whatever_is_beside_it() -> None:
    """Logits in bfloat16 are often equal."""
    dice = random.Random(0)
    rows = random_rows(dice, 12)
    logits = torch.randn(12, 4000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    assert together(logits, rows) == [together(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
