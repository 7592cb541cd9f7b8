"""Benchmark workloads and statistics, on series whose answers are known."""

import asyncio

import pytest

from deploy.bench.driver import Gate
from deploy.bench.statistics import Distribution, RequestRecord, summarize
from deploy.bench.workload import LOWEST_TOKEN_ID, BenchWorkload


def workload(**changes: object) -> BenchWorkload:
    settings = {"requests": 20, "prompt_tokens": 100, "output_tokens": 8, "shared_prefix": 0.25, "concurrency": 4, "rate": None}
    return BenchWorkload(**{**settings, "vocab_size": 1000, "seed": 1, **changes})  # type: ignore[arg-type]


def answered(sent_s: float, ttft_s: float, gap_s: float, tokens: int, cached: int = 0) -> RequestRecord:
    times = tuple(sent_s + ttft_s + gap_s * index for index in range(tokens))
    return RequestRecord(sent_s, times, times[-1], prompt_tokens=100, output_tokens=tokens, cached_tokens=cached)


def test_prompts_share_the_prefix_that_was_asked_for_and_nothing_else() -> None:
    prompts = workload().prompts()
    assert {len(prompt) for prompt in prompts} == {100}
    assert len({tuple(prompt[:25]) for prompt in prompts}) == 1
    assert len({tuple(prompt[25:]) for prompt in prompts}) == 20
    assert all(LOWEST_TOKEN_ID <= token < 1000 for prompt in prompts for token in prompt)


def test_the_same_seed_gives_the_same_requests() -> None:
    assert workload().prompts() == workload().prompts() != workload(seed=2).prompts()
    timed = {"concurrency": None, "rate": 5.0}
    assert workload(**timed).arrivals_s() == workload(**timed).arrivals_s() != workload(**timed, seed=2).arrivals_s()


def test_arrivals_come_at_the_rate() -> None:
    arrivals = workload(requests=20_000, concurrency=None, rate=50.0).arrivals_s()
    assert arrivals[0] == 0.0 and arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(20_000 / 50.0, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rate": 1.0}, "concurrency or a rate"),
        ({"requests": 0}, "requests"),
        ({"shared_prefix": 1.5}, "shared_prefix"),
        ({"vocab_size": 10}, "vocab_size"),
    ],
)
def test_a_workload_that_makes_no_sense_is_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        workload(**changes)


def test_percentiles_are_interpolated() -> None:
    assert Distribution.of([float(value) for value in range(101)]) == Distribution(mean=50.0, p50=50.0, p90=90.0, p99=99.0)
    assert Distribution.of([]) is None


def test_rates_are_over_the_time_from_the_first_sending_to_the_last_answer() -> None:
    records = [answered(sent_s=float(i), ttft_s=0.5, gap_s=0.1, tokens=6, cached=64) for i in range(10)]
    summary = summarize(records, ttft_slo_ms=1000, tbt_slo_ms=200)
    assert summary.duration_s == pytest.approx(10.0)
    assert summary.requests_per_s == pytest.approx(1.0)
    assert summary.output_tokens_per_s == pytest.approx(6.0)
    assert summary.prompt_tokens_per_s == pytest.approx(100.0)
    assert (summary.cached_tokens, summary.prompt_tokens) == (640, 1000)
    assert summary.ttft_ms is not None and summary.ttft_ms.p99 == pytest.approx(500)
    assert summary.tbt_ms is not None and summary.tbt_ms.p50 == pytest.approx(100)


def test_goodput_counts_requests_that_keep_both_objectives_with_every_token() -> None:
    good = answered(0.0, 0.1, 0.05, 10)
    late_start = answered(0.0, 0.9, 0.01, 10)
    stalled = RequestRecord(0.0, (0.1, 0.15, 0.95, 1.0), 1.0, prompt_tokens=100, output_tokens=4)
    summary = summarize([good, late_start, stalled], ttft_slo_ms=500, tbt_slo_ms=100)
    assert (summary.completed, summary.within_slos) == (3, 1)
    assert summary.goodput_requests_per_s == pytest.approx(1 / summary.duration_s)


def test_failed_requests_are_counted_by_kind_and_kept_out_of_the_latencies() -> None:
    failed = [
        RequestRecord(0.0, (9.0,), 9.0, error="429 ttft"),
        RequestRecord(0.0, (), 1.0, error="429 ttft"),
        RequestRecord(0.0, (), 2.0, error="503"),
    ]
    summary = summarize([answered(0.0, 0.1, 0.1, 3), *failed], ttft_slo_ms=1e6, tbt_slo_ms=1e6)
    assert (summary.requests, summary.completed, summary.errors) == (4, 1, {"429 ttft": 2, "503": 1})
    assert summary.ttft_ms is not None and summary.ttft_ms.p99 == pytest.approx(100)
    assert summary.duration_s == 9.0


def test_when_all_fail_there_are_no_latencies() -> None:
    summary = summarize([RequestRecord(0.0, (), 1.0, error="503")], 1.0, 1.0)
    assert summary.ttft_ms is None and summary.tbt_ms is None and summary.goodput_requests_per_s == 0.0


async def test_a_gate_lets_so_many_in_and_the_others_wait_or_are_refused() -> None:
    waits, refuses = Gate(1), Gate(1, refuses=True)
    async with refuses.place() as first, refuses.place() as second:
        assert (first, second) == (True, False)
    async with refuses.place() as third:
        assert third
    entered = asyncio.Event()

    async def enter() -> None:
        async with waits.place() as admitted:
            assert admitted
            entered.set()

    async with waits.place():
        task = asyncio.create_task(enter())
        await asyncio.sleep(0)
        assert not entered.is_set()
    await task
