"""What people are shown of what has been: the latest decisions with what came of them, and the last hour in buckets. In bounded memory, at
some microseconds a decision; no decision rests on it."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from itertools import chain, islice, takewhile

from conductor.core.explanation import LeadingEstimates
from conductor.core.state import PlacedAttempt
from conductor.core.types.decision import Alternatives, Decision, Placement
from conductor.core.types.events import Decided
from springtide.ids import AttemptId
from springtide.protocol.attempts import Phase, Progress
from springtide.protocol.observation import BUCKET_S, MOST_BUCKETS, ExplainedDecision, Explanation, ObservedDecision, TimeBucket
from springtide.protocol.scheduling import Reason, Rejection, Schedule
from springtide.slices import at_once

MOST_PLACED, MOST_REFUSED = 1024, 256
MOST_EXPLAINED_PER_S = 100
"""The estimates of so many decisions are kept: to pick them out takes some 50 us at a thousand instances."""
_MOST_WAITING = 32
"""Decisions whose estimates are still to be picked out, some 100 KiB each at a thousand instances."""

_LEAST_MS, _BINS_AN_E = 0.1, 12
_BINS = 200
"""Each some 8% wide; the last begins at half an hour."""


class Latencies:
    """A histogram of milliseconds, from which quantiles are told within 4%."""

    __slots__ = ("_counts", "count")

    def __init__(self) -> None:
        self._counts = [0] * _BINS
        self.count = 0

    def add(self, ms: float) -> None:
        place = int(math.log(ms / _LEAST_MS) * _BINS_AN_E) if ms > _LEAST_MS else 0
        self._counts[min(place, _BINS - 1)] += 1
        self.count += 1

    def quantiles(self, *shares: float) -> list[float]:
        """0 where there is nothing."""
        found: list[float] = []
        below, place = 0, -1
        for share in shares:
            while below < max(1, math.ceil(share * self.count)) and place + 1 < _BINS:
                place += 1
                below += self._counts[place]
            found.append(_LEAST_MS * math.exp((place + 0.5) / _BINS_AN_E) if self.count else 0.0)
        return found


@dataclass(slots=True)
class _Bucket:
    number: int
    placed: int = 0
    refused: int = 0
    finished: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    in_time: int = 0
    ttft: Latencies = field(default_factory=Latencies)
    tbt: Latencies = field(default_factory=Latencies)
    prefill_load: float = 0.0
    decode_load: float = 0.0
    attempts: int = 0

    def told(self) -> TimeBucket:
        ttft_p50_ms, ttft_p90_ms, ttft_p99_ms = self.ttft.quantiles(0.5, 0.9, 0.99)
        tbt_p50_ms, tbt_p90_ms, tbt_p99_ms = self.tbt.quantiles(0.5, 0.9, 0.99)
        return TimeBucket(
            number=self.number,
            placed=self.placed,
            refused=self.refused,
            finished=self.finished,
            failed=self.failed,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            first_tokens=self.ttft.count,
            in_time=self.in_time,
            ttft_p50_ms=ttft_p50_ms,
            ttft_p90_ms=ttft_p90_ms,
            ttft_p99_ms=ttft_p99_ms,
            tbt_p50_ms=tbt_p50_ms,
            tbt_p90_ms=tbt_p90_ms,
            tbt_p99_ms=tbt_p99_ms,
            prefill_load=self.prefill_load,
            decode_load=self.decode_load,
            attempts=self.attempts,
        )


class LastHour:
    """Rates, latencies and loads of the last hour. Those that are over are told once and for all."""

    def __init__(self, ttft_slo_ms: float) -> None:
        self._ttft_slo_ms = ttft_slo_ms
        self._over: deque[TimeBucket] = deque(maxlen=MOST_BUCKETS - 1)
        self._now: _Bucket | None = None

    def at(self, now: float) -> _Bucket:
        """The one to count in."""
        number = int(now // BUCKET_S)
        if self._now is None or self._now.number != number:
            if self._now is not None:
                self._over.append(self._now.told())
            last = self._now
            self._now = _Bucket(number)
            if last is not None:
                self._now.prefill_load, self._now.decode_load, self._now.attempts = last.prefill_load, last.decode_load, last.attempts
        return self._now

    def first_token(self, ttft_ms: float, now: float) -> None:
        bucket = self.at(now)
        bucket.ttft.add(ttft_ms)
        bucket.in_time += ttft_ms <= self._ttft_slo_ms

    def since(self, number: int, now: float) -> list[TimeBucket]:
        """That bucket and the later ones, of which the last is not over."""
        current = self.at(now).told()
        later = list(takewhile(lambda bucket: bucket.number >= number, reversed(self._over)))
        return [*reversed(later), current]


@dataclass(slots=True)
class _Remembered:
    told: ObservedDecision
    ttft_slo_ms: float
    tbt_slo_ms: float
    policy: str
    admission: str
    num_prefills: int
    num_decodes: int
    estimates: LeadingEstimates | None = None
    version: int = 0
    """Of the history, when it last changed."""


class _Latest:
    """The latest of one kind, by when they last changed."""

    def __init__(self, most: int) -> None:
        self.entries: OrderedDict[AttemptId, _Remembered] = OrderedDict()
        self._most = most

    def put(self, attempt_id: AttemptId, entry: _Remembered) -> None:
        self.entries[attempt_id] = entry
        self.entries.move_to_end(attempt_id)
        if len(self.entries) > self._most:
            self.entries.popitem(last=False)

    def changed_since(self, version: int, at_most: int) -> list[ObservedDecision]:
        """The latest first."""
        newer = takewhile(lambda entry: entry.version > version, reversed(self.entries.values()))
        return [entry.told for entry in islice(newer, at_most)]

    def validate(self) -> None:
        assert len(self.entries) <= self._most
        versions = [entry.version for entry in self.entries.values()]
        assert versions == sorted(set(versions))


class History:
    """All of it. Fed with what the core is told and has decided."""

    def __init__(self, ttft_slo_ms: float, now: float) -> None:
        self.hour = LastHour(ttft_slo_ms)
        self.version = 0
        """Counts what changed of the decisions."""
        self._placed, self._refused = _Latest(MOST_PLACED), _Latest(MOST_REFUSED)
        self._to_explain: deque[tuple[Alternatives, Decision]] = deque(maxlen=_MOST_WAITING)
        self._explained = 0
        self._explained_since = now

    def decided(self, request: Schedule, decided: Decided, now: float) -> None:
        """Those that are content to wait for idle capacity and found none are no news."""
        decision, alternatives = decided.decision, decided.alternatives
        if isinstance(decision, Rejection) and decision.reason is Reason.NOT_IDLE:
            return
        bucket = self.hour.at(now)
        if isinstance(decision, Rejection):
            bucket.refused += 1
        else:
            bucket.placed += 1
        remembered = _Remembered(
            _told(request, decided, now),
            alternatives.ttft_slo_ms,
            alternatives.tbt_slo_ms,
            alternatives.policy,
            alternatives.admission,
            len(alternatives.prefills),
            len(alternatives.decodes),
        )
        self._put(self._refused if isinstance(decision, Rejection) else self._placed, request.attempt_id, remembered)
        if now - self._explained_since >= 1.0:
            self._explained, self._explained_since = 0, now
        if self._explained < MOST_EXPLAINED_PER_S:
            self._explained += 1
            self._to_explain.append((alternatives, decision))

    @property
    def to_explain(self) -> bool:
        """Whether there are decisions of which the estimates to be kept are still to be picked out."""
        return bool(self._to_explain)

    def explain(self) -> Generator[None, None, None]:
        """Picks them out, in parts; the decisions' estimates are let go."""
        while self._to_explain:
            alternatives, decision = self._to_explain.popleft()
            kind = self._placed if isinstance(decision, Placement) else self._refused
            if (remembered := kind.entries.get(alternatives.attempt_id)) is not None:
                remembered.estimates = LeadingEstimates.of(alternatives, decision)
            yield

    def advanced(self, progress: Progress, attempt: PlacedAttempt | None, now: float) -> None:
        """`attempt`: the one that has advanced, as the core knew it until now or, if it has not ended, still does."""
        if attempt is None:
            return
        bucket, first = self.hour.at(now), progress.phase is Phase.DECODE and progress.ttft_ms > 0
        if first and not attempt.earlier_tokens:  # Else it is no other prompt: its output is under way.
            bucket.prompt_tokens += attempt.num_tokens
            bucket.cached_tokens += progress.cached_tokens
            if not attempt.idle:
                self.hour.first_token(progress.ttft_ms, now)
        tbt_ms = None
        if progress.phase.over:
            bucket.finished += progress.phase is Phase.FINISHED
            bucket.failed += progress.phase is Phase.FAILED
            bucket.output_tokens += progress.output_tokens
            tbt_ms = attempt.tbt_ms(progress.output_tokens, now)
            if tbt_ms is not None and not attempt.idle:
                bucket.tbt.add(tbt_ms)
        remembered = self._placed.entries.get(progress.attempt_id)
        if remembered is None or not (first or progress.phase.over):
            return
        told = remembered.told
        if first:
            told = replace(
                told,
                first_token_at=now,
                ttft_ms=progress.ttft_ms,
                queue_ms=progress.queue_ms,
                fetch_ms=progress.fetch_ms,
                prefill_ms=progress.compute_ms,
                cached_tokens=progress.cached_tokens,
            )
        if progress.phase.over:
            told = replace(told, ended_at=now, output_tokens=progress.output_tokens, tbt_ms=tbt_ms or 0.0)
        remembered.told = replace(told, phase=progress.phase)
        self._put(self._placed, progress.attempt_id, remembered)

    def sample(self, prefill_load: float, decode_load: float, attempts: int, now: float) -> None:
        """Notes how loaded the pools are, every few seconds."""
        bucket = self.hour.at(now)
        bucket.prefill_load, bucket.decode_load, bucket.attempts = prefill_load, decode_load, attempts

    def changed_since(self, version: int, at_most: int) -> list[ObservedDecision]:
        """The placements, and then the refusals, that are new or have changed since then: so many of each, the latest first."""
        return [*self._placed.changed_since(version, at_most), *self._refused.changed_since(version, at_most)]

    def explanation(self, wanted: str, now: float) -> Explanation:
        """Of a request, one of its choices or an attempt; without decisions where none is remembered."""
        at_once(self.explain())
        entries = chain(self._placed.entries.values(), self._refused.entries.values())
        found = sorted((entry for entry in entries if _is_of(entry.told, wanted)), key=lambda entry: entry.told.decided_at)
        return Explanation(tuple(map(_explained, found)), now)

    def validate(self) -> None:
        """Asserts the bounds."""
        self._placed.validate()
        self._refused.validate()

    def _put(self, kind: _Latest, attempt_id: AttemptId, entry: _Remembered) -> None:
        self.version += 1
        entry.version = self.version
        kind.put(attempt_id, entry)


def _told(request: Schedule, decided: Decided, now: float) -> ObservedDecision:
    head = request.attempt_id, request.request_id, request.tenant, request.gateway_id, now, request.num_tokens, request.terms.idle
    decision = decided.decision
    if isinstance(decision, Rejection):
        return ObservedDecision(*head, reason=decision.reason, message=decision.message, retry_after_s=decision.retry_after_s)
    assert isinstance(decision, Placement) and decided.assignment is not None
    prefill = decision.prefill
    return ObservedDecision(
        *head,
        prediction=decided.assignment.prediction,
        prefill_id=prefill.instance_id,
        decode_id=decision.decode.instance_id,
        branch=prefill.branch,
        local_blocks=prefill.local_blocks,
        source_id=prefill.source_id or "",
        source_blocks=prefill.source_blocks,
        waits=decision.waits,
        phase=Phase.PREFILL,
    )


def _is_of(told: ObservedDecision, wanted: str) -> bool:
    """Choices of one API request are called as it is, with a number behind a slash."""
    return wanted in (told.attempt_id, told.request_id) or told.request_id.startswith(f"{wanted}/")


def _explained(entry: _Remembered) -> ExplainedDecision:
    prefills, decodes, inlines = entry.estimates.told() if entry.estimates is not None else ((), (), ())
    slos = entry.ttft_slo_ms, entry.tbt_slo_ms
    return ExplainedDecision(
        entry.told, *slos, entry.policy, entry.admission, entry.num_prefills, entry.num_decodes, prefills, decodes, inlines
    )
