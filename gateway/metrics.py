"""What the gateway tells Prometheus."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from springtide.telemetry import LATENCY_BUCKETS_S

REQUESTS = Counter("springtide_gateway_requests_total", "API requests answered.", ["endpoint", "status"])
UNAUTHENTICATED = Counter("springtide_gateway_unauthenticated_total", "API requests without an API key that is known.")
RATE_LIMITED = Counter("springtide_gateway_rate_limited_total", "API requests over their key's or tenant's limit, by its kind.", ["kind"])
IN_FLIGHT = Gauge("springtide_gateway_requests_in_flight", "API requests being answered.", ["endpoint"])
DISCONNECTS = Counter("springtide_gateway_client_disconnects_total", "API requests whose client went away first.", ["endpoint"])
TTFT_SECONDS = Histogram("springtide_gateway_ttft_seconds", "From a generation's arrival to its first token.", buckets=LATENCY_BUCKETS_S)
TBT_SECONDS = Histogram("springtide_gateway_tbt_seconds", "Between two tokens of a generation.", buckets=LATENCY_BUCKETS_S)
PROMPT_TOKENS = Counter("springtide_gateway_prompt_tokens_total", "Prompt tokens of the generations that finished.")
OUTPUT_TOKENS = Counter("springtide_gateway_output_tokens_total", "Output tokens sent on.")
CACHED_TOKENS = Counter("springtide_gateway_cached_tokens_total", "Of them, those found in the pool by the first attempt.")
RESCHEDULES = Counter("springtide_gateway_reschedules_total", "Attempts beyond a generation's first.")
FAILED_ATTEMPTS = Counter(
    "springtide_gateway_failed_attempts_total", "Attempts that failed, by instance at fault (empty: unknown).", ["instance"]
)
CROWDED_OUT = Counter("springtide_gateway_crowded_out_attempts_total", "Attempts for which there was no room; their requests wait.")
LOST_REPORTS = Counter(
    "springtide_gateway_lost_reports_total", "Reports on attempts that a Conductor never got; renewals made up for them."
)
STALE_ANSWERS = Counter("springtide_gateway_stale_leader_answers_total", "Answers of deposed Conductors, all refused.")
TERMINALS = Counter("springtide_gateway_generations_total", "Generations ended, by how.", ["outcome"])

_MOST_INSTANCES = 256
_failed: dict[str, None] = {}
"""Instances that have a series, who failed last at the end."""


def count_failed_attempt(instance_id: str) -> None:
    """Counts it. Only the instances that failed last have a series: each that starts anew may have another name."""
    FAILED_ATTEMPTS.labels(instance_id).inc()
    _failed.pop(instance_id, None)
    _failed[instance_id] = None
    if len(_failed) > _MOST_INSTANCES:
        oldest = next(iter(_failed))
        del _failed[oldest]
        FAILED_ATTEMPTS.remove(oldest)
