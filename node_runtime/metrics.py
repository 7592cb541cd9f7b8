"""What an engine tells Prometheus under the names that vLLM gives it (0.32, `vllm/v1/metrics/loggers.py`), so that what routes to vLLM,
scales it or shows it can take an engine for one. What each means where prompt and output are computed on two nodes: docs/metrics.md."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from springtide.clock import Clock
from springtide.ids import AttemptId
from springtide.metrics import PlainHistogram
from springtide.modelinfo import KVSpec
from springtide.protocol.instances import Load, Role
from springtide.protocol.outputs import FailureCode, Finish, PrefillDone, TokenOutput
from springtide.protocol.starts import Request

_TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_ITL_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LATENCY_BUCKETS_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS_BUCKETS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
_LABELS = ("model_name", "engine")
_ENGINE = "0"
"""vLLM numbers the engines of a server; here each has a process, and a page, of its own."""


class InterTokenLatency(Collector):
    """The histogram that is told of every token. In plain numbers, made into samples when somebody asks: a third of the time."""

    def __init__(self) -> None:
        self._plain = PlainHistogram(tuple(map(float, _ITL_BUCKETS_S)))
        self.model_name: str | None = None
        """None: it has no series yet."""
        REGISTRY.register(self)

    def observe(self, seconds: float, times: int) -> None:
        self._plain.observe(seconds, times)

    def describe(self) -> Iterator[HistogramMetricFamily]:
        yield HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Between two tokens of a request, of those that this engine sampled", labels=_LABELS
        )

    def collect(self) -> Iterator[HistogramMetricFamily]:
        (family,) = self.describe()
        if self.model_name is not None:
            self._plain.add_to(family, (self.model_name, _ENGINE))
        yield family


RUNNING = Gauge("vllm:num_requests_running", "Requests that are being computed", _LABELS)
WAITING = Gauge("vllm:num_requests_waiting", "Requests that wait to be: for slots, their turn or, at a decode node, their prompt", _LABELS)
KV_CACHE_USAGE = Gauge(
    "vllm:kv_cache_usage_perc", "Share of the slots of the node's arena that nobody else could have, 1 being all", _LABELS
)
CACHE_CONFIG = Gauge(
    "vllm:cache_config_info",
    "1; its labels say how large a block is and how many slots there are",
    ["block_size", "cache_dtype", "enable_prefix_caching", "engine", "num_gpu_blocks"],
)
PROMPT_TOKENS = Counter("vllm:prompt_tokens_total", "Tokens of the prompts that this engine ended, computed or found", _LABELS)
PROMPT_TOKENS_BY_SOURCE = Counter(
    "vllm:prompt_tokens_by_source_total",
    "The same by where they come from: local_compute, local_cache_hit, external_kv_transfer",
    [*_LABELS, "source"],
)
PROMPT_TOKENS_CACHED = Counter("vllm:prompt_tokens_cached_total", "Of them, those that were found in the pool", _LABELS)
GENERATION_TOKENS = Counter("vllm:generation_tokens_total", "Output tokens that this engine sampled", _LABELS)
DRAFTS = Counter("vllm:spec_decode_num_drafts_total", "Guesses of what comes next in an output, of a token or several", _LABELS)
DRAFT_TOKENS = Counter("vllm:spec_decode_num_draft_tokens_total", "Their tokens", _LABELS)
ACCEPTED_TOKENS = Counter("vllm:spec_decode_num_accepted_tokens_total", "Of them, those that came next", _LABELS)
PREFIX_CACHE_QUERIES = Counter("vllm:prefix_cache_queries_total", "Prompt tokens that were looked for in the node's arena", _LABELS)
PREFIX_CACHE_HITS = Counter("vllm:prefix_cache_hits_total", "Of them, those that were found", _LABELS)
EXTERNAL_QUERIES = Counter(
    "vllm:external_prefix_cache_queries_total", "Prompt tokens that were not there, and looked for on the SSD and at other nodes", _LABELS
)
EXTERNAL_HITS = Counter("vllm:external_prefix_cache_hits_total", "Of them, those that came from there", _LABELS)
PREEMPTIONS = Counter("vllm:num_preemptions_total", "Requests that gave up their slots to others", _LABELS)
SUCCESSES = Counter(
    "vllm:request_success_total", "Requests that ended here, by how: stop, length, abort, error", [*_LABELS, "finished_reason"]
)
TTFT_SECONDS = Histogram(
    "vllm:time_to_first_token_seconds",
    "From a request's arrival at its gateway to its first token, which this engine sampled",
    _LABELS,
    buckets=_TTFT_BUCKETS_S,
)
ITL_SECONDS = InterTokenLatency()
TPOT_SECONDS = Histogram(
    "vllm:request_time_per_output_token_seconds",
    "Mean time between the tokens of a request that ended here",
    _LABELS,
    buckets=_ITL_BUCKETS_S,
)
E2E_SECONDS = Histogram(
    "vllm:e2e_request_latency_seconds",
    "From a request's arrival at its gateway to its last token, where it ended",
    _LABELS,
    buckets=_LATENCY_BUCKETS_S,
)
QUEUE_SECONDS = Histogram(
    "vllm:request_queue_time_seconds", "From a request's start at this engine to its first pass", _LABELS, buckets=_LATENCY_BUCKETS_S
)
PREFILL_SECONDS = Histogram(
    "vllm:request_prefill_time_seconds", "Of the passes over a request's prompt", _LABELS, buckets=_LATENCY_BUCKETS_S
)
DECODE_SECONDS = Histogram(
    "vllm:request_decode_time_seconds", "From a request's first token at this engine to its last", _LABELS, buckets=_LATENCY_BUCKETS_S
)
REQUEST_PROMPT_TOKENS = Histogram(
    "vllm:request_prompt_tokens", "Prompt tokens of a request, where it ended", _LABELS, buckets=_TOKENS_BUCKETS
)
REQUEST_GENERATION_TOKENS = Histogram(
    "vllm:request_generation_tokens", "Output tokens of a request, where it ended", _LABELS, buckets=_TOKENS_BUCKETS
)
_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length"}
_ERRORS = (FailureCode.INTERNAL, FailureCode.PEER_LOST)
"""Other failures are answers to where the request is to run, and it runs elsewhere."""


@dataclass(slots=True)
class _Running:
    """An attempt that this engine works for. Times are the engine's clock's."""

    arrived_at: float
    """At its gateway."""
    num_tokens: int
    num_prompt_tokens: int
    continues: bool
    ends_here: bool
    first_token_at: float = 0.0
    """Here; 0: there is none yet."""
    last_token_at: float = 0.0
    num_output_tokens: int = 0
    """Sampled here."""


class VllmMetrics:
    """What one engine tells. Used from its event loop."""

    def __init__(self, model_name: str, role: Role, clock: Clock) -> None:
        labels = (model_name, _ENGINE)
        self._clock = clock
        self._role = role
        self._running: dict[AttemptId, _Running] = {}
        self._num_running = RUNNING.labels(*labels)
        self._num_waiting = WAITING.labels(*labels)
        self._usage = KV_CACHE_USAGE.labels(*labels)
        self._prompt_tokens = PROMPT_TOKENS.labels(*labels)
        self._sources = [
            PROMPT_TOKENS_BY_SOURCE.labels(*labels, source) for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
        ]
        self._cached_tokens = PROMPT_TOKENS_CACHED.labels(*labels)
        self._generation_tokens = GENERATION_TOKENS.labels(*labels)
        self._drafts = DRAFTS.labels(*labels), DRAFT_TOKENS.labels(*labels), ACCEPTED_TOKENS.labels(*labels)
        self._queries, self._hits = PREFIX_CACHE_QUERIES.labels(*labels), PREFIX_CACHE_HITS.labels(*labels)
        self._external_queries, self._external_hits = EXTERNAL_QUERIES.labels(*labels), EXTERNAL_HITS.labels(*labels)
        self._preemptions = PREEMPTIONS.labels(*labels)
        self._ended = {reason: SUCCESSES.labels(*labels, reason) for reason in ("stop", "length", "abort", "error", "repetition")}
        self._ttft, self._tpot, self._e2e = TTFT_SECONDS.labels(*labels), TPOT_SECONDS.labels(*labels), E2E_SECONDS.labels(*labels)
        self._queue, self._prefill = QUEUE_SECONDS.labels(*labels), PREFILL_SECONDS.labels(*labels)
        self._decode = DECODE_SECONDS.labels(*labels)
        self._lengths = REQUEST_PROMPT_TOKENS.labels(*labels), REQUEST_GENERATION_TOKENS.labels(*labels)
        ITL_SECONDS.model_name = model_name

    def connected(self, num_slots: int, spec: KVSpec) -> None:
        """The engine is connected to a store of so many slots."""
        CACHE_CONFIG.clear()
        CACHE_CONFIG.labels(str(spec.block_tokens), spec.dtype, "True", _ENGINE, str(num_slots)).set(1)

    def started(self, request: Request, role: Role | None = None) -> None:
        """`role`: in which the engine was asked; None: in its own."""
        arrived_at, ends_here = self._clock.now() - request.age_s, (role or self._role) is Role.DECODE
        running = _Running(arrived_at, request.num_tokens, request.num_prompt_tokens, request.continues, ends_here)
        self._running[request.attempt_id] = running

    def prefilled(self, done: PrefillDone) -> None:
        """The prompt's passes are over, and its next token is sampled."""
        self._queue.observe(done.queue_ms / 1000)
        self._prefill.observe(done.compute_ms / 1000)
        running = self._running.get(done.output.attempt_id)
        if running is None:
            return
        if not running.continues:
            self._ttft.observe(self._clock.now() - running.arrived_at)
        local = done.cached_tokens - done.remote_tokens
        self._prompt_tokens.inc(running.num_tokens)
        for source, tokens in zip(self._sources, (running.num_tokens - done.cached_tokens, local, done.remote_tokens), strict=True):
            source.inc(tokens)
        self._cached_tokens.inc(done.cached_tokens)
        self._queries.inc(running.num_tokens)
        self._hits.inc(local)
        self._external_queries.inc(running.num_tokens - local)
        self._external_hits.inc(done.remote_tokens)
        self.sampled((done.output,))

    def sampled(self, outputs: Collection[TokenOutput]) -> None:
        """These tokens of attempts were, one step's."""
        now, count = self._clock.now(), 0
        for output in outputs:
            tokens = len(output.tokens)
            count += tokens
            running = self._running.get(output.attempt_id)
            if running is None:
                continue
            if tokens:
                if running.last_token_at:
                    ITL_SECONDS.observe((now - running.last_token_at) / tokens, tokens)
                else:
                    running.first_token_at = now
                running.last_token_at = now
                running.num_output_tokens += tokens
            if output.finish is not None:
                self._finished(output, running, now)
        self._generation_tokens.inc(count)

    def drafted(self, drafted: Collection[int], accepted: Collection[int]) -> None:
        """So many tokens were guessed of each of a step's sequences, so many of them were right."""
        drafts, tokens, right = self._drafts
        drafts.inc(sum(count > 0 for count in drafted))
        tokens.inc(sum(drafted))
        right.inc(sum(count for count, guessed in zip(accepted, drafted, strict=True) if guessed))

    def _finished(self, output: TokenOutput, running: _Running, now: float) -> None:
        assert output.finish is not None
        del self._running[output.attempt_id]
        self._ended[_REASONS[output.finish]].inc()
        self._e2e.observe(now - running.arrived_at)
        if running.first_token_at:
            self._decode.observe(running.last_token_at - running.first_token_at)
        if running.num_output_tokens > 1:
            self._tpot.observe((running.last_token_at - running.first_token_at) / (running.num_output_tokens - 1))
        of_prompt, of_output = self._lengths
        of_prompt.observe(running.num_prompt_tokens)
        of_output.observe(output.end)

    def failed(self, attempt_id: AttemptId, code: FailureCode) -> None:
        self._running.pop(attempt_id, None)
        if code is FailureCode.PREEMPTED:
            self._preemptions.inc()
        elif code in _ERRORS:
            self._ended["error"].inc()

    def doing(self, load: Load, num_held: int) -> None:
        """How the engine is doing; so many are held back until their grammars are compiled."""
        self._num_running.set(load.running)
        self._num_waiting.set(load.waiting + num_held)
        self._usage.set(1 - load.slots_available / load.slots_total if load.slots_total else 0.0)
        for attempt_id in self._running.keys() - load.attempt_ids:
            gone = self._running.pop(attempt_id)
            if gone.num_output_tokens and gone.ends_here:
                self._ended["abort"].inc()
