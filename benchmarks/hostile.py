"""What one hostile client costs all others (`make bench-hostile`): the time between tokens of two streams, calm and under each attack.

`make bench-hostile ARGS="--only idle"` is a shorter look; the file of results is written by whole runs only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import sys
import time
from collections.abc import Iterator
from statistics import median

import httpx
import numpy as np
import psutil

from benchmarks.hostile_attacks import HELD, NAMES, WORK
from benchmarks.results import Row, show, write
from tests.support.cluster import Cluster

STREAMS = 2
ATTACK_S = 6.0
CALM_S = 3.0
FILES = 1024
MOST_ADDED_MS = 100.0
NOTES = (
    "1 prefill and 1 decode node of SmolLM2-135M-Instruct in bfloat16, on one machine with the attacker and the clients. "
    f"{STREAMS} streams run; an attack goes on for {ATTACK_S:g} s by 4 connections at once (n = 32: by one), after {CALM_S:g} s of calm. "
    "Added: p99 of the time between tokens during the attack, less that of the calm before it. "
    "Where the attack is work that the cluster takes on (n = 32), the batch is larger: compare with `n = 32 alone`. "
    f"1,200 connections: the cluster is started with a limit of {FILES} files a process; new requests come all the time, each over a "
    "connection of its own."
)


class Stream:
    """Asks for one output after the other, and notes when tokens come."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        self.gaps: list[tuple[float, float]] = []
        """When each ended, and how long it was."""
        self.failures = 0

    async def run(self) -> None:
        body = {"model": self._model, "prompt": "Once upon a time", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as http:
            while True:
                try:
                    await self._take(http, body)
                except (httpx.TransportError, httpx.HTTPStatusError):
                    self.failures += 1
                    await asyncio.sleep(0.1)

    async def _take(self, http: httpx.AsyncClient, body: dict[str, object]) -> None:
        last = None
        async with http.stream("POST", "/v1/completions", json=body) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    now = time.monotonic()
                    if last is not None:
                        self.gaps.append((now, now - last))
                    last = now

    def between(self, begin: float, end: float) -> list[float]:
        """Gaps that reach into this time, an unfinished one included, in milliseconds."""
        gaps = [gap * 1000 for at, gap in self.gaps if at > begin and at - gap < end]
        last = self.gaps[-1][0] if self.gaps else begin
        return [*gaps, (end - last) * 1000] if last < end else gaps


async def newcomers(url: str, model: str, taken_ms: list[float]) -> None:
    """Requests over connections of their own; one that gets no answer within 10 s has taken 10 s."""
    while True:
        began = time.monotonic()
        with contextlib.suppress(httpx.TransportError):
            async with httpx.AsyncClient(base_url=url, timeout=10) as http:
                await http.post("/v1/completions", json={"model": model, "prompt": "Hi.", "max_tokens": 1})
        taken_ms.append((time.monotonic() - began) * 1000)
        await asyncio.sleep(0.2)


async def attack(name: str, cluster: Cluster) -> list[Row]:
    url, address, model = cluster.url, cluster.grpc_address, cluster.model
    gateway = psutil.Process(cluster.pid_of("conductor-0"))
    streams = [Stream(url, model) for _ in range(STREAMS)]
    taken_ms: list[float] = []
    tasks = [asyncio.create_task(stream.run()) for stream in streams]
    if name in HELD:
        tasks.append(asyncio.create_task(newcomers(url, model, taken_ms)))
    command = [sys.executable, "-m", "benchmarks.hostile_attacks", name, url, address, model, str(ATTACK_S)]
    try:
        while not all(stream.gaps for stream in streams):  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.05)
        calm_from = time.monotonic()
        await asyncio.sleep(CALM_S)
        memory = gateway.memory_info().rss
        attacker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert attacker.stdout is not None
        # It takes a while to make its bodies, in which it disturbs nobody but by its use of the processor.
        calm_until = time.monotonic()
        await attacker.stdout.readline()
        begin, calm_requests = time.monotonic(), len(taken_ms)
        most = memory
        ending = asyncio.create_task(attacker.stdout.readline())
        while not ending.done():
            await asyncio.wait({ending}, timeout=0.1)
            most = max(most, gateway.memory_info().rss)
        end = time.monotonic()
        await attacker.wait()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    calm = np.array([gap for stream in streams for gap in stream.between(calm_from, calm_until)])
    hurt = np.array([gap for stream in streams for gap in stream.between(begin, end)])
    added = float(np.percentile(hurt, 99) - np.percentile(calm, 99))
    print(f"{name}: answers {ending.result().decode().strip()}, failures {sum(stream.failures for stream in streams)}", flush=True)
    rows = [
        Row("TBT p99, calm", "ms", float(np.percentile(calm, 99)), case=name),
        Row("TBT p99, under attack", "ms", float(np.percentile(hurt, 99)), case=name),
        # What the cluster takes on is a larger batch, whoever asks for it: there its case without the attack is what to compare with.
        Row("added", "ms", added, case=name)
        if WORK in name
        else Row("added", "ms", added, wanted=MOST_ADDED_MS, met=added <= MOST_ADDED_MS, case=name),
        Row("longest gap", "ms", float(hurt.max()), case=name),
        Row("memory of the gateway, added", "MiB", (most - memory) / (1 << 20), case=name),
    ]
    if name in HELD:
        calm_ms, hurt_ms = taken_ms[:calm_requests], taken_ms[calm_requests:] or [10_000.0]
        rows.append(Row("new requests, calm (median)", "ms", median(calm_ms), case=name))
        rows.append(Row("new requests, under attack (longest)", "ms", max(hurt_ms), case=name))
    return rows


@contextlib.contextmanager
def few_files() -> Iterator[None]:
    """What is started in here begins with a shell's usual limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="attacks with this in their names")
    arguments = parser.parse_args()
    names = [name for name in NAMES if arguments.only in name]
    rows = []
    with few_files():
        cluster = Cluster(prefill=1, decode=1)
        cluster.__enter__()
    with contextlib.ExitStack() as stack:
        stack.push(cluster.__exit__)
        for name in names:
            rows += asyncio.run(attack(name, cluster))
            show(name, [row for row in rows if row.case == name])
    if not arguments.only:
        print(write("hostile", "make bench-hostile", rows, NOTES))
    else:
        print(json.dumps({f"{row.case}: {row.row}": round(row.ours) for row in rows if row.row in ("added", "longest gap")}))


if __name__ == "__main__":
    main()
