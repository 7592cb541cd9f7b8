"""Every metric of every process, from the modules that make them; and docs/metrics.md."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import conductor.metrics
import decode_node.metrics
import gateway.metrics
import kvstore.metrics
import messenger.metrics
import node_runtime.metrics
import prefill_node.metrics
import springtide.metrics

GATEWAY, CONDUCTOR, STORE, PREFILL, DECODE, STAGE = "gateway", "conductor", "store", "prefill", "decode", "stage"
EVERY = (GATEWAY, CONDUCTOR, STORE, PREFILL, DECODE, STAGE)
UNITS = ("seconds", "bytes", "ratio", "tokens", "blocks", "slots", "instances", "attempts")
OF_A_HISTOGRAM = ("_bucket", "_sum", "_count")

_INTRODUCTION = """# Metrics

Every process serves Prometheus' text format at `/metrics` of its metrics port ([where](operations.md#watch)), and OpenMetrics to whoever
asks for it: with it come exemplars. A gateway's HTTP port has the former, without what names tenants, for no key is asked for there.
What goes out by OTLP is [below](#by-opentelemetrys-conventions). This page is made from the code by `springtide metrics > docs/metrics.md`.

Names follow [Prometheus' conventions](https://prometheus.io/docs/practices/naming/): base units, `_total` for counters, `_ratio` for shares
of 1, a timestamp is in Unix seconds. A histogram has `_bucket`, `_sum` and `_count`.
"""
_EXEMPLARS = """`springtide_gateway_ttft_seconds`, `springtide_gateway_tbt_seconds` and `springtide_gateway_e2e_seconds` have exemplars: the
`request_id`, under which logs have the request, and the `trace_id` of the client's `traceparent` where it sent one. Of times between tokens
those have one that are the longest of their generation so far. Native histograms there are none of: prometheus_client 0.26 makes classic
ones alone (Prometheus 3 turns them into native ones with `convert_classic_histograms_to_nhcb`).

Up to 256 tenants, and as many instances, have series of their own. When there are more, those that had nothing to do with requests for an
hour make room; if there are none, what is new counts as `(others)`, so that sums are right."""
_VLLM = """So that what is made for vLLM (llm-d's endpoint picker, production-stack, AIBrix, KEDA's recipes, dashboards) works on these
engines as it is: a pool of prefill engines is scaled by `vllm:num_requests_waiting`, one of decode engines by that or by
`vllm:kv_cache_usage_perc`. `engine` is always `0`: each engine has a page of its own.
vLLM's histogram of the tokens of a request's longest choice is not served: each choice is a request of its own here, and
`vllm:request_generation_tokens` has its tokens.
Prompts are computed by prefill engines and outputs by decode engines, so that

- `num_requests_running` and `num_requests_waiting` are prompts on the former and outputs on the latter, where a request waits from its
  start, for its prompt too, as vLLM's does for remote KV. What is in idle capacity (batches) is in neither, for it gives way to whoever
  comes;
- `kv_cache_usage_perc` and `cache_config_info` are of the arena of the engine's node: `num_gpu_blocks` are its slots, and those of blocks
  that nobody uses count as free;
- `time_to_first_token_seconds`, `request_queue_time_seconds`, `request_prefill_time_seconds`, `prompt_tokens`, `prefix_cache_` and
  `external_prefix_cache_` are told by whoever computes the prompt: prefill engines, and decode engines of what they compute in their steps.
  External is what came from the SSD or another node;
- `inter_token_latency_seconds`, `request_decode_time_seconds` and `request_time_per_output_token_seconds` begin with the first token that
  the decode engine samples. The time between that and the prefill engine's, as clients see it, is in `springtide_gateway_tbt_seconds`;
- `generation_tokens_total` has first tokens on prefill engines, all others on decode engines: the sum is the cluster's;
- `request_success_total`, `e2e_request_latency_seconds`, `request_prompt_tokens` and `request_generation_tokens` are told where a request
  ends, mostly by decode engines. `abort` is a stop string, too, for which gateways look.

Not there are `request_inference_time_seconds`, which is spent on two engines, and what engines here know nothing of: `request_params_n`,
`num_requests_waiting_by_reason`, `lora_requests_info`, multi-modal caches. Requests for which no engine was found are counted where that is
decided, in `springtide_conductor_rejections_total`; all that came, in the gateway's `vllm:num_incoming_requests_total`, by which KEDA's
recipes keep a pool from being scaled to nothing."""


_GENAI = """## By OpenTelemetry's conventions

Where `metrics.otlp_endpoint` says where to, or OpenTelemetry's own `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT` or
`OTEL_EXPORTER_OTLP_ENDPOINT`, gateways send the metrics of OpenTelemetry's
[conventions for generative AI](https://github.com/open-telemetry/semantic-conventions-genai) by OTLP over HTTP, once a minute
(`OTEL_METRIC_EXPORT_INTERVAL`, in milliseconds). It takes OpenTelemetry's packages (`pip install 'springtide[otel]'`), and is off
otherwise. All are histograms in seconds with the bounds that the conventions ask for, and have `gen_ai.operation.name`,
`gen_ai.provider.name` (`springtide`), `gen_ai.request.model` and `gen_ai.response.model`. What runs in idle capacity, as batches do, is in
none: nobody waits for it. As with [traces](tracing.md), the service is `springtide` unless `OTEL_SERVICE_NAME` or
`OTEL_RESOURCE_ATTRIBUTES` says another, and `service.instance.id` is the gateway's.

| metric | meaning |
|---|---|
| `gen_ai.server.time_to_first_token` | from arrival to the first token, of generations that finished |
| `gen_ai.server.time_per_output_token` | of these, the time after the first token over the tokens after it |
| `gen_ai.server.request.duration` | from arrival to the end; of those that failed with `error.type`, and not of those whose client left |
"""


@dataclass(frozen=True, slots=True)
class Described:
    """A metric as its page has it."""

    name: str
    """With the ending that a counter's or an info's sample has."""
    type: str
    labels: tuple[str, ...]
    help: str
    processes: tuple[str, ...]
    """By the roles of `springtide_build_info`; a Conductor that has a gateway in its process has the metrics of both."""

    @property
    def samples(self) -> tuple[str, ...]:
        """The names of its samples."""
        return tuple(f"{self.name}{ending}" for ending in OF_A_HISTOGRAM) if self.type == "histogram" else (self.name,)

    @property
    def unit(self) -> str:
        """The last word of its name that is one; empty: it counts what it is called by."""
        return next((word for word in reversed(re.split("[_:]", self.name)) if word in UNITS), "")


@dataclass(frozen=True, slots=True)
class Group:
    """Metrics of one module, and whose they are."""

    heading: str
    processes: tuple[str, ...]
    metrics: tuple[Described, ...]
    note: str = ""


def groups() -> list[Group]:
    """All there are."""
    return [
        _group("Every process", EVERY, springtide.metrics),
        Group(
            "Every process, from the client library",
            EVERY,
            tuple(
                described
                for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR)
                for described in _collected(collector, EVERY)
            ),
        ),
        _group("Gateway", (GATEWAY,), gateway.metrics, _EXEMPLARS),
        _group("Conductor", (CONDUCTOR,), conductor.metrics),
        _group("Store", (STORE,), kvstore.metrics),
        _group(
            "Transfers",
            (STORE, PREFILL, DECODE, STAGE),
            messenger.metrics,
            "Of the process's own connections by Messenger: of an engine and its stages, what goes from stage to stage.",
        ),
        _group("Prefill engine", (PREFILL, DECODE), prefill_node.metrics, "Of a decode engine, what it prefills itself."),
        _group("Decode engine", (DECODE,), decode_node.metrics),
        _group("Engines, by vLLM's names", (PREFILL, DECODE), node_runtime.metrics, _VLLM),
    ]


def all_metrics() -> dict[str, Described]:
    """Every metric by its name."""
    return {described.name: described for group in groups() for described in group.metrics}


def described_name(family: Metric) -> str:
    """A family's, as all_metrics() has it."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def metrics_reference() -> str:
    """The whole page, in Markdown."""
    parts = [_INTRODUCTION]
    for group in groups():
        whose = "" if group.processes == EVERY else f"Of: {', '.join(group.processes)}.\n\n"
        rows = map(_row, group.metrics)
        note = f"{group.note}\n\n" if group.note else ""
        table = "\n".join(["| metric | type | unit | labels | meaning |", "|---|---|---|---|---|", *rows])
        parts.append(f"## {group.heading}\n\n{whose}{note}{table}\n")
    return "\n".join([*parts, _GENAI])


def _group(heading: str, processes: tuple[str, ...], module: ModuleType, note: str = "") -> Group:
    collectors = [value for value in vars(module).values() if hasattr(value, "describe") and not isinstance(value, type)]
    return Group(heading, processes, tuple(one for collector in collectors for one in _described(collector, processes)), note)


def _described(collector: Any, processes: tuple[str, ...]) -> Iterator[Described]:
    """Of a metric, or of a collector of ours, whose families know their labels."""
    for family in collector.describe():
        yield _of_family(family, (collector if hasattr(collector, "_labelnames") else family)._labelnames, processes)


def _collected(collector: Collector, processes: tuple[str, ...]) -> Iterator[Described]:
    """Of one that says what it has only by giving it."""
    for family in collector.collect():
        yield _of_family(family, tuple(dict.fromkeys(label for sample in family.samples for label in sample.labels)), processes)


def _of_family(family: Metric, labels: Sequence[str], processes: tuple[str, ...]) -> Described:
    return Described(described_name(family), family.type, tuple(labels), family.documentation.rstrip("."), processes)


def _row(metric: Described) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.type} | {metric.unit} | {labels} | {metric.help} |"
