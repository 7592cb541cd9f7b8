"""Streams of which it is known how long they stood still, and what becomes of that when something fails in their middle."""

from __future__ import annotations

import concurrent.futures
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import Event
from typing import Protocol

from tests.support.generate import generate
from tests.support.reference import random_prompt

LONGEST_GAP_S = 5.0
"""What docs/reliability.md promises."""
NUM_STREAMS = 4


class Served(Protocol):
    """A cluster, as far as its clients need to know it."""

    @property
    def grpc_address(self) -> str: ...

    @property
    def model(self) -> str: ...


def stream(
    served: Served, prompt: Sequence[int], num_tokens: int, on_token: Callable[[int], object], until: Event | None = None
) -> tuple[list[int], float]:
    """The tokens, and the longest time between two of them. `until`: as of `generate`."""
    came_at: list[float] = []

    def note(count: int) -> None:
        came_at.append(time.monotonic())
        on_token(count)

    tokens = generate(served.grpc_address, served.model, prompt, num_tokens, on_token=note, until=until).token_ids
    return tokens, max(later - earlier for earlier, later in itertools.pairwise(came_at))


def streams_while(fault: Callable[[], AbstractContextManager[None]], served: Served, num_tokens: int) -> list[float]:
    """The longest gap of each of several streams, in the middle of which the fault begins. Asserts that every token is right."""
    prompts = [random_prompt(seed, 300, 10, 250) for seed in range(NUM_STREAMS)]
    in_flight = [Event() for _ in prompts]

    def one(number: int) -> tuple[list[int], float]:
        def on_token(count: int) -> None:
            if count >= num_tokens // 9:
                in_flight[number].set()

        return stream(served, prompts[number], num_tokens, on_token)

    with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as threads:
        answers = [threads.submit(one, number) for number in range(NUM_STREAMS)]
        assert all(begun.wait(60) for begun in in_flight)
        with fault():
            assert not any(answer.done() for answer in answers), "it began too late for them"
            ends = [answer.result() for answer in answers]
        calm = list(threads.map(lambda prompt: generate(served.grpc_address, served.model, prompt, num_tokens).token_ids, prompts))
    assert [tokens for tokens, _ in ends] == calm
    return [gap for _, gap in ends]
