"""The registry of all metrics: its page is current, and names keep to Prometheus' conventions."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from prometheus_client import REGISTRY, Histogram
from prometheus_client.parser import text_string_to_metric_families

from deploy.commands.metrics_reference import STAGE, Described, all_metrics, described_name, groups, metrics_reference
from springtide.rpc.generate import REPOSITORY

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
