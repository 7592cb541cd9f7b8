"""What a prefill group tells Prometheus."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from springtide.telemetry import LATENCY_BUCKETS_S

RUNNING = Gauge("springtide_prefill_attempts_running", "Attempts that hold slots and have prompt left to compute")
IDLE = Gauge("springtide_prefill_attempts_idle", "Attempts in idle capacity, which are not among the others")
IDLE_SLOWDOWN = Gauge(
    "springtide_prefill_idle_slowdown_ratio",
    "By how much idle work of the machine's other engines was found to lengthen this one's, last (0.2: a fifth)",
)
WAITING = Gauge("springtide_prefill_attempts_waiting", "Attempts that wait for slots, or for what another one computes")
QUEUED_TOKENS = Gauge("springtide_prefill_queued_tokens", "Prompt tokens still to compute of the attempts that run or wait")
QUEUE_SECONDS = Gauge("springtide_prefill_queue_seconds", "Predicted time until everything accepted is computed")
PASS_SECONDS = Histogram("springtide_prefill_pass_seconds", "Time of one pass over the model", buckets=LATENCY_BUCKETS_S)
PASS_TOKENS = Histogram("springtide_prefill_pass_tokens", "Tokens of one pass", buckets=(1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192))
CHUNKS = Counter("springtide_prefill_chunks_total", "Chunks computed")
TOKENS = Counter("springtide_prefill_tokens_total", "Prompt tokens computed")
CACHED_TOKENS = Counter(
    "springtide_prefill_cached_tokens_total",
    "Prompt tokens reused from the pool: in the node's DRAM (local), or brought there from its SSD and other nodes (fetched)",
    ["source"],
)
QUEUE_WAIT_SECONDS = Histogram(
    "springtide_prefill_queue_wait_seconds", "From the start of an attempt to its first pass", buckets=LATENCY_BUCKETS_S
)
HAND_OVER_BYTES = Counter("springtide_prefill_hand_over_bytes_total", "Bytes written to decode nodes for attempts that were handed over")
HAND_OVER_TAIL_SECONDS = Histogram(
    "springtide_prefill_hand_over_tail_seconds",
    "From the first token until the decode node has the whole prompt",
    buckets=LATENCY_BUCKETS_S,
)
TRANSFER_SECONDS = Counter(
    "springtide_prefill_transfer_seconds_total",
    "Fetches of prefixes, from the order to the last layer, and writes of hand-overs: hidden behind computing, or waited for",
    ["transfer", "part"],
)
STAGE_BUSY_SECONDS = Counter(
    "springtide_prefill_stage_busy_seconds_total", "Processor time of the thread that runs a stage's layers", ["stage"]
)
FAILURES = Counter("springtide_prefill_failures_total", "Attempts that failed here", ["code"])
