"""The decode pool at a later moment. In these tests a step takes 10 ms + 1 ms an attempt + 0.01 ms a token of context."""

from __future__ import annotations

import numpy as np
import pytest
from conductor_support import DECODE_COST, make_core

from conductor.core.forecast.decode_forecast import DecodeForecast
from conductor.core.forecast.output_lengths import CLUSTER, OutputLengths
from springtide.clock import Tick
from springtide.ids import AttemptId, GatewayId, InstanceId
from springtide.protocol.attempts import LiveAttempt, Phase, Progress, Renew

D0, D1 = InstanceId("d0"), InstanceId("d1")


def forecast_of(output_tokens: int = 100, **running: int) -> DecodeForecast:
    """All outputs were so long of late; instances come up with so many attempts of 100 tokens that nobody here knows. 100 tokens/s."""
    lengths = OutputLengths()
    for _ in range(1100):
        lengths.record("", output_tokens)
    forecast = DecodeForecast(lengths)
    for name in ("d0", "d1"):
        count = running.get(name, 0)
        forecast.report(InstanceId(name), DECODE_COST, 64, count, 100 * count, 10.0, 0.0)
    return forecast


def place(forecast: DecodeForecast, name: str, joins_at: float, instance: InstanceId = D0, most: float = 1e9) -> None:
    forecast.place(AttemptId(name), instance, 100, most, CLUSTER, joins_at)


def attempts(forecast: DecodeForecast, at: float, *, now: float = 0.0, joining: bool = True) -> list[float]:
    return forecast.pool(now, at, joining=joining).attempts[:2].tolist()


def test_who_is_in_prefill_joins_when_that_is_predicted_to_end() -> None:
    forecast = forecast_of()
    place(forecast, "a", joins_at=2.0)
    assert attempts(forecast, 1.9) == [0, 0]
    assert attempts(forecast, 2.0) == [1, 0]


def test_the_load_now_counts_nobody_who_is_still_in_prefill() -> None:
    forecast = forecast_of()
    place(forecast, "late", joins_at=-1.0)
    assert attempts(forecast, 0.0, joining=False) == [0, 0]
    forecast.join(AttemptId("late"), 0.0)
    assert attempts(forecast, 0.0, joining=False) == [1, 0]


def test_who_will_have_ended_has_left() -> None:
    forecast = forecast_of(output_tokens=100, d0=1)
    place(forecast, "a", joins_at=0.0)
    forecast.join(AttemptId("a"), 0.0)
    forecast.report(D0, DECODE_COST, 64, 1, 100, 10.0, 0.0)
    assert attempts(forecast, 0.5) == pytest.approx([1, 0], abs=0.01)
    assert attempts(forecast, 1.5) == pytest.approx([0, 0], abs=0.01), "100 tokens take a second"


def test_who_joins_and_ends_before_the_moment_does_not_count() -> None:
    forecast = forecast_of(output_tokens=100)
    forecast.report(D0, DECODE_COST, 64, 1, 100, 10.0, 0.0)
    forecast.report(D0, DECODE_COST, 64, 0, 0, 10.0, 0.0)
    place(forecast, "a", joins_at=1.0)
    pace_s = DECODE_COST.predict_ms(1, 0) / 1000
    assert attempts(forecast, 1.0 + 50 * pace_s) == pytest.approx([1, 0], abs=0.01)
    assert attempts(forecast, 1.0 + 150 * pace_s) == pytest.approx([0, 0], abs=0.01)


def test_a_limit_on_its_output_ends_an_attempt_earlier() -> None:
    forecast = forecast_of(output_tokens=1000)
    place(forecast, "a", joins_at=0.0, most=10)
    forecast.join(AttemptId("a"), 0.0)
    assert attempts(forecast, 0.05)[0] > 0.9
    assert attempts(forecast, 0.5)[0] == 0


def test_the_longer_an_attempt_goes_on_the_longer_it_is_expected_to() -> None:
    lengths = OutputLengths()
    for number in range(1100):
        lengths.record("", 10 if number % 2 else 1000)
    forecast = DecodeForecast(lengths)
    forecast.report(D0, DECODE_COST, 64, 1, 100, 10.0, 0.0)
    place(forecast, "a", joins_at=0.0)
    forecast.join(AttemptId("a"), 0.0)
    assert attempts(forecast, 1.0)[0] == pytest.approx(0.5, abs=0.02), "it may be one of either kind"
    assert attempts(forecast, 1.5, now=0.5)[0] == pytest.approx(1.0, abs=0.02), "it is one of the long ones"


def test_progress_follows_the_pace_that_instances_report() -> None:
    forecast = forecast_of(output_tokens=100)
    place(forecast, "a", joins_at=0.0)
    forecast.report(D0, DECODE_COST, 64, 1, 100, 10.0, 0.0)
    forecast.join(AttemptId("a"), 0.0)
    forecast.report(D0, DECODE_COST, 64, 1, 150, 100.0, 0.5)
    assert attempts(forecast, 2.0, now=0.5)[0] == pytest.approx(1, abs=0.01), "50 tokens, then 15 more at 10 a second"
    assert attempts(forecast, 7.0, now=0.5)[0] == pytest.approx(0, abs=0.01)


def test_what_an_instance_reports_beyond_the_known_attempts_stays() -> None:
    forecast = forecast_of(d0=3)
    place(forecast, "a", joins_at=0.0)
    forecast.join(AttemptId("a"), 0.0)
    batches = forecast.pool(0.0, 0.0, joining=False)
    assert batches.attempts[0] == 3
    assert batches.context_tokens[0] == pytest.approx(300)


def test_the_pools_time_between_tokens_is_the_mean_over_its_instances() -> None:
    forecast = forecast_of(d0=9, d1=19)
    now = forecast.pool(0.0, 0.0, joining=False)
    outlook = forecast.outlook(now, D0, 100)
    assert outlook.expected_ms == pytest.approx(10 + 10 + 10)
    assert outlook.mean_ms == pytest.approx(((10 + 10 + 10) + (10 + 19 + 19)) / 2)
    assert outlook.idle_mean_ms == pytest.approx(((10 + 1 + 1) + 10) / 2)
    forecast.down(D1)
    assert forecast.outlook(now, D0, 100).mean_ms == pytest.approx(30)


def test_attempts_beyond_the_largest_batch_wait_and_make_no_step_longer() -> None:
    forecast = forecast_of(d0=127)
    now = forecast.pool(0.0, 0.0, joining=False)
    forecast.down(D1)
    assert forecast.outlook(now, D0, 100).mean_ms == pytest.approx(10 + 64 + 64)


def test_the_worst_moment_of_one_instance_counts_who_joins_later() -> None:
    forecast = forecast_of(output_tokens=1000)
    for number in range(5):
        place(forecast, f"a{number}", joins_at=3.0)
    place(forecast, "elsewhere", joins_at=0.0, instance=D1)
    before = forecast.instance(D0, 100, 0.0, 1.0, 2.9)
    beyond = forecast.instance(D0, 100, 0.0, 1.0, 3.1)
    assert before.worst_ms == pytest.approx(forecast.idle_tbt_ms(D0, 100)) == pytest.approx(12)
    assert beyond.first_ms == before.first_ms == pytest.approx(12)
    assert beyond.worst_ms >= 10 + 6 + 6


def test_the_tokens_of_all_that_run_are_told_some_at_a_time_whoever_comes_and_goes_between() -> None:
    forecast = forecast_of()
    for number in range(5000):
        place(forecast, f"a{number}", joins_at=0.0, instance=(D0, D1)[number % 2])
        if number % 10:
            forecast.join(AttemptId(f"a{number}"), number / 1000)
    told = list(forecast.running_tokens(5.0))
    assert len(told) == 3
    assert sorted(np.concatenate(told)) == pytest.approx([(5.0 - number / 1000) / 0.011 for number in range(4999, 0, -1) if number % 10])
    telling = forecast.running_tokens(5.0)
    count = len(next(telling))
    for number in range(1000):
        forecast.remove(AttemptId(f"a{number}"))
    for number in range(40):
        name = f"late-{number}"
        place(forecast, name, joins_at=0.0, instance=InstanceId(name))
        forecast.join(AttemptId(name), 5.0)
    count += sum(map(len, telling))
    assert 3500 <= count <= 4540


def test_rows_of_forgotten_instances_are_used_again() -> None:
    forecast = forecast_of()
    place(forecast, "a", joins_at=0.0)
    forecast.forget(D0)
    forecast.report(InstanceId("d2"), DECODE_COST, 64, 0, 0, 0.0, 1.0)
    forecast.validate({AttemptId("a")})
    forecast.remove(AttemptId("a"))
    for number in range(50):
        forecast.report(InstanceId(f"n{number}"), DECODE_COST, 64, 1, 100, 0.0, 1.0)
    forecast.validate(set())
    assert len(forecast.tbts_ms(forecast.pool(1.0, 1.0, joining=False))) == 52


def test_instances_that_never_came_up_leave_no_row_behind() -> None:
    """A restarted Conductor hears of attempts on instances that are gone for good."""
    core = make_core(prefills=["p0"], decodes=["d0"])
    for number in range(500):
        attempt = LiveAttempt(AttemptId(f"a{number}"), InstanceId("p0"), InstanceId(f"gone-{number}"), Phase.DECODE, 100)
        core.handle(Renew(GatewayId("g"), [attempt]), float(number))
        core.handle(Progress(AttemptId(f"a{number}"), Phase.FINISHED), float(number))
        core.handle(Tick(), float(number))
        core.validate()
    assert len(core.state.forecast.pool(500.0, 500.0, joining=False)) <= 8, "rows"
