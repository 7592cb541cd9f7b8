"""Cost models recover what they are fitted to, and stay sensible where measurements are noisy."""

import random

import pytest

from springtide.cost import DecodeCost, PrefillCost, pairs

PREFILL_GRID = [(new, cached) for new in (1, 16, 64, 256, 512) for cached in (0, 128, 512, 2048)]
DECODE_GRID = [(batch, batch * context) for batch in (1, 4, 16) for context in (64, 512, 2048)]


def test_pairs_count_the_attention_of_every_new_token_to_all_before_it() -> None:
    assert pairs(4, 10) == 4 * 10 + 4 * 4 / 2


def test_a_prefill_model_is_recovered_from_its_own_times() -> None:
    truth = PrefillCost(fixed_ms=5.0, per_token_ms=0.4, per_pair_ms=1e-4)
    fitted = PrefillCost.fit([(new, cached, truth.predict_ms(new, cached)) for new, cached in PREFILL_GRID])
    assert fitted.predict_ms(300, 700) == pytest.approx(truth.predict_ms(300, 700), rel=1e-6)
    assert (fitted.fixed_ms, fitted.per_token_ms, fitted.per_pair_ms) == pytest.approx((5.0, 0.4, 1e-4))


def test_a_decode_model_is_recovered_from_its_own_times() -> None:
    truth = DecodeCost(fixed_ms=8.0, per_sequence_ms=1.5, per_context_token_ms=2e-3)
    fitted = DecodeCost.fit([(batch, context, truth.predict_ms(batch, context)) for batch, context in DECODE_GRID])
    assert (fitted.fixed_ms, fitted.per_sequence_ms, fitted.per_context_token_ms) == pytest.approx((8.0, 1.5, 2e-3))


@pytest.mark.parametrize("seed", range(20))
def test_noise_never_makes_more_work_cheaper(seed: int) -> None:
    noise = random.Random(seed)
    samples = [(new, cached, (3.0 + 0.001 * new) * noise.uniform(0.5, 2.0)) for new, cached in PREFILL_GRID]
    fitted = PrefillCost.fit(samples)
    assert min(fitted.fixed_ms, fitted.per_token_ms, fitted.per_pair_ms) >= 0
    assert fitted.predict_ms(0) <= fitted.predict_ms(100) <= fitted.predict_ms(100, 1000) <= fitted.predict_ms(1000, 1000)


def test_small_and_large_chunks_weigh_the_same() -> None:
    """The error that counts is the relative one: one long measurement must not drown the short ones."""
    truth = PrefillCost(fixed_ms=5.0, per_token_ms=0.5, per_pair_ms=0.0)
    samples = [(new, 0, truth.predict_ms(new)) for new in (1, 8, 32, 64)]
    fitted = PrefillCost.fit([*samples, (4096, 0, 0.8 * truth.predict_ms(4096))])
    assert fitted.predict_ms(8) == pytest.approx(truth.predict_ms(8), rel=0.25)


@pytest.mark.parametrize("seed", range(20))
def test_measurements_that_a_busy_machine_has_drawn_out_do_not_count(seed: int) -> None:
    """As seen: a pass of 128 tokens that took 4.9 s where 70 ms are right made 30 s of a prompt of 3000 tokens."""
    noise = random.Random(seed)
    truth = PrefillCost(fixed_ms=12.0, per_token_ms=0.5, per_pair_ms=4e-4)
    disturbed = noise.sample(range(len(PREFILL_GRID)), 5)
    samples = [
        (new, cached, truth.predict_ms(new, cached) * (noise.uniform(2, 50) if i in disturbed else noise.uniform(1, 1.05)))
        for i, (new, cached) in enumerate(PREFILL_GRID)
    ]
    fitted = PrefillCost.fit(samples)
    for new, cached in ((32, 0), (512, 0), (512, 2000)):
        assert 0.8 < fitted.predict_ms(new, cached) / truth.predict_ms(new, cached) < 2.0


def test_two_samples_are_too_few() -> None:
    with pytest.raises(ValueError, match="at least 3 samples, not 2"):
        PrefillCost.fit([(1, 0, 1.0), (2, 0, 2.0)])
