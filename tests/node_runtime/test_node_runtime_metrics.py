"""An engine's metrics by vLLM's names: what each counts as attempts go by."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from prometheus_client import REGISTRY

from node_runtime.metrics import VllmMetrics
from springtide.ids import AttemptId, BlockKey, RequestId
from springtide.modelinfo import KVSpec
from springtide.protocol.instances import Load, Role
from springtide.protocol.outputs import FailureCode, Finish, PrefillDone, SampledToken, TokenOutput
from springtide.protocol.sampling import SamplingParams
from springtide.protocol.starts import Request

A, B = AttemptId("a.1"), AttemptId("b.1")
_models = (f"model-{number}" for number in itertools.count())


class HandSetClock:
    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at


class Engine:
    """One whose metrics are told of what it does at times that the test says."""

    def __init__(self, role: Role) -> None:
        self.model = next(_models)
        self.clock = HandSetClock()
        self.told = VllmMetrics(self.model, role, self.clock)

    def value(self, name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"vllm:{name}", {"model_name": self.model, "engine": "0", **labels})

    def values(self, *names: str) -> list[float | None]:
        return [self.value(name) for name in names]


@pytest.fixture(params=[Role.PREFILL, Role.DECODE])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(request.param)


def request_of(attempt_id: AttemptId, num_tokens: int, *, sent: int = 0, age_s: float = 0.0) -> Request:
    tokens = tuple(range(num_tokens + sent))
    keys = (BlockKey(bytes(16)),) * (len(tokens) // 64)
    prompt: dict[str, Any] = {"token_ids": tokens, "num_prompt_tokens": num_tokens, "keys": keys, "block_tokens": 64}
    return Request(
        attempt_id, RequestId("r"), "t", params=SamplingParams(max_tokens=9), namespace=BlockKey(bytes(16)), age_s=age_s, **prompt
    )


def output(attempt_id: AttemptId, position: int, count: int, finish: Finish | None = None) -> TokenOutput:
    return TokenOutput(attempt_id, position, (SampledToken(1),) * count, finish)


def prefilled(attempt_id: AttemptId, finish: Finish | None = None, position: int = 0) -> PrefillDone:
    done = output(attempt_id, position, 1, finish)
    return PrefillDone(done, cached_tokens=128, remote_tokens=64, queue_ms=500, compute_ms=1500)


def test_a_prompt_counts_with_where_its_tokens_came_from(engine: Engine) -> None:
    engine.told.started(request_of(A, 200, age_s=0.5))
    engine.clock.at += 2
    engine.told.prefilled(prefilled(A))
    assert engine.values("prompt_tokens_total", "prompt_tokens_cached_total", "generation_tokens_total") == [200, 128, 1]
    assert engine.values("prefix_cache_queries_total", "prefix_cache_hits_total") == [200, 64]
    assert engine.values("external_prefix_cache_queries_total", "external_prefix_cache_hits_total") == [136, 64]
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    assert [engine.value("prompt_tokens_by_source_total", source=source) for source in sources] == [72, 64, 64]
    assert engine.values("time_to_first_token_seconds_sum", "time_to_first_token_seconds_count") == [2.5, 1]
    assert engine.values("request_queue_time_seconds_sum", "request_prefill_time_seconds_sum") == [0.5, 1.5]


def test_a_continuation_has_had_its_first_token_before(engine: Engine) -> None:
    engine.told.started(request_of(A, 200, sent=3))
    engine.told.prefilled(prefilled(A, position=3))
    assert engine.values("time_to_first_token_seconds_count", "prompt_tokens_total") == [0, 203]


def test_a_request_ends_with_its_latencies_and_lengths() -> None:
    engine = Engine(Role.DECODE)
    engine.told.started(request_of(A, 200, age_s=1))
    for seconds, position, count, finish in ((1.0, 1, 1, None), (0.05, 2, 1, None), (0.4, 3, 2, None), (0.1, 5, 1, Finish.LENGTH)):
        engine.clock.at += seconds
        engine.told.sampled((output(A, position, count, finish),))
    assert engine.value("generation_tokens_total") == 5
    assert engine.value("request_success_total", finished_reason="length") == 1
    assert engine.value("e2e_request_latency_seconds_sum") == pytest.approx(2.55)
    assert engine.value("request_decode_time_seconds_sum") == pytest.approx(0.55)
    assert engine.value("request_time_per_output_token_seconds_sum") == pytest.approx(0.55 / 4)
    assert engine.values("request_prompt_tokens_sum", "request_generation_tokens_sum") == [200, 6]


def test_every_token_after_the_first_has_its_latency() -> None:
    engine = Engine(Role.DECODE)

    def observed() -> list[float]:
        """So many within 0.15 s, within 0.3 s and at all, and their sum."""
        of_bounds = [engine.value("inter_token_latency_seconds_bucket", le=bound) for bound in ("0.15", "0.3", "+Inf")]
        return [value or 0.0 for value in (*of_bounds, engine.value("inter_token_latency_seconds_sum"))]

    before = observed()
    engine.told.started(request_of(A, 10))
    engine.told.started(request_of(B, 10))
    for seconds, outputs in (
        (1.0, (output(A, 1, 1),)),
        (0.1, (output(A, 2, 1), output(B, 1, 1))),
        (0.4, (output(A, 3, 2), output(B, 2, 1))),
    ):
        engine.clock.at += seconds
        engine.told.sampled(outputs)
    assert [after - earlier for after, earlier in zip(observed(), before, strict=True)] == pytest.approx([1, 3, 4, 0.1 + 2 * 0.2 + 0.4])


def test_a_request_that_its_first_token_ends_ends_at_the_prefill_engine() -> None:
    engine = Engine(Role.PREFILL)
    engine.told.started(request_of(A, 200))
    engine.clock.at += 2
    engine.told.prefilled(prefilled(A, Finish.STOP))
    assert engine.value("request_success_total", finished_reason="stop") == 1
    assert engine.values("e2e_request_latency_seconds_sum", "request_decode_time_seconds_sum") == [2, 0]


def test_what_is_aborted_after_it_began_counts_where_requests_end() -> None:
    for role, counted in ((Role.PREFILL, 0), (Role.DECODE, 1)):
        engine = Engine(role)
        engine.told.started(request_of(A, 10))
        engine.told.started(request_of(B, 10))
        engine.told.sampled((output(A, 1, 1),))
        engine.told.doing(Load(attempt_ids=frozenset({A, B})), 0)
        engine.told.doing(Load(), 0)
        engine.told.doing(Load(), 0)
        assert engine.value("request_success_total", finished_reason="abort") == counted


@pytest.mark.parametrize(
    ("code", "preemptions", "errors"),
    [(FailureCode.PREEMPTED, 1, 0), (FailureCode.INTERNAL, 0, 1), (FailureCode.PEER_LOST, 0, 1), (FailureCode.POOL_FULL, 0, 0)],
)
def test_a_failure_counts_by_what_it_is(engine: Engine, code: FailureCode, preemptions: int, errors: int) -> None:
    engine.told.started(request_of(A, 10))
    engine.told.failed(A, code)
    engine.told.doing(Load(), 0)
    assert engine.value("num_preemptions_total") == preemptions
    assert engine.value("request_success_total", finished_reason="error") == errors
    assert engine.value("request_success_total", finished_reason="abort") == 0


def test_gauges_are_what_the_engine_says_of_itself(engine: Engine) -> None:
    engine.told.doing(Load(running=3, waiting=2, slots_total=200, slots_available=50), num_held=1)
    assert engine.values("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc") == [3, 3, 0.75]
    engine.told.doing(Load(), 0)
    assert engine.values("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc") == [0, 0, 0]


def test_the_cache_is_that_of_the_store_connected_last(engine: Engine) -> None:
    spec = KVSpec(2, 1, 8, "bfloat16", 32)
    for slots in (10, 20):
        engine.told.connected(slots, spec)
    (family,) = [family for family in REGISTRY.collect() if family.name == "vllm:cache_config_info"]
    assert [(sample.labels["block_size"], sample.labels["num_gpu_blocks"], sample.value) for sample in family.samples] == [("32", "20", 1)]
