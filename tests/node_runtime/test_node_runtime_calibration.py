"""A cost model that is wrong about this machine is corrected by what passes take."""

import pytest

from node_runtime.calibration import FORGET_SLOW_AFTER_S, CostCalibration
from springtide.cost import DecodeCost, PrefillCost

MEASURED = PrefillCost(fixed_ms=10.0, per_token_ms=1.0, per_pair_ms=1e-3)


def observed(factor: float, count: int = 16) -> CostCalibration[PrefillCost]:
    calibration = CostCalibration(MEASURED)
    for i in range(count):
        calibration.observe(64 + i, 100, factor * MEASURED.predict_ms(64 + i, 100), now=float(i))
    return calibration


def test_a_measurement_on_a_busy_machine_is_corrected() -> None:
    assert observed(1 / 8).cost.predict_ms(3000) == pytest.approx(MEASURED.predict_ms(3000) / 8)


def test_one_slow_pass_changes_nothing() -> None:
    calibration = observed(1.0)
    calibration.observe(64, 0, 100 * MEASURED.predict_ms(64), now=20.0)
    assert calibration.cost.predict_ms(3000) == pytest.approx(MEASURED.predict_ms(3000))


def test_a_few_passes_are_not_enough() -> None:
    assert observed(3.0, count=3).cost == MEASURED


def test_a_slow_spell_is_forgotten_and_a_correction_downwards_is_not() -> None:
    slow, fast = observed(3.0), observed(0.5)
    for calibration in (slow, fast):
        calibration.tick(16.0)
    assert slow.cost.predict_ms(100) == pytest.approx(3 * MEASURED.predict_ms(100))
    for calibration in (slow, fast):
        calibration.tick(16.0 + FORGET_SLOW_AFTER_S)
    assert slow.cost.predict_ms(100) == pytest.approx(MEASURED.predict_ms(100))
    assert fast.cost.predict_ms(100) == pytest.approx(0.5 * MEASURED.predict_ms(100))


def test_no_spell_however_slow_ends_admission_for_good() -> None:
    assert observed(1000.0).cost.predict_ms(100) == pytest.approx(4 * MEASURED.predict_ms(100))


def test_decode_steps_are_corrected_alike() -> None:
    measured = DecodeCost(fixed_ms=8.0, per_sequence_ms=1.0, per_context_token_ms=1e-3)
    calibration = CostCalibration(measured)
    for _ in range(4):
        calibration.observe(8, 4096, 2 * measured.predict_ms(8, 4096), now=0.0)
    assert calibration.cost.predict_ms(16, 100) == pytest.approx(2 * measured.predict_ms(16, 100))
