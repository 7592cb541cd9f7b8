"""What a batch costs those who ask online (`make bench-batches`): their time to first token and between tokens, with a batch beside them
and without, and what a stranger's process costs them that never takes a processor from anybody.

`make bench-batches ARGS="--rounds 1 --seconds 15"` is a shorter look; the file of results is written by runs of five rounds and more only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import httpx
import numpy as np
from openai import AsyncOpenAI

from benchmarks.results import Row, show, write
from engine import _native
from tests.support.cluster import Cluster

LINES, LINE_TOKENS = 500, 64
PROMPT_WORDS, OUTPUT_TOKENS = (40, 200), 32
DTYPE = "bfloat16" if _native.instruction_sets() else "float32"
"""What this machine computes in: without the C kernels bfloat16 is many times slower than float32."""
MOST_SLOWDOWN = 1.1
BUSY = 0.6
"""The share of the time for which an online request would be there, were there never two at once."""
PAIRED_ROUNDS = 5
WORDS = ("river", "stone", "cloud", "green", "seven", "light", "north", "paper", "under", "music", "bread", "window", "garden", "silver")
NOTES = (
    f"1 prefill and 1 decode node of SmolLM2-135M-Instruct in {DTYPE}, on one machine with the clients. Online requests come by chance, so "
    f"many that one would be there for {BUSY:.0%} of the time were there never two at once, "
    f"{PROMPT_WORDS[0]} to {PROMPT_WORDS[1]} words of prompt that nobody has asked before, {OUTPUT_TOKENS} tokens of output. In each round "
    "they come three times at the same moments, the order turned round from one to the next: alone; beside a batch of "
    f"{LINES} lines (prompts as long, {LINE_TOKENS} tokens of output) that has lines left at the end; and beside a stranger, a process "
    "that computes matrix products of the model's shapes on one thread at the lowest priority that Linux has (SCHED_IDLE). The stranger "
    "has a processor only when nobody wants it: what it costs is what cores share, caches and memory, and no scheduler can give that "
    "back but by leaving a core unused. Medians of the rounds; the ratio is the median of the rounds' own."
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
    rows, what = [], random.Random(salt)
    for number in range(count):
        prompt = " ".join(what.choice(WORDS) for _ in range(what.randint(*PROMPT_WORDS)))
        body = {"model": model, "prompt": prompt, "max_tokens": LINE_TOKENS, "ignore_eos": True}
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
    assert batch.status == "in_progress", f"the batch ended after {batch.request_counts.completed} lines; give it more with --lines"
    seen.lines = batch.request_counts.completed
    await api.batches.cancel(batch.id)
    await until(api, batch.id, {"cancelled"})
    return seen


STRANGER = """
import os, torch
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
torch.set_num_threads(1)
weights = [torch.randn(shape, dtype=torch.bfloat16) for shape in [(576, 960), (576, 576), (576, 3072), (576, 1536)] * 30]
rows = torch.randn(64, 576, dtype=torch.bfloat16)
print(flush=True)
while True:
    for weight in weights:
        rows @ weight
"""


async def beside_stranger(url: str, model: str, seed: int, arguments: argparse.Namespace) -> Seen:
    stranger = await asyncio.create_subprocess_exec(sys.executable, "-c", STRANGER, stdout=asyncio.subprocess.PIPE)
    assert stranger.stdout is not None
    try:
        await stranger.stdout.readline()
        return await online(url, model, seed, "stranger", arguments.rate, arguments.seconds)
    finally:
        stranger.kill()
        await stranger.wait()


@dataclass(frozen=True, slots=True)
class Round:
    """The same requests three times."""

    alone: Seen
    batch: Seen
    stranger: Seen


async def rate_of(url: str, model: str, busy: float) -> float:
    """Requests a second of which one is there for so much of the time."""
    what, took_s = random.Random(0), []
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        for _ in range(5):
            began = time.monotonic()
            prompt = " ".join(what.choice(WORDS) for _ in range(sum(PROMPT_WORDS) // 2))
            await ask(http, model, prompt, Seen())
            took_s.append(time.monotonic() - began)
    return busy / median(took_s[1:])


async def rounds(cluster: Cluster, arguments: argparse.Namespace) -> list[Round]:
    url, model = cluster.url, cluster.model
    results = []
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as api:
        arguments.rate = arguments.rate or await rate_of(url, model, BUSY)
        print(f"{arguments.rate:.2f} online requests a second", flush=True)
        for number in range(1, arguments.rounds + 1):
            phases: dict[str, Callable[[], Awaitable[Seen]]] = {
                "alone": partial(online, url, model, number, "alone", arguments.rate, arguments.seconds),
                "batch": partial(beside_batch, api, url, model, number, arguments),
                "stranger": partial(beside_stranger, url, model, number, arguments),
            }
            names = [*phases][:: 1 if number % 2 else -1]
            seen = {name: await phases[name]() for name in names}
            told = [f"{name} {seen[name].ttft_p90:.0f} and {seen[name].tbt_p99:.1f} ms" for name in phases]
            print(f"round {number}: TTFT p90 and TBT p99 {', '.join(told)}; {seen['batch'].lines} lines", flush=True)
            results.append(Round(**seen))
    return results


def compared(name: str, pairs: Sequence[tuple[float, float]], wanted: float | None) -> Row:
    """Of figures alone and beside what `name` tells."""
    alone, beside = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    ratio = median(without / together for without, together in pairs)
    return Row(
        name,
        "ms",
        median(beside),
        (min(beside), max(beside)),
        median(alone),
        "alone",
        ratio,
        wanted=wanted,
        met=None if wanted is None else ratio >= wanted,
        peer_spread=(min(alone), max(alone)),
        rounds=len(pairs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    parser.add_argument("--rate", type=float, help=f"online requests a second; without: as many as take {BUSY:.0%} of the time, measured")
    parser.add_argument("--lines", type=int, default=LINES)
    arguments = parser.parse_args()
    with Cluster(prefill=1, decode=1, dtype=DTYPE) as cluster:
        seen = asyncio.run(rounds(cluster, arguments))
    rows = []
    for kind, wanted in (("batch", 1 / MOST_SLOWDOWN), ("stranger", None)):
        beside = [(one.alone, getattr(one, kind)) for one in seen]
        rows.append(compared(f"TTFT p90 beside a {kind}", [(alone.ttft_p90, other.ttft_p90) for alone, other in beside], wanted))
        rows.append(compared(f"TBT p99 beside a {kind}", [(alone.tbt_p99, other.tbt_p99) for alone, other in beside], wanted))
    lines = [one.batch.lines / arguments.seconds for one in seen]
    rows.append(Row("lines answered meanwhile", "1/s", median(lines), (min(lines), max(lines)), rounds=len(lines)))
    show("batches", rows)
    if arguments.rounds >= PAIRED_ROUNDS:
        print(write("batches", "make bench-batches", rows, NOTES, [row.label for row in rows[:2]]))


if __name__ == "__main__":
    main()
