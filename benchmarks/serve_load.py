"""The load of `make bench-serve`, questions on long documents and short chats, each kind a Poisson process of its own; and what its records
say."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from deploy.bench.driver import Gate, drive
from deploy.bench.statistics import RequestRecord
from deploy.bench.workload import BenchWorkload

VOCABULARY = 49152
DOCUMENTS = 2
SEEDS_APART = 100
"""More than the seeds that one run takes."""


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    prompt_tokens: int
    output_tokens: int
    shared_prefix: float
    """The part of a prompt that is its document's."""
    share: float
    """The part of all requests that are of this kind."""
    prefixes: int = 1

    def workloads(self, rate: float, duration_s: float, seed: int) -> list[BenchWorkload]:
        """A workload for each of its prefixes, at least one request in each; `rate` is of all kinds together."""
        of_each = rate * self.share / self.prefixes
        return [self._workload(max(1, round(of_each * duration_s)), seed + number, rate=of_each) for number in range(self.prefixes)]

    def one_by_one(self, requests: int, seed: int) -> BenchWorkload:
        return self._workload(requests, seed, concurrency=1)

    def _workload(self, requests: int, seed: int, concurrency: int | None = None, rate: float | None = None) -> BenchWorkload:
        return BenchWorkload(requests, self.prompt_tokens, self.output_tokens, self.shared_prefix, concurrency, rate, VOCABULARY, seed)


LONG = Kind("documents", 3072, 32, 0.75, share=0.25, prefixes=DOCUMENTS)
SHORT = Kind("chats", 128, 64, 0.0, share=0.75)
KINDS = (LONG, SHORT)


@dataclass(frozen=True, slots=True)
class Objective:
    """Milliseconds to the first token and between any two."""

    ttft_ms: float
    tbt_ms: float


@dataclass(frozen=True, slots=True)
class InFlightLimit:
    """A limit in front of a server: of requests in flight. The others wait before it, or are refused."""

    in_flight: int
    refuses: bool

    def __str__(self) -> str:
        return f"at most {self.in_flight} in flight, others {'are refused' if self.refuses else 'wait'}"


Records = Mapping[str, Sequence[RequestRecord]]
"""What became of the requests of a run, by the kind's name."""


def unloaded(url: str, requests: int, seed: int) -> dict[str, Objective]:
    """The medians of what a request of each kind takes that has the system to itself."""
    found = {}
    for kind in KINDS:
        records = _complete(asyncio.run(_play(url, {kind.name: [kind.one_by_one(requests, seed)]}))[kind.name])
        found[kind.name] = Objective(median(record.ttft_ms for record in records), median(gap for r in records for gap in r.tbt_ms))
    return found


def loaded(url: str, rate: float, duration_s: float, seed: int, limit: InFlightLimit | None = None) -> Records:
    """A run of `rate` requests a second in all, arriving during `duration_s`; seeds are SEEDS_APART. `limit`: kept by the client, which
    costs the server nothing."""
    return asyncio.run(_play(url, {kind.name: kind.workloads(rate, duration_s, seed) for kind in KINDS}, limit))


def good_share(records: Records, objectives: Mapping[str, Objective]) -> float:
    """The part of all requests that were answered in full within the objectives of their kind. Times the rate at which they arrived it is
    the goodput over the time of their arrival, however long a system takes for the last of them."""
    kept = [r.within(objectives[kind].ttft_ms, objectives[kind].tbt_ms) for kind, of_kind in records.items() for r in of_kind]
    return sum(kept) / len(kept)


def strain(records: Records, objectives: Mapping[str, Objective]) -> float:
    """The median over all requests of how much of its objectives each used up, by the one that it came closer to; infinite for those that
    were not answered. Tells apart what keeps as many objectives."""
    return median(_strain(record, objectives[kind]) for kind, of_kind in records.items() for record in of_kind)


def _strain(record: RequestRecord, objective: Objective) -> float:
    if record.error is not None:
        return math.inf
    return max(record.ttft_ms / objective.ttft_ms, max(record.tbt_ms, default=0.0) / objective.tbt_ms)


def served_share(records: Sequence[RequestRecord]) -> float:
    """The part that was answered in full, in time or not."""
    return len(_complete(records)) / len(records)


def refused_share(records: Sequence[RequestRecord]) -> float:
    """The part that was turned away at once, with a 429. What is neither served nor refused has failed."""
    return sum(record.error is not None and record.error.startswith("429") for record in records) / len(records)


def ttft_ms(records: Sequence[RequestRecord], percentile: float) -> float:
    """A percentile of the times to the first token of those that were answered in full; NaN for none."""
    return _percentile([record.ttft_ms for record in _complete(records)], percentile)


def tbt_ms(records: Sequence[RequestRecord], percentile: float) -> float:
    """A percentile of all times between tokens of those that were answered in full; NaN for none."""
    return _percentile([gap for record in _complete(records) for gap in record.tbt_ms], percentile)


def _percentile(values: Sequence[float], percentile: float) -> float:
    return float(np.percentile(values, percentile)) if values else math.nan


def _complete(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if record.error is None]


async def _play(
    url: str, workloads: Mapping[str, Sequence[BenchWorkload]], limit: InFlightLimit | None = None
) -> dict[str, list[RequestRecord]]:
    """All at once."""
    gate = Gate(limit.in_flight, refuses=limit.refuses) if limit is not None else None

    async def play(workload: BenchWorkload) -> list[RequestRecord]:
        _, records = await drive(url, None, workload, lambda record: None, gate)
        return records

    played = {kind: asyncio.gather(*map(play, several)) for kind, several in workloads.items()}
    return {kind: [record for records in await several for record in records] for kind, several in played.items()}
