"""What a batch costs those who ask online (`make bench-batches`): their time to first token and between tokens, with a batch beside them
and without, in pairs.

`make bench-batches ARGS="--rounds 1 --seconds 15"` is a shorter look; the file of results is written by runs of three rounds and more only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import httpx
import numpy as np
from openai import AsyncOpenAI

from benchmarks.results import Row, show, write
from tests.support.cluster import Cluster

LINES, LINE_TOKENS = 500, 16
PROMPT_WORDS, OUTPUT_TOKENS = (40, 200), 32
MOST_SLOWDOWN = 1.1
PAIRED_ROUNDS = 3
WORDS = ("river", "stone", "cloud", "green", "seven", "light", "north", "paper", "under", "music", "bread", "window", "garden", "silver")
NOTES = (
    "1 prefill and 1 decode node of SmolLM2-135M-Instruct in bfloat16, on one machine with the clients. Online requests come by chance, "
    f"{PROMPT_WORDS[0]} to {PROMPT_WORDS[1]} words of prompt that nobody has asked before, {OUTPUT_TOKENS} tokens of output. In each round "
    "they come twice at the same moments, alone and beside a batch that runs all the while, which of the two first by turns. "
    "Of all rounds the median is told; the ratio is the median of the rounds' own."
)


@dataclass(slots=True)
class Seen:
    """What the online clients of one phase saw, in milliseconds."""

    ttft: list[float] = field(default_factory=list)
    tbt: list[float] = field(default_factory=list)
    lines: int = 0
    """Of the batch that were answered meanwhile."""

    @property
    def ttft_p90(self) -> float:
        return float(np.percentile(self.ttft, 90))

    @property
    def tbt_p99(self) -> float:
        return float(np.percentile(self.tbt, 99))


async def ask(http: httpx.AsyncClient, model: str, prompt: str, seen: Seen) -> None:
    body = {"model": model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True}
    last = time.monotonic()
    first = True
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                now = time.monotonic()
                (seen.ttft if first else seen.tbt).append((now - last) * 1000)
                last, first = now, False


async def online(url: str, model: str, seed: int, phase: str, rate: float, seconds: float) -> Seen:
    """The same arrivals and lengths for the same seed, other words in each phase."""
    when, what, seen = random.Random(seed), random.Random(f"{seed} {phase}"), Seen()
    async with httpx.AsyncClient(base_url=url, timeout=120) as http, asyncio.TaskGroup() as tasks:
        until = time.monotonic() + seconds
        while (pause := when.expovariate(rate)) < until - time.monotonic():
            await asyncio.sleep(pause)
            prompt = " ".join(what.choice(WORDS) for _ in range(when.randint(*PROMPT_WORDS)))
            tasks.create_task(ask(http, model, prompt, seen))
    return seen


def batch_lines(model: str, salt: str, count: int) -> bytes:
    rows = []
    for number in range(count):
        body = {"model": model, "prompt": f"{salt}: {number} is a number that", "max_tokens": LINE_TOKENS, "ignore_eos": True}
        rows.append(json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}))
    return "\n".join(rows).encode()


async def until(api: AsyncOpenAI, batch_id: str, statuses: set[str]) -> None:
    while (await api.batches.retrieve(batch_id)).status not in statuses:  # noqa: ASYNC110 - only an answer tells
        await asyncio.sleep(0.05)


async def beside_batch(api: AsyncOpenAI, url: str, model: str, seed: int, arguments: argparse.Namespace) -> Seen:
    content = batch_lines(model, f"round {seed}", arguments.lines)
    sent = await api.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = await api.batches.create(input_file_id=sent.id, endpoint="/v1/completions", completion_window="24h")
    await until(api, batch.id, {"in_progress", "finalizing", "completed"})
    seen = await online(url, model, seed, "with", arguments.rate, arguments.seconds)
    batch = await api.batches.retrieve(batch.id)
    assert batch.request_counts is not None
    seen.lines = batch.request_counts.completed
    if batch.status != "completed":
        await api.batches.cancel(batch.id)
        await until(api, batch.id, {"completed", "cancelled"})
    return seen


async def rounds(cluster: Cluster, arguments: argparse.Namespace) -> list[tuple[Seen, Seen]]:
    """Without and with the batch."""
    url, model = cluster.url, cluster.model
    pairs = []
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as api:
        await online(url, model, 0, "warm", arguments.rate, 3.0)
        for number in range(1, arguments.rounds + 1):
            alone = beside = None
            for with_batch in (False, True) if number % 2 else (True, False):
                if with_batch:
                    beside = await beside_batch(api, url, model, number, arguments)
                else:
                    alone = await online(url, model, number, "without", arguments.rate, arguments.seconds)
            assert alone is not None and beside is not None
            print(
                f"round {number}: TTFT p90 {alone.ttft_p90:.0f} and {beside.ttft_p90:.0f} ms, TBT p99 {alone.tbt_p99:.1f} and "
                f"{beside.tbt_p99:.1f} ms, {len(beside.ttft)} requests, {beside.lines} lines",
                flush=True,
            )
            pairs.append((alone, beside))
    return pairs


def compared(name: str, pairs: Sequence[tuple[float, float]]) -> Row:
    """Of figures without and with the batch."""
    alone, beside = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    ratio = median(without / together for without, together in pairs)
    return Row(
        name,
        "ms",
        median(beside),
        (min(beside), max(beside)),
        median(alone),
        "without the batch",
        ratio,
        wanted=1 / MOST_SLOWDOWN,
        met=ratio >= 1 / MOST_SLOWDOWN,
        peer_spread=(min(alone), max(alone)),
        rounds=len(pairs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each phase")
    parser.add_argument("--rate", type=float, default=0.5, help="online requests a second")
    parser.add_argument("--lines", type=int, default=LINES)
    arguments = parser.parse_args()
    with Cluster(prefill=1, decode=1) as cluster:
        pairs = asyncio.run(rounds(cluster, arguments))
    lines = [beside.lines / arguments.seconds for _, beside in pairs]
    rows = [
        compared("TTFT p90 beside a batch", [(alone.ttft_p90, beside.ttft_p90) for alone, beside in pairs]),
        compared("TBT p99 beside a batch", [(alone.tbt_p99, beside.tbt_p99) for alone, beside in pairs]),
        Row("lines answered meanwhile", "1/s", median(lines), (min(lines), max(lines)), rounds=len(lines)),
    ]
    show("batches", rows)
    if arguments.rounds >= PAIRED_ROUNDS:
        print(write("batches", "make bench-batches", rows, NOTES, [row.label for row in rows[:2]]))


if __name__ == "__main__":
    main()
