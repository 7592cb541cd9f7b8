"""What a decode node tells Prometheus."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

RUNNING = Gauge("springtide_decode_attempts_running", "Sequences whose prompt is here")
IDLE = Gauge("springtide_decode_attempts_idle", "Sequences in idle capacity, which are not among the running ones")
IDLE_SLOWDOWN = Gauge(
    "springtide_decode_idle_slowdown_ratio",
    "By how much idle work of the machine's other engines was found to lengthen this one's, last (0.2: a fifth)",
)
WAITING = Gauge("springtide_decode_attempts_waiting", "Attempts that wait for slots or for their prompt")
CONTEXT_TOKENS = Gauge("springtide_decode_context_tokens", "Tokens of context of the running sequences")
BATCH_SIZE = Histogram("springtide_decode_batch_size", "Sequences in one step", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512))
STEP_SECONDS = Histogram(
    "springtide_decode_step_seconds",
    "Time of one step",
    buckets=(0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5),
)
TOKENS = Counter("springtide_decode_tokens_total", "Tokens generated, without the first ones")
FORETOLD = Counter(
    "springtide_decode_foretold_tokens_total", "Tokens of sequences that moved here, which came several in a step, for they were foretold"
)
INLINED = Counter("springtide_decode_inlined_prompts_total", "Prompts that were computed here and not by a prefill group")
INLINED_TOKENS = Counter("springtide_decode_inlined_tokens_total", "Tokens of prompts computed here")
PREEMPTIONS = Counter(
    "springtide_decode_preemptions_total", "Sequences that gave their slots to an older one or, in idle capacity, to any other"
)
ADMISSION_REJECTIONS = Counter(
    "springtide_decode_admission_rejections_total", "Attempts refused by the admission check because the step would miss its objective"
)
FAILURES = Counter("springtide_decode_failures_total", "Attempts that failed here", ["code"])
