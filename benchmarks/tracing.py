"""What traces cost (`make bench-tracing`): throughput and time to first token through three gateways of one cluster, in turn: one that
traces nothing, one that keeps a tenth of the traces, and one that keeps all.

`make bench-tracing ARGS="--rounds 1 --seconds 10"` is a shorter look; the file of results is written by runs of five rounds and more only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
import numpy as np

from benchmarks.batches import DTYPE, WORDS
from benchmarks.results import Row, show, write
from tests.chaos.cluster import ExtraGateway
from tests.support.cluster import Cluster, metric_at

CLIENTS = 8
PROMPT_WORDS = (40, 200)
ANSWERS = {"answers of 64 tokens": 64, "answers of 4 tokens": 4}
"""Tokens of output, by the case: the fewer there are, the more traces there are to each."""
RATIOS = {"a tenth kept": 0.1, "all kept": 1.0}
WANTED = {"a tenth kept": 0.98, "all kept": None}
"""Of the throughput without traces."""
PAIRED_ROUNDS = 5
NOTES = (
    f"1 prefill and 1 decode node of SmolLM2-135M-Instruct in {DTYPE}, on one machine with the clients and the collector, and three "
    f"gateways in processes of their own, of which one is used at a time. {CLIENTS} clients ask one request after another, "
    f"{PROMPT_WORDS[0]} to {PROMPT_WORDS[1]} words of prompt that nobody has asked before. In each round the gateways have the same "
    "lengths in the same order, one after another, and the order of the gateways is turned round from one round to the next. "
    "Where traces are on, all of them are gathered, by nodes and gateway, whatever part is kept, for which are is decided at the end. "
    "The collector takes what it is sent and does nothing with it. Medians of the rounds; a ratio is the median of the rounds' own, "
    "above one where tracing is the better."
)

COLLECTOR = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """A collector in a process of its own; its URL."""
    process = subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


@dataclass(slots=True)
class Seen:
    """What the clients of one phase saw."""

    tokens: int = 0
    took_s: float = 0.0
    ttft_ms: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.took_s

    @property
    def ttft_p99(self) -> float:
        return float(np.percentile(self.ttft_ms, 99))


async def client(http: httpx.AsyncClient, model: str, number: int, salt: str, output_tokens: int, until: float, seen: Seen) -> None:
    """Lengths come of `number`, words of `salt` too."""
    when, what = random.Random(number), random.Random(f"{salt} {number}")
    while time.monotonic() < until:
        prompt = " ".join(what.choice(WORDS) for _ in range(when.randint(*PROMPT_WORDS)))
        body = {"model": model, "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True, "stream": True}
        began, first = time.monotonic(), True
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                now = time.monotonic()
                if line.startswith("data: {") and now < until:
                    seen.tokens += 1
                    if first:
                        seen.ttft_ms.append((now - began) * 1000)
                        first = False


async def load(url: str, model: str, seed: int, salt: str, output_tokens: int, seconds: float) -> Seen:
    seen, began = Seen(), time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=120) as http, asyncio.TaskGroup() as tasks:
        for number in range(CLIENTS):
            tasks.create_task(client(http, model, seed * CLIENTS + number, salt, output_tokens, began + seconds, seen))
    seen.took_s = seconds
    return seen


Rounds = list[dict[str, Seen]]
"""Of each round, by the gateway's name."""


def measured(urls: dict[str, str], model: str, output_tokens: int, arguments: argparse.Namespace) -> Rounds:
    for name, url in urls.items():
        asyncio.run(load(url, model, 0, f"warm {name} {output_tokens}", output_tokens, arguments.seconds / 4))
    rounds = []
    for number in range(1, arguments.rounds + 1):
        names = [*urls][:: 1 if number % 2 else -1]
        seen = {
            name: asyncio.run(load(urls[name], model, number, f"{name} {output_tokens} {number}", output_tokens, arguments.seconds))
            for name in names
        }
        told = [f"{name} {seen[name].tokens_per_s:.1f} tokens/s, TTFT p99 {seen[name].ttft_p99:.0f} ms" for name in urls]
        print(f"{output_tokens} tokens, round {number}: {'; '.join(told)}", flush=True)
        rounds.append(seen)
    return rounds


def compared(rounds: Rounds, name: str, case: str) -> list[Row]:
    pairs = [(seen[name], seen["off"]) for seen in rounds]
    tokens = [traced.tokens_per_s for traced, _ in pairs], [plain.tokens_per_s for _, plain in pairs]
    ttft = [traced.ttft_p99 for traced, _ in pairs], [plain.ttft_p99 for _, plain in pairs]
    throughput = _row(f"throughput, {name}", "tokens/s", case, *tokens, median(a / b for a, b in zip(*tokens, strict=True)), WANTED[name])
    return [throughput, _row(f"TTFT p99, {name}", "ms", case, *ttft, median(b / a for a, b in zip(*ttft, strict=True)), None)]


def _row(name: str, unit: str, case: str, traced: Sequence[float], plain: Sequence[float], ratio: float, wanted: float | None) -> Row:
    return Row(
        name,
        unit,
        median(traced),
        (min(traced), max(traced)),
        median(plain),
        "off",
        ratio,
        wanted,
        None if wanted is None else ratio >= wanted,
        case,
        (min(plain), max(plain)),
        len(traced),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase")
    arguments = parser.parse_args()
    rows, gateways = [], []
    with (
        collector() as endpoint,
        tempfile.TemporaryDirectory() as directory,
        Cluster(prefill=1, decode=1, dtype=DTYPE, server={"separate_gateway": True}) as cluster,
    ):
        try:
            urls = {"off": cluster.url}
            for number, (name, ratio) in enumerate(RATIOS.items(), 1):
                changes = {"tracing": {"endpoint": endpoint, "ratio": ratio}}
                gateways.append(ExtraGateway(f"gateway-{number}", cluster, Path(directory), changes))
                urls[name] = gateways[-1].url
            for case, output_tokens in ANSWERS.items():
                rounds = measured(urls, cluster.model, output_tokens, arguments)
                rows += [row for name in RATIOS for row in compared(rounds, name, case)]
            for name in RATIOS:
                address = urls[name].removeprefix("http://")
                sent = metric_at(address, "springtide_gateway_sent_spans_total")
                dropped = metric_at(address, "springtide_gateway_dropped_traces_total")
                print(f"{name}: {sent:.0f} spans sent, {dropped:.0f} traces dropped")
                assert sent and not dropped, "what is measured is what is sent"
        finally:
            for gateway in gateways:
                gateway.stop()
    show("tracing", rows)
    if arguments.rounds >= PAIRED_ROUNDS:
        print(write("tracing", "make bench-tracing", rows, NOTES, [row.label for row in rows if row.wanted is not None]))


if __name__ == "__main__":
    main()
