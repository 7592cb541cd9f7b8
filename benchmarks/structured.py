"""What it costs that outputs are held to a JSON schema, and beside vLLM with its xgrammar backend (`make bench-structured`).

vLLM runs with a thread on every core and with one core left to its scheduler and HTTP server; each row shows the better of the two."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from benchmarks.checkpoint import demo_checkpoint
from benchmarks.driven import compared, others_at_work, plain, rate_of_tokens
from benchmarks.results import Row, ratio_in_words, write
from benchmarks.vllm_server import VllmServer, environment, preloaded
from tests.support.cluster import Cluster

ROUNDS = 5
OUTPUT_TOKENS = 128
REQUESTS = {1: 4, 16: 32}
"""By how many run at a time."""
KV_BYTES = 2 << 30
STREET = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "lit": {"type": "boolean"}},
    "required": ["name", "lit"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 20, "maxLength": 40},
        "kind": {"enum": ["town", "village", "city"]},
        "people": {"type": "integer", "minimum": 0, "maximum": 10_000_000},
        "streets": {"type": "array", "minItems": 40, "items": STREET},
    },
    "required": ["name", "kind", "people", "streets"],
    "additionalProperties": False,
}
"""No output is complete with so few tokens, so that all are of the same length."""


def seconds(url: str, at_a_time: int, seeds: Iterator[int], *, held: bool) -> float:
    """For all requests together."""
    model = httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "town", "schema": SCHEMA}}} if held else {"ignore_eos": True}

    def ask(seed: int) -> None:
        messages = [{"role": "user", "content": f"Describe town number {seed} in JSON."}]
        body = {"model": model, "messages": messages, "temperature": 1.0, "seed": seed, "max_tokens": OUTPUT_TOKENS, **form}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600).raise_for_status().json()
        assert reply["usage"]["completion_tokens"] == OUTPUT_TOKENS, reply

    with ThreadPoolExecutor(at_a_time) as threads:
        wanted = list(itertools.islice(seeds, REQUESTS[at_a_time]))
        began = time.perf_counter()
        list(threads.map(ask, wanted))
        return time.perf_counter() - began


def _thread_counts() -> list[int]:
    cores = len(os.sched_getaffinity(0))
    return [cores, cores - 1] if cores > 1 else [cores]


def _vllm(threads: int) -> VllmServer:
    variables = environment(sorted(os.sched_getaffinity(0))[:threads], KV_BYTES)
    return VllmServer(demo_checkpoint(), variables, ("--structured-outputs-config.backend", "xgrammar"))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alone", action="store_true", help="without vLLM; nothing is written")
    alone = parser.parse_args(arguments).alone
    seeds, rows = itertools.count(1), list[Row]()
    notes = [f"SmolLM2-135M-Instruct, bfloat16, temperature 1, {OUTPUT_TOKENS} tokens of output, {ROUNDS} rounds.", others_at_work()]
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(Cluster()).url
        peers = dict[int, VllmServer]()
        if not alone:
            peers = {threads: stack.enter_context(_vllm(threads)) for threads in _thread_counts()}
            notes.append(f"vLLM with {preloaded()}; a row shows the better of {' and '.join(map(str, peers))} threads.")
        for at_a_time, held in itertools.product(REQUESTS, (False, True)):
            name = f"{'held to a schema' if held else 'free'}, {at_a_time} at a time"
            scale = rate_of_tokens(REQUESTS[at_a_time] * OUTPUT_TOKENS)
            mine, theirs = list[float](), {threads: list[float]() for threads in peers}
            for counted in (False, *[True] * ROUNDS):  # the first of each warms up
                took = seconds(ours, at_a_time, seeds, held=held)
                if counted:
                    mine.append(took)
                for threads, vllm in peers.items():
                    with vllm.at_work() as url:
                        took = seconds(url, at_a_time, seeds, held=held)
                    if counted:
                        theirs[threads].append(took)
            if not peers:
                rows.append(plain(name, scale.unit, [scale.figure(one) for one in mine]))
                continue
            best = min(theirs, key=lambda threads: statistics.median(theirs[threads]))
            rows.append(compared(name, scale, mine, theirs[best], "vLLM", 1.0 if held else None))
            shown = ", ".join(f"{scale.figure(statistics.median(took)):.1f} with {threads}" for threads, took in theirs.items())
            print(
                f"{name}: {rows[-1].ours:.1f} {scale.unit}; vLLM {shown} threads; ratio {ratio_in_words(rows[-1].ratio, 'vLLM')}",
                flush=True,
            )
    if alone:
        for row in rows:
            print(f"{row.label}: {row.ours:.1f} {row.unit} {row.spread}")
        return
    headlines = [row.label for row in rows if row.wanted is not None]
    print(write("structured", "make bench-structured", rows, " ".join(filter(None, notes)), headlines))


if __name__ == "__main__":
    main(sys.argv[1:])
