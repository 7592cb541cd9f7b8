"""What guessed tokens are worth (`make bench-speculation`): the same requests to an engine that guesses and to one that does not, in pairs.

`make bench-speculation ARGS="--rounds 1"` is a shorter look; the file of results is written by whole runs only.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from benchmarks.driven import compared, others_at_work, plain, rate_of_tokens
from benchmarks.results import Row, show, write
from engine import _native
from tests.support.cluster import Cluster

ROUNDS = 3
CLIENTS = (1, 4)
OUTPUT_TOKENS = 150
DTYPE = "bfloat16" if _native.instruction_sets() else "float32"
"""What this machine computes in: without the C kernels bfloat16 is many times slower than float32."""
PASSAGE = (
    "The store of each node lends its memory to a common pool. A scheduler decides for every request which group computes the prompt and "
    "which node writes the answer. What was computed before is found again by the hash of its blocks, and is copied from node to node over "
    "the fastest network that both of them have. When a node is lost, the requests that ran there go on at another one, and nobody who "
    "reads their answers notices more than a short pause. "
)
CODE = """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("insufficient funds")
        self.balance -= amount
        return self.balance
"""
REPETITIVE = (
    f"Repeat the following text word for word:\n\n{PASSAGE}",
    f"Rename `amount` to `sum` in this Python code and write all of it again:\n\n{CODE}",
    f"Quote the two most important sentences of this text, then summarise it:\n\n{PASSAGE}{PASSAGE.replace('node', 'machine')}",
    f"Write this class again with a docstring in each method:\n\n{CODE}",
)
FREE = (
    "Tell me a story about a lighthouse keeper.",
    "Explain why the sky is blue.",
    "Write a letter to a friend about your holidays.",
    "What makes a good teacher?",
)
WORK = {"repetitive": (REPETITIVE, 0.0, 1.3), "free text": (FREE, 1.0, 0.98)}
"""What is asked, at which temperature, and what is wanted of the ratio."""
DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
NOTES = (
    f"Two clusters of one instance each with SmolLM2-135M-Instruct in {DTYPE}, its engine in one thread, on one machine with the clients: "
    "one as by default, the other with `decode_node.speculation: off`. They are asked in turn, and who comes first changes from round to "
    f"round. A round is {len(REPETITIVE)} requests for up to {OUTPUT_TOKENS} tokens, by one client or by {CLIENTS[1]} at a time. "
    "repetitive: a passage word for word, a class with a name changed, quotations and a summary, the class with docstrings, greedy. "
    "free text: a story, "
    "an explanation, a letter, an opinion, at temperature 1, with seeds that change from round to round. Tokens per second are those after "
    "each request's first, from then to its last. Answers are compared: the two clusters' are the same."
)


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    tokens: int
    """After the first."""
    seconds: float
    """Which they took."""


def ask(cluster: Cluster, model: str, content: str, temperature: float, seed: int) -> Answer:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": temperature,
        "seed": seed,
        "max_tokens": OUTPUT_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    texts, first_at, last_at, tokens = list[str](), 0.0, 0.0, 0
    with httpx.stream("POST", f"{cluster.url}/v1/chat/completions", json=body, timeout=300) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
            for choice in chunk["choices"]:
                if choice["delta"].get("content"):
                    texts.append(choice["delta"]["content"])
                    last_at = time.perf_counter()
                    first_at = first_at or last_at
    return Answer("".join(texts), tokens - 1, last_at - first_at)


def phase(cluster: Cluster, model: str, work: str, clients: int, number: int) -> tuple[float, list[str]]:
    """Seconds a token, and what was answered."""
    contents, temperature, _ = WORK[work]
    with ThreadPoolExecutor(clients) as threads:
        answers = list(threads.map(lambda content: ask(cluster, model, content, temperature, number), contents))
    return sum(answer.seconds for answer in answers) / sum(answer.tokens for answer in answers), [answer.text for answer in answers]


def counted(cluster: Cluster) -> Sequence[float]:
    return [cluster.metric("instance-0", name) for name in (DRAFTED, ACCEPTED, "vllm:generation_tokens_total")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds: int = parser.parse_args().rounds
    remark = others_at_work()
    rows: list[Row] = []
    settings = {"dtype": DTYPE, "device": "cpu", "instances": 1, "prefill_node": {"threads": 1}}
    with (
        Cluster(**settings, decode_node={"threads": 1}) as guessing,
        Cluster(**settings, decode_node={"threads": 1, "speculation": "off"}) as plainly,
    ):
        model, sides = guessing.model, (guessing, plainly)
        for side in sides:
            phase(side, model, "free text", 4, 0)  # what comes first in a new cluster is slower
        for work, (_, _, wanted) in WORK.items():
            for clients in CLIENTS:
                seconds: dict[Cluster, list[float]] = {side: [] for side in sides}
                before = counted(guessing)
                differing = 0
                for number in range(1, rounds + 1):
                    texts = {}
                    for side in sides[:: 1 if number % 2 else -1]:
                        took_s, texts[side] = phase(side, model, work, clients, number)
                        seconds[side].append(took_s)
                    differing += sum(mine != other for mine, other in zip(*(texts[side] for side in sides), strict=True))
                drafted, accepted, tokens = (now - then for now, then in zip(counted(guessing), before, strict=True))
                case = f"{work}, {clients} client{'s' * (clients > 1)}"
                ours, theirs = seconds.values()
                rows.append(
                    compared(f"decoding: {case}", rate_of_tokens(1), ours, theirs, "without guesses", wanted if clients == 1 else None)
                )
                rows.append(plain("guessed of 100 tokens", "", [100 * drafted / tokens], case))
                rows.append(plain("right of 100 guesses", "", [100 * accepted / drafted if drafted else 0.0], case))
                rows.append(Row("answers that differ", "", differing, wanted=0, met=differing == 0, case=case))
                print(f"{case}: {rows[-4].ratio:.3f}, {differing} differ", flush=True)
    show("speculation", rows)
    if rounds == ROUNDS:
        print(write("speculation", "make bench-speculation", rows, f"{NOTES} {remark}".strip(), [rows[0].label]))


if __name__ == "__main__":
    main()
