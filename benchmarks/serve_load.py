"""The load of `make bench-serve`: questions on long documents and short chats, each kind a Poisson process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from deploy.bench.driver import drive
from deploy.bench.statistics import RequestRecord
from deploy.bench.workload import BenchWorkload

VOCABULARY = 49152
DOCUMENTS = 2


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    prompt_tokens: int
    output_tokens: int
    shared_prefix: float
    """Of the prompt: a document's share of the questions on it."""
    share: float
    """Of all requests."""
    prefixes: int = 1

    def workloads(self, rate: float, duration_s: float, seed: int) -> list[BenchWorkload]:
        """One for each of its prefixes, at least one request in each; `rate` is of all kinds together."""
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


Records = Mapping[str, Sequence[RequestRecord]]
"""By the kind's name."""


def unloaded(url: str, requests: int, seed: int) -> dict[str, Objective]:
    """What a request of each kind takes that has the system to itself: medians."""
    found = {}
    for kind in KINDS:
        records = _complete(asyncio.run(_play(url, {kind.name: [kind.one_by_one(requests, seed)]}))[kind.name])
        found[kind.name] = Objective(median(record.ttft_ms for record in records), median(gap for r in records for gap in r.tbt_ms))
    return found


def loaded(url: str, rate: float, duration_s: float, seed: int) -> Records:
    """Of `rate` requests a second in all, arriving during `duration_s`. Half the difference between two seeds is more than DOCUMENTS."""
    return asyncio.run(_play(url, {kind.name: kind.workloads(rate, duration_s, seed) for kind in KINDS}))


def goodput_per_s(records: Records, objectives: Mapping[str, Objective]) -> float:
    """From the first sending to the last answer."""
    everybody = [record for of_kind in records.values() for record in of_kind]
    within = sum(r.within(objectives[kind].ttft_ms, objectives[kind].tbt_ms) for kind, of_kind in records.items() for r in of_kind)
    return within / (max(record.ended_s for record in everybody) - min(record.sent_s for record in everybody))


def ttft_ms(records: Sequence[RequestRecord], percentile: float) -> float:
    """Of those that were answered in full; NaN for none."""
    return _percentile([record.ttft_ms for record in _complete(records)], percentile)


def tbt_ms(records: Sequence[RequestRecord], percentile: float) -> float:
    """Of all times between tokens, as `ttft_ms`."""
    return _percentile([gap for record in _complete(records) for gap in record.tbt_ms], percentile)


def _percentile(values: Sequence[float], percentile: float) -> float:
    return float(np.percentile(values, percentile)) if values else float("nan")


def _complete(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if record.error is None]


async def _play(url: str, workloads: Mapping[str, Sequence[BenchWorkload]]) -> dict[str, list[RequestRecord]]:
    """All at once."""

    async def play(workload: BenchWorkload) -> list[RequestRecord]:
        _, records = await drive(url, None, workload, lambda record: None)
        return records

    played = {kind: asyncio.gather(*map(play, several)) for kind, several in workloads.items()}
    return {kind: [record for records in await several for record in records] for kind, several in played.items()}
