"""How much sooner the first token comes of a prompt whose beginning a context cache keeps (`make bench-caching`): calm, while others flood
the pool, with one of the two stores that hold it killed, and after a restart of Conductor and gateway."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from typing import Any

import httpx

from benchmarks.driven import others_at_work
from benchmarks.results import Row, show, write
from springtide.client import Client
from springtide.modelinfo import KVSpec
from tests.support.cluster import Cluster

PREFIX_TOKENS = 4000
ROUNDS = 5
WANTED = 10.0
BLOCK_TOKENS = 64
DEMO = KVSpec(30, 3, 64, "bfloat16", BLOCK_TOKENS)
ARENA_BLOCKS = 200
"""A little more than three times the prefix: what floods it pushes everything else out within seconds."""
FLOODERS = 2
FLOOD_TOKENS = 1000
CASES = ("calm", "flooded", "one of two stores killed", "Conductor and gateway restarted")
CALM = f"TTFT of {PREFIX_TOKENS} cached tokens: calm"
NOTES = (
    f"2 prefill nodes and 1 decode node of SmolLM2-135M-Instruct in bfloat16, arenas of {ARENA_BLOCKS} blocks, on one machine with the "
    f"clients. The question comes after a system message of about {PREFIX_TOKENS} tokens. Cached: the message is a context cache's in 2 "
    "stores. Uncached: it begins with other words in each round, so that nothing of it is found; both are measured in every round, in the "
    f"same state of the cluster. Flooded: {FLOODERS} clients send prompts of {FLOOD_TOKENS} tokens each, all different, before and while "
    "both are measured. Killed: the store is killed (-9) right before the cached one is asked for, once a round, and is back before the "
    "uncached one. Restarted: both are killed (-9) before the rounds."
)


def rules(salt: str) -> str:
    """A system message of about so many tokens, which nobody else's begins like."""
    return f"These are the rules of {salt}. " + "".join(
        f"Rule {number} of the house: the tide comes in, and it goes out. " for number in range(PREFIX_TOKENS // 17)
    )


class Asked:
    """The cluster, asked one question after two different messages."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._asked = 0
        self._model = cluster.model
        with Client(cluster.url) as client:
            body: Any = {"model": self._model, "messages": [{"role": "system", "content": rules("the sea")}], "replicas": 2}
            answer = httpx.post(f"{cluster.url}/v1/caching", json=body, timeout=60).raise_for_status().json()
            self.cache = client.caches.wait(answer["id"])
        self.wait_held(2)

    def wait_held(self, replicas: int) -> None:
        def held() -> bool:
            try:
                shown = httpx.get(f"{self._cluster.url}/v1/caching/{self.cache.cache_id}", timeout=10).json()
            except httpx.HTTPError:
                return False
            return bool(shown.get("replicas_held") == replicas)

        self._cluster.wait_until(held, f"{replicas} replicas", timeout_s=120)

    def cached_s(self) -> float:
        return self._ttft_s([self.cache.as_message()], self.cache.tokens * 9 // 10)

    def uncached_s(self) -> float:
        self._asked += 1
        return self._ttft_s([{"role": "system", "content": rules(f"house {self._asked}")}], 0)

    def _ttft_s(self, messages: Sequence[Any], least_cached: int) -> float:
        with Client(self._cluster.url) as client:
            began, first, usage = time.perf_counter(), None, None
            for chunk in client.chat([*messages, {"role": "user", "content": f"What is rule {self._asked}?"}], max_tokens=4):
                first = first or (time.perf_counter() if chunk.text else None)
                usage = chunk.usage or usage
        assert first is not None and usage is not None, "an answer has text and usage"
        assert usage.cached_tokens >= least_cached if least_cached else usage.cached_tokens < BLOCK_TOKENS, f"{usage} is not as meant"
        return first - began


@contextmanager
def flood(cluster: Cluster) -> Iterator[None]:
    """Others' prompts, one after the other from each client; begun when they have filled the pool once."""
    over, done = threading.Event(), threading.Semaphore(0)

    def flooding(client: int) -> None:
        number = 0
        while not over.is_set():
            number += 1
            prompt = [1000 + client, *(2000 + (number * 7919 + place) % 40_000 for place in range(FLOOD_TOKENS - 1))]
            body = {"model": cluster.model, "prompt": prompt, "max_tokens": 1}
            httpx.post(f"{cluster.url}/v1/completions", json=body, headers={"x-springtide-tenant": "flood"}, timeout=120).raise_for_status()
            done.release()

    with ThreadPoolExecutor(FLOODERS) as threads:
        running = [threads.submit(flooding, client) for client in range(FLOODERS)]
        for _ in range(3 * ARENA_BLOCKS * BLOCK_TOKENS // FLOOD_TOKENS):
            done.acquire(timeout=120)
        try:
            yield
        finally:
            over.set()
            for one in running:
                one.result()


def rounds(
    asked: Asked, count: int, before_cached: Callable[[], None], before_uncached: Callable[[], None]
) -> tuple[list[float], list[float]]:
    cached, uncached = [], []
    for _ in range(count):
        before_cached()
        cached.append(asked.cached_s())
        before_uncached()
        uncached.append(asked.uncached_s())
    return cached, uncached


def measured(cluster: Cluster, asked: Asked, case: str, count: int) -> tuple[list[float], list[float]]:
    def nothing() -> None:
        pass

    def kill() -> None:
        asked.wait_held(2)
        cluster.kill("prefill-0-store")

    def back() -> None:
        cluster.wait_ready("prefill-0-store")
        asked.wait_held(2)

    if case == CASES[1]:
        with flood(cluster):
            return rounds(asked, count, nothing, nothing)
    if case == CASES[2]:
        return rounds(asked, count, kill, back)
    if case == CASES[3]:
        for name in ("conductor-0", "gateway-0"):
            cluster.kill(name)
        cluster.wait_ready()
    return rounds(asked, count, nothing, nothing)


def row(case: str, cached: Sequence[float], uncached: Sequence[float]) -> Row:
    ours, peer = ([1000 * seconds for seconds in side] for side in (cached, uncached))
    ratio = median(there / here for here, there in zip(ours, peer, strict=True))
    return Row(
        f"TTFT of {PREFIX_TOKENS} cached tokens",
        "ms",
        median(ours),
        (min(ours), max(ours)),
        median(peer),
        "uncached",
        ratio,
        WANTED,
        ratio >= WANTED,
        case,
        (min(peer), max(peer)),
        len(ours),
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="fewer for a look: only whole runs are written down")
    count = parser.parse_args(arguments).rounds
    remark = others_at_work()
    kv = {"arena_size": ARENA_BLOCKS * DEMO.bytes_per_slot, "block_tokens": BLOCK_TOKENS}
    with Cluster(prefill=2, server={"separate_gateway": True}, kv=kv, conductor={"admission": "baseline"}) as cluster:
        asked = Asked(cluster)
        asked.cached_s(), asked.uncached_s()
        rows = [row(case, *measured(cluster, asked, case, count)) for case in CASES]
    show("Context caching", rows)
    if count == ROUNDS:
        print(write("caching", "make bench-caching", rows, f"{NOTES} {remark}".strip(), (CALM,)))


if __name__ == "__main__":
    main(sys.argv[1:])
