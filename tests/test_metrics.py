"""The registry of all metrics: its page is current, names keep to Prometheus' conventions, labels have bounds, and whoever scrapes vLLM
finds what it looks for."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from prometheus_client import REGISTRY, Histogram
from prometheus_client.parser import text_string_to_metric_families

from deploy.commands.metrics_reference import (
    DECODE,
    EVERY,
    GATEWAY,
    PREFILL,
    STAGE,
    Described,
    all_metrics,
    described_name,
    groups,
    metrics_reference,
)
from springtide.rpc.generate import REPOSITORY
from tests.support.label_bounds import BOUNDS, FAILURES, MOST_BUCKETS, metrics_by_sample, most_series

OURS = sorted(name for name in all_metrics() if name.startswith(("springtide_", "vllm:")))
NOT_OURS_TO_NAME = {"vllm:kv_cache_usage_perc"}
UNITS_THAT_ARE_NO_BASE_UNITS = {
    *("ms", "us", "ns", "millis", "milliseconds", "microseconds", "minutes", "hours", "days"),
    *("kb", "mb", "gb", "kib", "mib", "gib", "kilobytes", "megabytes", "gigabytes", "bits"),
    *("percent", "percentage", "perc"),
}
TYPES = {"counter", "gauge", "histogram", "summary"}
LABELS_OF_TARGETS = {"job", "instance", "namespace", "pod", "container", "endpoint", "service", "node", "cluster", "le", "quantile"}
"""That Prometheus, or its operator, gives whatever it scrapes: those of a metric would be renamed `exported_…`."""
LABEL_OF_OURS = "springtide_role"
"""That targets have, too: no metric."""
MOST_SERIES = 10_000
"""Of one process, whatever comes."""
NAMED = re.compile(r"`((?:springtide_|vllm:)[a-z0-9_]+)\b(?!\*)(?:\{[^`]*\})?`")


def problems(metric: Described) -> list[str]:
    """What Prometheus' conventions, and promtool, have against it."""
    words = re.split("[_:]", metric.name)
    found = []
    if not re.fullmatch(r"(springtide_|vllm:)[a-z][a-z0-9]*(_[a-z0-9]+)*", metric.name):
        found.append("is not in snake case with the project's prefix")
    if (metric.type == "counter") != (words[-1] == "total"):
        found.append("ends in _total, or does not, as counters do")
    if words[-1] in ("count", "sum", "bucket", "created"):
        found.append("ends as a sample of a histogram does")
    if words[-1] == "info" and metric.type != "gauge":
        found.append("is no info")
    if "timestamp" in words and words[-1] != "seconds":
        found.append("is a time in no seconds")
    if metric.type == "histogram" and not metric.unit and not metric.name.endswith("_size"):
        found.append("is a histogram of what its name does not say")
    found += [f"has its type {word} in its name" for word in TYPES & set(words)]
    found += [f"has a unit that is none: {word}" for word in UNITS_THAT_ARE_NO_BASE_UNITS & set(words)]
    found += [f"has a label that targets have: {label}" for label in LABELS_OF_TARGETS & set(metric.labels)]
    found += [f"has a label that is not in snake case: {label}" for label in metric.labels if not re.fullmatch("[a-z][a-z0-9_]*", label)]
    if not metric.help or "\n" in metric.help or "|" in metric.help:
        found.append("has no help of one line")
    return found


@pytest.mark.parametrize("name", OURS)
def test_a_name_keeps_to_the_conventions(name: str) -> None:
    assert name in NOT_OURS_TO_NAME or problems(all_metrics()[name]) == []


@pytest.mark.parametrize(
    ("metric", "problem"),
    [
        (Described("springtide_wait_ms", "gauge", (), "h", ()), "has a unit that is none: ms"),
        (Described("springtide_waits", "counter", (), "h", ()), "ends in _total, or does not, as counters do"),
        (Described("springtide_waiting_total", "gauge", (), "h", ()), "ends in _total, or does not, as counters do"),
        (Described("springtide_waitTime_seconds", "gauge", (), "h", ()), "is not in snake case with the project's prefix"),
        (Described("springtide_wait", "histogram", (), "h", ()), "is a histogram of what its name does not say"),
        (Described("springtide_waits_total", "counter", ("instance",), "h", ()), "has a label that targets have: instance"),
    ],
)
def test_what_is_against_the_conventions_is_found(metric: Described, problem: str) -> None:
    assert problem in problems(metric)


def test_histograms_have_sums() -> None:
    """prometheus_client leaves out that of one with negative bounds, and counters of such would go down."""
    assert [h._name for h in histograms() if h._upper_bounds[0] < 0] == []


def histograms() -> list[Histogram]:
    return [collector for collector in REGISTRY._collector_to_names if isinstance(collector, Histogram) and not collector._labelvalues]


def test_no_name_is_two_metrics() -> None:
    names = [sample for group in groups() for metric in group.metrics for sample in metric.samples]
    assert len(names) == len(set(names))


def test_the_page_of_metrics_is_that_of_the_code() -> None:
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    assert page == metrics_reference(), "run `springtide metrics > docs/metrics.md`"


@pytest.mark.parametrize("page", sorted(path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("docs/**/*.md")))
def test_metrics_that_a_page_names_are_there(page: str) -> None:
    known = {sample for metric in all_metrics().values() for sample in (metric.name, *metric.samples)}
    named = set(NAMED.findall((REPOSITORY / page).read_text())) - {LABEL_OF_OURS}
    assert sorted(name for name in named - known if not any(other.startswith(f"{name}_") for other in known)) == []


def test_a_further_stage_has_the_metrics_that_the_page_says() -> None:
    """Where it has a page, it is on a node of its own: tests/e2e/test_metrics_pages.py has the pages of all others."""
    shown = "import prefill_node.stage.process, prometheus_client as p; print(p.generate_latest().decode())"
    page = subprocess.check_output([sys.executable, "-c", shown], cwd=REPOSITORY, text=True)
    families = set(map(described_name, text_string_to_metric_families(page)))
    assert families == {name for name, metric in all_metrics().items() if STAGE in metric.processes}


# ---- how many series there can be ----


@pytest.mark.parametrize("name", sorted(all_metrics()))
def test_each_label_has_a_bound(name: str) -> None:
    labels = set(all_metrics()[name].labels)
    assert BOUNDS.get(name, {}).keys() == labels, "say in tests/support/label_bounds.py how many values it can have, and why no more"


def test_bounds_are_of_metrics_that_there_are() -> None:
    assert BOUNDS.keys() <= all_metrics().keys()


def test_no_histogram_has_more_buckets_than_are_counted_for_it() -> None:
    assert [h._name for h in histograms() if len(h._upper_bounds) + 2 > MOST_BUCKETS] == []


@pytest.mark.parametrize("process", EVERY)
def test_a_process_never_has_more_series_than_a_prometheus_takes_for_granted(process: str) -> None:
    of_each = {name: most_series(metric) for name, metric in all_metrics().items() if process in metric.processes}
    print(process, sum(of_each.values()), sorted(of_each.items(), key=lambda each: -each[1])[:3])
    assert sum(of_each.values()) <= MOST_SERIES


def test_failures_of_generations_have_the_codes_that_the_core_gives_them() -> None:
    core = (REPOSITORY / "gateway/core.py").read_text()
    given = set(re.findall(r'\b(?:code|reason)="(\w+)"', core))
    assert len(given) > 5 and given <= FAILURES.words


# ---- who scrapes vLLM ----

ENGINES = (PREFILL, DECODE)
SCRAPED: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "the endpoint pickers of llm-d and of the Gateway API": (
        ENGINES,
        {
            "vllm:num_requests_waiting": (),
            "vllm:num_requests_running": (),
            "vllm:kv_cache_usage_perc": (),
            "vllm:cache_config_info": ("block_size", "num_gpu_blocks"),
            "vllm:lora_requests_info": ("running_lora_adapters", "waiting_lora_adapters", "max_lora"),
            "vllm:lora_adapter_loaded": (),
            "vllm:num_gpu_loaded_lora_adapters": (),
            "vllm:max_gpu_lora_adapters": (),
        },
    ),
    "production-stack's router": (
        ENGINES,
        {
            "vllm:num_requests_running": (),
            "vllm:num_requests_waiting": (),
            "vllm:gpu_cache_usage_perc": (),
            "vllm:gpu_prefix_cache_hit_rate": (),
            "vllm:gpu_prefix_cache_hits_total": (),
            "vllm:gpu_prefix_cache_queries_total": (),
        },
    ),
    "production-stack's autoscaling by KEDA": (ENGINES, {"vllm:num_requests_waiting": ()}),
    "what keeps it from scaling to nothing": ((GATEWAY,), {"vllm:num_incoming_requests_total": ()}),
    "AIBrix's routing and autoscaling": (
        ENGINES,
        {
            "vllm:num_requests_running": (),
            "vllm:num_requests_waiting": (),
            "vllm:kv_cache_usage_perc": (),
            "vllm:gpu_cache_usage_perc": (),
            "vllm:cpu_cache_usage_perc": (),
            "vllm:time_to_first_token_seconds_bucket": ("model_name",),
            "vllm:inter_token_latency_seconds_bucket": (),
            "vllm:time_per_output_token_seconds_bucket": (),
            "vllm:request_time_per_output_token_seconds_bucket": (),
            "vllm:e2e_request_latency_seconds_sum": (),
            "vllm:request_queue_time_seconds_sum": (),
            "vllm:request_prefill_time_seconds_sum": (),
            "vllm:request_decode_time_seconds_sum": (),
            "vllm:request_prompt_tokens_sum": ("model_name",),
            "vllm:request_generation_tokens_sum": ("model_name",),
            "vllm:prompt_tokens_total": (),
            "vllm:generation_tokens_total": (),
            "vllm:request_success_total": (),
            "vllm:num_preemptions_total": (),
            "vllm:prefix_cache_queries_total": (),
            "vllm:prefix_cache_hits_total": (),
            "vllm:external_prefix_cache_queries_total": (),
            "vllm:external_prefix_cache_hits_total": (),
            "vllm:lora_requests_info": ("running_lora_adapters", "waiting_lora_adapters", "max_lora"),
        },
    ),
    "vLLM's dashboard": (
        ENGINES,
        {
            "vllm:e2e_request_latency_seconds_bucket": ("model_name",),
            "vllm:time_to_first_token_seconds_bucket": ("model_name",),
            "vllm:inter_token_latency_seconds_bucket": ("model_name",),
            "vllm:prompt_tokens_total": ("model_name",),
            "vllm:generation_tokens_total": ("model_name",),
            "vllm:num_requests_running": ("model_name",),
            "vllm:num_requests_waiting": ("model_name",),
            "vllm:kv_cache_usage_perc": ("model_name",),
            "vllm:request_prompt_tokens_bucket": ("model_name",),
            "vllm:request_generation_tokens_bucket": ("model_name",),
            "vllm:request_success_total": ("model_name", "finished_reason"),
            "vllm:request_queue_time_seconds_sum": ("model_name",),
            "vllm:request_prefill_time_seconds_sum": ("model_name",),
            "vllm:request_decode_time_seconds_sum": ("model_name",),
            "vllm:request_max_num_generation_tokens_sum": ("model_name",),
        },
    ),
}
"""By who asks: whom, and for which samples with which labels."""
NO_ADAPTERS = "engines here have no LoRA adapters, and pickers do without"
RENAMED = "vLLM's own name of old, which it serves no more"
NOT_SERVED = {
    "vllm:lora_requests_info": NO_ADAPTERS,
    "vllm:lora_adapter_loaded": NO_ADAPTERS,
    "vllm:num_gpu_loaded_lora_adapters": NO_ADAPTERS,
    "vllm:max_gpu_lora_adapters": NO_ADAPTERS,
    "vllm:gpu_cache_usage_perc": RENAMED,
    "vllm:cpu_cache_usage_perc": RENAMED,
    "vllm:gpu_prefix_cache_hit_rate": RENAMED,
    "vllm:gpu_prefix_cache_hits_total": RENAMED,
    "vllm:gpu_prefix_cache_queries_total": RENAMED,
    "vllm:time_per_output_token_seconds_bucket": RENAMED,
    "vllm:request_max_num_generation_tokens_sum": "a choice is a request of its own here: it is request_generation_tokens",
}


@pytest.mark.parametrize("who", SCRAPED)
def test_whoever_scrapes_vllm_finds_what_it_looks_for(who: str) -> None:
    """That pages have what the registry has, and of each process, is in tests/e2e/test_metrics_pages.py."""
    samples = metrics_by_sample()
    processes, wanted = SCRAPED[who]
    for name, labels in wanted.items():
        if name not in NOT_SERVED:
            assert name in samples, name
            assert set(processes) <= set(samples[name].processes), name
            assert set(labels) <= set(samples[name].labels), name


def test_what_is_not_served_to_them_is_not_served_at_all() -> None:
    served = {sample for metric in all_metrics().values() for sample in (metric.name, *metric.samples)}
    assert NOT_SERVED.keys() & served == set()
    assert NOT_SERVED.keys() <= {name for _, wanted in SCRAPED.values() for name in wanted}
