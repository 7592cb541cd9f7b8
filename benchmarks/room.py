"""What it costs that many wait for room (`make bench-room`): the same requests by 16 clients and by 8, over a pool that is too small for
either.

`make bench-room ARGS="--rounds 1 --requests 40"` is a shorter look; the file of results is written by whole runs only.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from benchmarks.driven import compared, others_at_work, plain, rate_of_tokens
from benchmarks.results import PARITY, Row, show, write
from engine import _native
from tests.support.cluster import Cluster

MANY, FEW = 16, 8
ROUNDS, REQUESTS = 3, 32
PROMPT_TOKENS, OUTPUT_TOKENS = (40, 400), (100, 200, 400, 1200)
DTYPE = "bfloat16" if _native.instruction_sets() else "float32"
"""What this machine computes in: without the C kernels bfloat16 is many times slower than float32."""
ARENA = "64MiB"
NOTES = (
    f"1 prefill and 1 decode node of SmolLM2-135M-Instruct in {DTYPE}, each with an arena of {ARENA}, admission `baseline`, on one machine "
    "with the clients. Tokens are not guessed: how many guesses are right depends on the text, which is another one on each side. "
    f"{REQUESTS} requests in each round and on each side, {PROMPT_TOKENS[0]} to {PROMPT_TOKENS[1]} tokens of prompt that "
    f"nobody has asked before and {', '.join(map(str, OUTPUT_TOKENS[:-1]))} or {OUTPUT_TOKENS[-1]} tokens of output: of the same lengths "
    f"on both sides, by {MANY} clients and by {FEW}, of whom each asks for the next when it has its answer; who begins changes from round "
    "to round. A request has failed that is answered by anything but all of its tokens. Throughput is that of the tokens of all answers, "
    "from the first request to the last answer: the same work on both sides. An attempt beyond the first follows one that found no room, "
    "that waited for it for 10 s in vain, or that was preempted: an older output needed its slots."
)


@dataclass(frozen=True, slots=True)
class Phase:
    """What came of all requests by so many clients."""

    seconds_a_token: float
    failed: int
    rescheduled: float
    preempted: float


def ask(cluster: Cluster, model: str, prompt: list[int], num_tokens: int) -> int:
    """How many tokens came; none of a request that failed."""
    body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    try:
        reply = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=1200)
        came = reply.raise_for_status().json()["usage"]["completion_tokens"]
    except httpx.HTTPError as error:
        print(f"failed: {error}", flush=True)
        return 0
    return num_tokens if came == num_tokens else 0


def phase(cluster: Cluster, model: str, number: int, clients: int, requests: int) -> Phase:
    """The same lengths for the same round, other tokens on each side."""
    lengths, tokens = random.Random(number), random.Random(f"{number} {clients}")
    asked = [(lengths.randint(*PROMPT_TOKENS), lengths.choice(OUTPUT_TOKENS)) for _ in range(requests)]
    prompts = [[tokens.randrange(1000, 40000) for _ in range(length)] for length, _ in asked]
    before, began = counted(cluster), time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        came = list(threads.map(lambda prompt, wanted: ask(cluster, model, prompt, wanted[1]), prompts, asked))
    took_s = time.perf_counter() - began
    rescheduled, preempted = (now - then for now, then in zip(counted(cluster), before, strict=True))
    return Phase(took_s / max(sum(came), 1), came.count(0), rescheduled, preempted)


def counted(cluster: Cluster) -> Sequence[float]:
    """Since the cluster began: attempts beyond the first of a request, and those that were preempted."""
    return (
        cluster.metric("conductor-0", "springtide_gateway_reschedules_total"),
        cluster.metric("decode-0", "springtide_decode_preemptions_total"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    arguments = parser.parse_args()
    remark = others_at_work()
    seen: dict[int, list[Phase]] = {MANY: [], FEW: []}
    settings = {"kv": {"arena_size": ARENA}, "conductor": {"admission": "baseline"}, "decode_node": {"speculation": "off"}}
    with Cluster(prefill=1, decode=1, dtype=DTYPE, **settings) as cluster:
        model = cluster.model
        phase(cluster, model, 0, FEW, FEW)  # what comes first in a new cluster is slower
        for number in range(1, arguments.rounds + 1):
            for clients in [*seen][:: 1 if number % 2 else -1]:
                seen[clients].append(phase(cluster, model, number, clients, arguments.requests))
            told = [
                f"{clients} clients {1 / phases[-1].seconds_a_token:.0f} tokens/s, {phases[-1].failed} failed, "
                f"{phases[-1].rescheduled:.0f} attempts more, {phases[-1].preempted:.0f} preempted"
                for clients, phases in seen.items()
            ]
            print(f"round {number}: {'; '.join(told)}", flush=True)
    many, few = ([one.seconds_a_token for one in phases] for phases in seen.values())
    rows = [compared(f"throughput of {MANY} clients", rate_of_tokens(1), many, few, f"{FEW} clients", PARITY[0])]
    for clients, phases in seen.items():
        failed = sum(one.failed for one in phases)
        rows.append(Row("requests that failed", "", failed, wanted=0, met=failed == 0, case=f"{clients} clients"))
        rows.append(plain("attempts beyond the first, a round", "", [one.rescheduled for one in phases], case=f"{clients} clients"))
        rows.append(plain("preempted, a round", "", [one.preempted for one in phases], case=f"{clients} clients"))
    show("room", rows)
    if (arguments.rounds, arguments.requests) == (ROUNDS, REQUESTS):
        print(write("room", "make bench-room", rows, f"{NOTES} {remark}".strip(), [row.label for row in rows[:2]]))


if __name__ == "__main__":
    main()
