"""What the gateway tells Prometheus."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from gateway import events as ev
from gateway.objectives import Latencies, Objectives
from springtide.errors import Overloaded
from springtide.metrics import NamedSeries
from springtide.telemetry import LATENCY_BUCKETS_S
from springtide.trace_context import parsed

REQUESTS = Counter("springtide_gateway_requests_total", "API requests answered.", ["route", "status"])
INCOMING = Counter(
    "vllm:num_incoming_requests_total",
    "Valid requests for outputs, whether or not somebody is there to answer them; the name is that of production-stack's router.",
    ["model"],
)
UNAUTHENTICATED = Counter("springtide_gateway_unauthenticated_total", "API requests without an API key that is known.")
RATE_LIMITED = Counter("springtide_gateway_rate_limited_total", "API requests over their key's or tenant's limit, by its kind.", ["kind"])
IN_FLIGHT = Gauge("springtide_gateway_requests_in_flight", "API requests being answered.", ["route"])
DISCONNECTS = Counter("springtide_gateway_client_disconnects_total", "API requests whose client went away first.", ["route"])
TTFT_SECONDS = Histogram("springtide_gateway_ttft_seconds", "From a generation's arrival to its first token.", buckets=LATENCY_BUCKETS_S)
TBT_SECONDS = Histogram("springtide_gateway_tbt_seconds", "Between two tokens of a generation.", buckets=LATENCY_BUCKETS_S)
E2E_SECONDS = Histogram(
    "springtide_gateway_e2e_seconds",
    "From a generation's arrival to its end, of those that finished.",
    buckets=(*LATENCY_BUCKETS_S, 120, 300, 600, 1800),
)
PROMPT_TOKENS = Counter("springtide_gateway_prompt_tokens_total", "Prompt tokens of the generations that finished.")
OUTPUT_TOKENS = Counter("springtide_gateway_output_tokens_total", "Output tokens sent on.")
CACHED_TOKENS = Counter(
    "springtide_gateway_cached_tokens_total", "Of the prompt tokens, those found in the pool by a generation's first attempt."
)
MARK_MISSES = Counter("springtide_gateway_mark_misses_total", "Prompts of whose marked tokens some were not found, by why.", ["reason"])
RESCHEDULES = Counter("springtide_gateway_reschedules_total", "Attempts beyond a generation's first.")
FAILED_ATTEMPTS = Counter(
    "springtide_gateway_failed_attempts_total", "Attempts that failed, by instance at fault (empty: unknown).", ["instance_id"]
)
CROWDED_OUT = Counter("springtide_gateway_crowded_out_attempts_total", "Attempts for which there was no room; their requests wait.")
MOVES = Counter("springtide_gateway_moves_total", "Running requests that were to go on elsewhere: moved, or given_up.", ["outcome"])
MOVED_BEHIND = Histogram(
    "springtide_gateway_moved_behind_tokens",
    "Tokens that had been sent, and that it had yet to come to, when a successor took the place of an attempt.",
    buckets=(0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64),
)
LOST_REPORTS = Counter(
    "springtide_gateway_lost_reports_total", "Reports on attempts that a Conductor never got; renewals made up for them."
)
STALE_ANSWERS = Counter("springtide_gateway_stale_leader_answers_total", "Answers of deposed Conductors, all refused.")
TRACES = Counter("springtide_gateway_traces_total", "Traces of requests that have ended, by why they were kept, or left_out.", ["decision"])
DROPPED_TRACES = Counter(
    "springtide_gateway_dropped_traces_total", "Traces that were kept and not sent: the queue was full, or the collector away."
)
SENT_SPANS = Counter("springtide_gateway_sent_spans_total", "Spans that the collector of traces has taken.")
TERMINALS = Counter("springtide_gateway_generations_total", "Generations ended, by how.", ["outcome"])
FAILURES = Counter("springtide_gateway_failures_total", "Generations that failed, by the code of the error that clients get.", ["code"])
SLO_GENERATIONS = Counter(
    "springtide_gateway_slo_generations_total",
    "Generations ended, by tenant and by whether they met an objective: ttft, tbt; goodput: finished within both. Those in idle capacity, "
    "and those that failed or ended by their client's doing, do not count.",
    ["tenant", "objective", "result"],
)
OBJECTIVE_SECONDS = Gauge(
    "springtide_gateway_slo_objective_seconds", "The objective, as configured, that the generations are held to: ttft, tbt.", ["objective"]
)
TENANT_TOKENS = Counter(
    "springtide_gateway_tenant_tokens_total",
    "Tokens of the generations that finished, by tenant: prompt; cached, which of these were found in the pool; output.",
    ["tenant", "kind"],
)
CONTEXT_CACHES = Gauge("springtide_gateway_context_caches", "Context caches that this gateway last looked after, by status.", ["status"])
CONTEXT_CACHE_TOKENS = Gauge("springtide_gateway_context_cache_tokens", "Tokens of these.", ["status"])

_MOST_OF_AN_ID = 64
"""OpenMetrics allows an exemplar's labels 128 characters, names included."""

_instances, _tenants = NamedSeries(256), NamedSeries(256)


def exemplar(request_id: str, traceparent: str) -> dict[str, str]:
    """By what logs and traces find a generation: its request's id and, where there is one, the trace's."""
    labels = {"request_id": request_id[:_MOST_OF_AN_ID]}
    if (context := parsed(traceparent)) is not None:
        labels["trace_id"] = context.trace_id
    return labels


def count_failed_attempt(instance_id: str) -> None:
    """Counts it. Each instance that starts anew may have another name."""
    _instances.counter(FAILED_ATTEMPTS, instance_id).inc()


def show_objectives(objectives: Objectives) -> None:
    OBJECTIVE_SECONDS.labels("ttft").set(objectives.ttft_s)
    OBJECTIVE_SECONDS.labels("tbt").set(objectives.tbt_s)


def count_objectives(
    tenant: str, seen: Latencies, waited_s: float, reply: ev.Finished | ev.Failed | ev.Cancelled, objectives: Objectives
) -> None:
    """Counts a generation that has ended `waited_s` after its arrival. Whether it had its first token in time is known without that token
    once the objective has passed, and a client that has left by then counts as one that was not served."""
    late, halting = objectives.late(seen, waited_s), objectives.halting(seen)
    if seen.ttft_s is not None or late:
        _count(tenant, "ttft", not late)
    if seen.longest_gap_s is not None:
        _count(tenant, "tbt", not halting)
    match reply:
        case ev.Finished():
            _count(tenant, "goodput", not (late or halting))
        case ev.Failed(error) if error.http_status >= 500 or isinstance(error, Overloaded):
            _count(tenant, "goodput", False)
        case ev.Cancelled() if late or halting:
            _count(tenant, "goodput", False)


def _count(tenant: str, objective: str, met: bool) -> None:
    _tenants.counter(SLO_GENERATIONS, tenant, objective, "met" if met else "missed").inc()


def count_tokens(tenant: str, prompt: int, cached: int, output: int) -> None:
    """Counts those of a generation that has finished."""
    PROMPT_TOKENS.inc(prompt)
    CACHED_TOKENS.inc(cached)
    for kind, tokens in (("prompt", prompt), ("cached", cached), ("output", output)):
        _tenants.counter(TENANT_TOKENS, tenant, kind).inc(tokens)
