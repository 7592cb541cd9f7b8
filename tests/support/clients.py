"""Clients of OpenAI's that try nothing twice, and know what the answer is to be."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import httpx
import openai

from tests.support.generate import generate
from tests.support.reference import Reference, random_prompt
from tests.support.waiting import wait_until

WORKERS, PAUSE_S = 3, 0.1
PATIENCE_S = 120.0
Asked = tuple[int, int]
"""A prompt's number, and how many tokens."""


def prompt_of(seed: int, length: int = 200) -> list[int]:
    return random_prompt(seed, length, 10, 250)


@dataclass(slots=True)
class Questions:
    """What is asked of a model, and the text that is the answer."""

    model: str
    prompt: Callable[[int], str | list[int]] = prompt_of
    """By its number."""
    wanted: dict[Asked, str] = field(default_factory=dict)

    def learn(self, grpc_address: str, reference: Reference, asked: Sequence[Asked]) -> None:
        """From a gateway, whose tokens have to be the reference's."""
        for seed, num_tokens in asked:
            said = generate(grpc_address, self.model, prompt_of(seed), num_tokens)
            assert said.token_ids == reference.greedy(prompt_of(seed), num_tokens)
            self.wanted[seed, num_tokens] = said.text

    def learn_in_calm(self, base_url: str, asked: Sequence[Asked]) -> None:
        """What is answered now, all at once, is the answer from now on."""
        with ThreadPoolExecutor(len(asked)) as threads:
            for answer in threads.map(lambda each: ask(self, base_url, *each), asked):
                assert answer.whole, answer
                self.wanted[answer.asked] = answer.text


@dataclass
class Answer:
    """Of one request, however it ended."""

    asked: Asked
    began: float
    whole: bool = False
    """Whether it ended once, and is as long as was asked for."""
    right: bool = False
    """Whether it is whole, and what it has to be."""
    error: str | None = None
    refused_with: int | None = None
    """The status, where nothing of an answer came."""
    ttft_s: float = 0.0
    longest_gap_s: float = 0.0
    text: str = field(default="", repr=False)


def ask(questions: Questions, base_url: str, seed: int, num_tokens: int, on_piece: Callable[[], object] = lambda: None) -> Answer:
    with _client_of(base_url) as client:
        return _asked_of(client, questions, Answer((seed, num_tokens), time.monotonic()), on_piece)


def _client_of(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120, http_client=httpx.Client(trust_env=False))


def _asked_of(client: openai.OpenAI, questions: Questions, answer: Answer, on_piece: Callable[[], object]) -> Answer:
    seed, num_tokens = answer.asked
    finishes, counted, last = [], [], answer.began
    try:
        stream = client.completions.create(
            model=questions.model,
            prompt=questions.prompt(seed),
            max_tokens=num_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        for chunk in stream:
            counted += [chunk.usage.completion_tokens] if chunk.usage else []
            for choice in chunk.choices:
                now = time.monotonic()
                on_piece()
                if not answer.text:
                    answer.ttft_s = now - answer.began
                else:
                    answer.longest_gap_s = max(answer.longest_gap_s, now - last)
                last = now
                answer.text += choice.text
                finishes += [choice.finish_reason] if choice.finish_reason else []
    except (openai.OpenAIError, httpx.HTTPError) as error:
        took_s = time.monotonic() - answer.began
        answer.error = f"{type(error).__name__}: {error} ({error.__cause__!r}) after {took_s:.2f} s and {len(answer.text)} characters"
        answer.refused_with = error.status_code if isinstance(error, openai.APIStatusError) else None
        return answer
    answer.whole = finishes == ["length"] and counted == [num_tokens]
    answer.right = answer.whole and answer.text == questions.wanted.get(answer.asked)
    return answer


class Load:
    """Clients that ask one thing after the other, with a short pause, over connections that they keep, while entered."""

    def __init__(
        self,
        questions: Questions,
        base_urls: Sequence[str],
        longest: int | None = None,
        logs: Callable[[], str] = lambda: "",
        pause_s: float = PAUSE_S,
    ) -> None:
        """`longest`: they ask nothing that is longer. `logs`: what is said when answers do not come, or are not right."""
        self._questions, self._urls, self._logs, self._pause_s = questions, base_urls, logs, pause_s
        self._asked = [asked for asked in questions.wanted if longest is None or asked[1] <= longest]
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(WORKERS)]
        self._under_way: dict[int, Answer] = {}
        """Those of which a part has come, by their clients."""
        self.answers: list[Answer] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        chance = random.Random(number)
        with _client_of(self._urls[number % len(self._urls)]) as client:
            while not self._stop.is_set():
                answer = Answer(chance.choice(self._asked), time.monotonic())
                _asked_of(client, self._questions, answer, partial(self._under_way.setdefault, number, answer))
                self._under_way.pop(number, None)
                self.answers.append(answer)
                self._stop.wait(self._pause_s)

    def wait_under_way(self) -> None:
        """Until every client is in the middle of an answer."""
        wait_until(lambda: len(self._under_way) == WORKERS, "all to be answered at once", PATIENCE_S, self._logs)

    def wait_answered(self, more: int) -> None:
        enough = len(self.answers) + more
        wait_until(lambda: len(self.answers) >= enough, f"{more} answers more", PATIENCE_S, self._logs, poll_s=0.1)

    def check(self, but: Sequence[Answer] = ()) -> None:
        wrong = [answer for answer in self.answers if not answer.right and answer not in but]
        assert not wrong, f"{len(wrong)} of {len(self.answers)}: {wrong}\n{self._logs()}"

    def summary(self, since: float = 0.0, until: float = float("inf")) -> str:
        answers = [answer for answer in self.answers if since <= answer.began < until]
        ttft_ms = sorted(1000 * answer.ttft_s for answer in answers)
        if len(ttft_ms) < 2:
            return f"{len(ttft_ms)} requests"
        cuts = statistics.quantiles(ttft_ms, n=100, method="inclusive")
        gap_s = max(answer.longest_gap_s for answer in answers)
        return (
            f"{len(answers)} requests, TTFT p50 {cuts[49]:.0f} ms, p99 {cuts[98]:.0f} ms, most {ttft_ms[-1]:.0f} ms; "
            f"longest gap in a stream {1000 * gap_s:.0f} ms"
        )
