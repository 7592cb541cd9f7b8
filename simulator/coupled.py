"""The other architecture, to compare with: every instance does both prefill and decode, in one batch (continuous batching with chunked
prefill, as vLLM and Sarathi-Serve do), and keeps a prefix cache of its own in the memory beside its weights.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from kvstore.core.eviction import new_policy
from kvstore.core.pool import Pool
from simulator.cluster.keys import prompt_keys
from simulator.cluster.loop import Loop, Timer
from simulator.cluster.records import Records
from simulator.hardware import Hardware
from simulator.workload import SimRequest, Workload
from springtide.blocks import blocks_for
from springtide.choices import EvictionName, RoutingName
from springtide.errors import PoolFull
from springtide.ids import AttemptId, BlockKey

DECODING_TOKENS = 64
"""What a sequence that decodes counts among the tokens to prefill, for who routes by load."""


@dataclass(frozen=True, slots=True)
class CoupledOptions:
    hardware: Hardware
    instances: int
    block_tokens: int
    batch_tokens: int = 2048
    """New tokens in one iteration, those of decode included: what is left over from decode, prefill may use."""
    cache_tokens: int | None = None
    """Of KV on one instance; None: what fits beside the weights."""
    eviction: EvictionName = "lru"
    """What a full cache gives up: vLLM's, or one of the pool's others."""
    routing: RoutingName = "cache-aware"
    """Who serves a request: the one with the least to do before and with it, what it has of the prefix or is about to compute of it
    counted, as with routers that know the caches (Dynamo's KV router, llm-d, SGLang's); or just the one with the least to do."""


@dataclass(slots=True)
class _Sequence:
    index: int
    request: SimRequest
    attempt_id: AttemptId
    expected_tokens: int
    """To prefill, by what was cached or under way when it came."""
    computed: int = 0
    """Tokens of the prompt."""
    generated: int = 0
    cached: int = 0

    @property
    def context(self) -> int:
        return self.request.input_tokens + self.generated


class _Instance:
    """First come, first served; the cache is a pool of kvstore/. A sequence is let in when its whole length fits, so that none has to be
    preempted."""

    def __init__(self, options: CoupledOptions, loop: Loop, records: Records) -> None:
        self._options, self._loop, self._records = options, loop, records
        tokens = options.cache_tokens or options.hardware.device_tokens
        slots = max(1, tokens // options.block_tokens)
        self._pool = Pool([0] * slots, 1, policy=new_policy(options.eviction, slots))
        self._waiting: deque[_Sequence] = deque()
        self._prefilling: list[_Sequence] = []
        self._decoding: list[_Sequence] = []
        self._to_prefill = 0
        """Tokens of those that wait or are prefilled."""
        self._coming: Counter[BlockKey] = Counter()
        """Blocks of their prompts."""
        self._iteration: Timer | None = None
        self._steps: tuple[float, int] | None = None
        """Of an iteration that is decode alone, and may be many: when it began, and how many they are."""

    @property
    def work(self) -> int:
        """In tokens to prefill."""
        return self._to_prefill + DECODING_TOKENS * len(self._decoding)

    def missing_tokens(self, request: SimRequest) -> int:
        """Tokens of its prompt that are neither cached here nor will be by its turn."""
        block_tokens = self._options.block_tokens
        keys = prompt_keys(request, 0, (request.input_tokens - 1) // block_tokens, block_tokens)
        known = self._pool.num_held(keys)
        while known < len(keys) and keys[known] in self._coming:
            known += 1
        return request.input_tokens - block_tokens * known

    def arrive(self, sequence: _Sequence) -> None:
        if self._blocks_of(sequence.request) > self._pool.num_slots:
            self._records.reject(sequence.index, "too_large")
            return
        self._waiting.append(sequence)
        self._to_prefill += sequence.expected_tokens
        self._coming.update(self._keys_of(sequence.request))
        if self._steps is not None:
            self._cut()
        self._next()

    def _blocks_of(self, request: SimRequest) -> int:
        return blocks_for(request.input_tokens + request.output_tokens, self._options.block_tokens)

    def _keys_of(self, request: SimRequest) -> tuple[BlockKey, ...]:
        """Of its prompt."""
        return prompt_keys(request, 0, request.input_tokens // self._options.block_tokens, self._options.block_tokens)

    def _next(self) -> None:
        if self._iteration is not None:
            return
        hardware, now = self._options.hardware, self._loop.now
        batch, context = len(self._decoding), sum(sequence.context for sequence in self._decoding)
        rows = self._chunks(max(1, self._options.batch_tokens - batch))
        if not rows and not batch:
            return
        if not rows:
            count = min(sequence.request.output_tokens - sequence.generated for sequence in self._decoding)
            self._steps = (now, count)
            self._iteration = self._loop.at(now + hardware.steps_ms(batch, context, count) / 1000, self._stepped)
            return
        mixed_ms = hardware.mixed_ms([(tokens, sequence.computed) for sequence, tokens in rows], batch, context)
        self._iteration = self._loop.at(now + mixed_ms / 1000, lambda: self._mixed(rows))

    def _chunks(self, budget: int) -> list[tuple[_Sequence, int]]:
        """The prompts' part of an iteration. Who waits is let in only when it is to be computed: what is cached by then, it finds."""
        rows: list[tuple[_Sequence, int]] = []
        while budget and (len(rows) < len(self._prefilling) or self._admit()):
            sequence = self._prefilling[len(rows)]
            tokens = min(sequence.request.input_tokens - sequence.computed, budget)
            rows.append((sequence, tokens))
            budget -= tokens
        return rows

    def _admit(self) -> bool:
        """Whether the next one is in."""
        if not self._waiting or len(self._prefilling) + len(self._decoding) >= self._options.hardware.max_batch:
            return False
        block_tokens, sequence = self._options.block_tokens, self._waiting[0]
        request = sequence.request
        most_cached = (request.input_tokens - 1) // block_tokens
        try:
            acquired = self._pool.acquire(sequence.attempt_id, self._keys_of(request), self._blocks_of(request), most_cached)
        except PoolFull:
            return False
        self._prefilling.append(self._waiting.popleft())
        sequence.computed = sequence.cached = acquired.local_blocks * block_tokens
        self._to_prefill += request.input_tokens - sequence.computed - sequence.expected_tokens
        return True

    def _cut(self) -> None:
        """The step in flight is the last of those that were to come."""
        assert self._steps is not None and self._iteration is not None
        hardware, (began, count) = self._options.hardware, self._steps
        batch, context = len(self._decoding), sum(sequence.context for sequence in self._decoding)
        count = hardware.steps_begun(batch, context, count, 1000 * (self._loop.now - began))
        self._iteration.cancel()
        self._steps = (began, count)
        self._iteration = self._loop.at(began + hardware.steps_ms(batch, context, count) / 1000, self._stepped)

    def _stepped(self) -> None:
        assert self._steps is not None
        began, count = self._steps
        self._steps = self._iteration = None
        self._generated(self._decoding, count, (self._loop.now - began) / count)
        self._next()

    def _mixed(self, rows: list[tuple[_Sequence, int]]) -> None:
        self._iteration = None
        decoding = list(self._decoding)
        block_tokens = self._options.block_tokens
        for sequence, tokens in rows:
            before = sequence.computed // block_tokens
            sequence.computed += tokens
            self._to_prefill -= tokens
            full = sequence.computed // block_tokens
            if full > before:
                self._pool.commit(sequence.attempt_id, before, prompt_keys(sequence.request, before, full, block_tokens))
            if sequence.computed == sequence.request.input_tokens:
                self._prefilling.remove(sequence)
                self._came(sequence.request)
                self._decoding.append(sequence)
                decoding.append(sequence)
        self._generated(decoding, 1)
        self._next()

    def _came(self, request: SimRequest) -> None:
        for key in self._keys_of(request):
            self._coming[key] -= 1
            if not self._coming[key]:
                del self._coming[key]

    def _generated(self, sequences: list[_Sequence], count: int, step_s: float = 0.0) -> None:
        for sequence in list(sequences):
            sequence.generated += count
            self._records.tokens(sequence.index, count, self._loop.now, step_s)
            if sequence.generated >= sequence.request.output_tokens:
                self._decoding.remove(sequence)
                self._keep_output(sequence)
                self._pool.release(sequence.attempt_id)
                self._records.finish(sequence.index, self._loop.now, sequence.cached)

    def _keep_output(self, sequence: _Sequence) -> None:
        """A next turn finds it."""
        request, block_tokens = sequence.request, self._options.block_tokens
        full = request.input_tokens // block_tokens
        end = full + len(request.output_blocks)
        if end > full:
            self._pool.commit(sequence.attempt_id, full, prompt_keys(request, full, end, block_tokens))


def run_coupled(workload: Workload, options: CoupledOptions) -> Records:
    """Runs until every request has ended."""
    loop = Loop()
    records = Records(workload.requests, loop.stop)
    instances = [_Instance(options, loop, records) for _ in range(options.instances)]

    def arrive(index: int) -> None:
        if index + 1 < len(workload.requests):
            loop.at(workload.requests[index + 1].arrival_s, lambda: arrive(index + 1))
        request = workload.requests[index]
        missing = [instance.missing_tokens(request) for instance in instances]
        cost = missing if options.routing == "cache-aware" else [0] * len(instances)
        chosen = min(range(len(instances)), key=lambda place: instances[place].work + cost[place])
        instances[chosen].arrive(_Sequence(index, request, AttemptId(str(index)), missing[chosen]))

    if workload.requests:
        loop.at(workload.requests[0].arrival_s, lambda: arrive(0))
        loop.run()
    return records
