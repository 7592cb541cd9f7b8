"""What the gateway counts of generations: which objectives they met, whose they were, and by what they are found."""

from __future__ import annotations

import itertools

import pytest
from prometheus_client import REGISTRY

from gateway import events as ev
from gateway import metrics
from gateway.caching.context import CacheId, ContextCache, Kept, Status
from gateway.caching.keeper import NOT_SEEN_S, LookedAfter
from gateway.objectives import Latencies, Objectives
from springtide.errors import DeadlineExceeded, InvalidRequest, Overloaded, SpringtideError, Unavailable
from springtide.metrics import NamedSeries
from springtide.protocol.outputs import Finish

OBJECTIVES = Objectives(ttft_s=2.0, tbt_s=0.2)
DONE = ev.Finished(Finish.STOP, 0)
GONE = ev.Cancelled()
TRACE = "0af7651916cd43dd8448eb211c80319c"
_tenants = (f"tenant-{number}" for number in itertools.count())


@pytest.fixture(autouse=True)
def room_for_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other tests have named."""
    for names in ("_tenants", "_instances"):
        monkeypatch.setattr(metrics, names, NamedSeries(256))


def failed(error: SpringtideError) -> ev.Failed:
    return ev.Failed(error)


OVERLOADED = failed(Overloaded("full", retry_after_s=1, reason="ttft"))


def of_tenant(tenant: str) -> dict[str, str]:
    """Of each objective that was counted, the result."""
    found = {}
    for objective, result in itertools.product(("ttft", "tbt", "goodput"), ("met", "missed")):
        labels = {"tenant": tenant, "objective": objective, "result": result}
        if REGISTRY.get_sample_value("springtide_gateway_slo_generations_total", labels):
            found[objective] = result
    return found


@pytest.mark.parametrize(
    ("seen", "waited_s", "reply", "counted"),
    [
        (Latencies(1.9, 0.2), 9, DONE, {"ttft": "met", "tbt": "met", "goodput": "met"}),
        (Latencies(2.1, 0.2), 9, DONE, {"ttft": "missed", "tbt": "met", "goodput": "missed"}),
        (Latencies(1.9, 0.3), 9, DONE, {"ttft": "met", "tbt": "missed", "goodput": "missed"}),
        (Latencies(1.9), 9, DONE, {"ttft": "met", "goodput": "met"}),
        (Latencies(), 1, OVERLOADED, {"goodput": "missed"}),
        (Latencies(), 1, failed(Unavailable("gone", code="node_lost")), {"goodput": "missed"}),
        (Latencies(1, 0.1), 9, failed(DeadlineExceeded("late", code="deadline")), {"ttft": "met", "tbt": "met", "goodput": "missed"}),
        (Latencies(), 1, failed(InvalidRequest("too large", code="request_too_large")), {}),
        (Latencies(), 1, GONE, {}),
        (Latencies(1, 0.1), 9, GONE, {"ttft": "met", "tbt": "met"}),
        (Latencies(), 3, GONE, {"ttft": "missed", "goodput": "missed"}),
        (Latencies(1, 0.3), 9, GONE, {"ttft": "met", "tbt": "missed", "goodput": "missed"}),
    ],
)
def test_a_generation_counts_by_the_objectives_that_it_met(
    seen: Latencies, waited_s: float, reply: ev.Finished | ev.Failed | ev.Cancelled, counted: dict[str, str]
) -> None:
    tenant = next(_tenants)
    metrics.count_objectives(tenant, seen, waited_s, reply, OBJECTIVES)
    assert of_tenant(tenant) == counted


def labels_of(metric: str, label: str) -> set[str]:
    return {
        sample.labels[label]
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == metric and label in sample.labels
    }


def test_tenants_and_instances_have_series_up_to_a_number() -> None:
    def total(metric: str) -> float:
        return sum(sample.value for family in REGISTRY.collect() for sample in family.samples if sample.name == metric)

    counters = {
        "springtide_gateway_failed_attempts_total": ("instance_id", 1000),
        "springtide_gateway_slo_generations_total": ("tenant", 3000),
        "springtide_gateway_tenant_tokens_total": ("tenant", 6000),
    }
    before = {metric: total(metric) for metric in counters}
    named_before = {metric: labels_of(metric, label) for metric, (label, _) in counters.items()}
    for number in range(1000):
        metrics.count_failed_attempt(f"many-{number}")
        metrics.count_objectives(f"many-{number}", Latencies(1, 0.1), 9, DONE, OBJECTIVES)
        metrics.count_tokens(f"many-{number}", 3, 2, 1)
    for metric, (label, counted) in counters.items():
        new = labels_of(metric, label) - named_before[metric]
        assert len(new) <= 257 and "(others)" in labels_of(metric, label)
        assert total(metric) - before[metric] == counted


@pytest.mark.parametrize(
    ("traceparent", "found"),
    [
        (f"00-{TRACE}-b7ad6b7169203331-01", {"trace_id": TRACE}),
        (f"01-{TRACE}-b7ad6b7169203331-00-more", {"trace_id": TRACE}),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", {}),
        (f"00-{TRACE}-b7ad6b7169203331", {}),
        ("", {}),
        ('00-"}\n', {}),
    ],
)
def test_an_exemplar_names_the_request_and_the_trace_if_there_is_one(traceparent: str, found: dict[str, str]) -> None:
    assert metrics.exemplar("chatcmpl-1", traceparent) == {"request_id": "chatcmpl-1", **found}


def test_an_exemplar_is_never_too_long_to_be_one() -> None:
    long = metrics.exemplar("x" * 1000, f"00-{TRACE}-b7ad6b7169203331-01")
    assert sum(len(name) + len(value) for name, value in long.items()) <= 128
    metrics.TTFT_SECONDS.observe(1.0, long)


def cache(number: int, tokens: int, ends_at: float = 1000.0, status: Status = Status.READY) -> ContextCache:
    return ContextCache(CacheId(f"cache-{number}"), "ann", "m", tokens, 1, 0.0, ends_at, kept=Kept(status))


def test_context_caches_are_counted_by_who_looked_at_them_last() -> None:
    def shown(now: float) -> dict[str, tuple[float | None, float | None]]:
        looked_after.show(now)
        return {
            status.value: counted
            for status in Status
            if any(counted := tuple(REGISTRY.get_sample_value(name, {"status": status.value}) for name in names))
        }

    names = ("springtide_gateway_context_caches", "springtide_gateway_context_cache_tokens")
    looked_after = LookedAfter()
    looked_after.see(cache(1, 100), 0.0)
    looked_after.see(cache(2, 50, status=Status.PENDING), 1.0)
    looked_after.see(cache(3, 7, ends_at=1.0), 2.0)
    assert shown(2.0) == {"ready": (1, 100), "pending": (1, 50), "inactive": (1, 7)}
    looked_after.see(cache(2, 50), 20.0)
    looked_after.lose("ann", "cache-3")
    looked_after.lose("ann", "cache-3")
    assert shown(20.0) == {"ready": (2, 150)}
    assert shown(NOT_SEEN_S) == {"ready": (1, 50)}, "another gateway has looked at it since, or nobody"
    assert shown(20.0 + NOT_SEEN_S) == {}
