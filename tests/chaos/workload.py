"""What clients send, decided from a seed: a catalogue of requests, and who sends which when. Pure.

Requests come again and again, so that one calm answer to each is a reference for all of them, and prefixes are found in the pool.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Api = Literal["completions", "chat/completions"]
Json = dict[str, Any]

CONTEXT_TOKENS = 4096
NUM_ITEMS = 72
ABORT_SHARE = 0.12
BURST_SHARE = 0.06
BURST_SIZE = 6
THINK_S = (0.0, 0.4)
FLOOD_TOKENS = (1200, 2400)
_WORDS = (
    "the store of blocks lends what it has to whoever asks and keeps the rest in order while an engine reads on and another writes "
    "there is a queue in front of the hall and nobody in it knows how long it will take until the first of them is let in again"
)
_SPECIALS = ("\n\n", "é", "漢字", "🙂", "1234567890", "\t", '"quoted"')


@dataclass(frozen=True, slots=True)
class Item:
    key: str
    kind: str
    api: Api
    body: Json = field(hash=False)
    """Save the model's name."""

    @property
    def stream(self) -> bool:
        return self.body.get("stream") is True

    @property
    def num_choices(self) -> int:
        prompt = self.body.get("prompt")
        prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
        n = self.body.get("n") or 1
        return prompts * n if isinstance(n, int) else 1

    @property
    def deadline_s(self) -> float | None:
        deadline_ms = self.body.get("deadline_ms")
        return None if deadline_ms is None else deadline_ms / 1000

    @property
    def valid(self) -> bool:
        return self.kind != "invalid"

    @property
    def undisturbed(self) -> Item:
        """The same request without a deadline: its answer is how far the other may come."""
        return Item(self.key, self.kind, self.api, {name: value for name, value in self.body.items() if name != "deadline_ms"})


@dataclass(frozen=True, slots=True)
class Act:
    """A client's next turn."""

    items: tuple[Item, ...]
    """Sent at once."""
    abort_after: int | None
    """Events after which the connection of each is closed."""
    think_s: float
    """Afterwards."""


def catalogue(seed: int, longest_tokens: int = CONTEXT_TOKENS) -> tuple[Item, ...]:
    """Each kind of request, none of more than `longest_tokens` with its output."""
    generator = random.Random(f"catalogue {seed}")
    documents = [_text(generator, generator.randrange(400, 1500)) for _ in range(4)]
    makers = list(_MAKERS.items())
    items = []
    for number in range(NUM_ITEMS):
        kind, make = makers[number % len(makers)]
        api, body = make(generator, documents, longest_tokens)
        items.append(Item(f"{number:02}-{kind}", kind, api, body))
    return tuple(items)


def acts(seed: int, client: int, items: tuple[Item, ...]) -> Iterator[Act]:
    """What one client does, for ever."""
    generator = random.Random(f"client {client} of {seed}")
    while True:
        size = BURST_SIZE if generator.random() < BURST_SHARE else 1
        chosen = tuple(generator.choice(items) for _ in range(size))
        abort_after = generator.randrange(0, 12) if generator.random() < ABORT_SHARE else None
        yield Act(chosen, abort_after, generator.uniform(*THINK_S))


def flood(seed: int, number: int, size: int, longest_tokens: int = CONTEXT_TOKENS) -> tuple[Item, ...]:
    """Long prompts that nobody has sent before, for the `number`-th flood. There is no reference for them."""
    generator = random.Random(f"flood {number} of {seed}")
    items = []
    for index in range(size):
        length = min(generator.randrange(*FLOOD_TOKENS), longest_tokens - 64)
        body = {"prompt": _ids(generator, length), "max_tokens": generator.randrange(8, 48), "temperature": 0, "ignore_eos": True}
        items.append(Item(f"flood-{number}-{index}", "flood", "completions", {**body, "stream": index % 2 == 0}))
    return tuple(items)


def _text(generator: random.Random, length: int) -> str:
    words, text = _WORDS.split(), ""
    while len(text) < length:
        text += f"{generator.choice(_SPECIALS) if generator.random() < 0.03 else generator.choice(words)} "
    return text[:length]


def _ids(generator: random.Random, length: int) -> list[int]:
    return [generator.randrange(10, 250) for _ in range(length)]


def _sampled(generator: random.Random) -> Json:
    return {
        "temperature": generator.choice((0.5, 0.8, 1.0)),
        "top_p": generator.choice((1.0, 0.95)),
        "top_k": generator.choice((0, 40)),
        "seed": generator.randrange(1 << 31),
        "frequency_penalty": generator.choice((0.0, 0.2)),
        "repetition_penalty": generator.choice((1.0, 1.1)),
    }


def _streamed(generator: random.Random) -> Json:
    return generator.choice(({}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}))


def _messages(generator: random.Random, text: str) -> list[Json]:
    messages = [{"role": "user", "content": text}]
    if generator.random() < 0.5:
        messages.insert(0, {"role": "system", "content": "You answer in one sentence."})
    return messages


Made = tuple[Api, Json]


def _greedy_chat(generator: random.Random, documents: list[str], longest: int) -> Made:
    body = {"messages": _messages(generator, _text(generator, generator.randrange(10, 200))), "temperature": 0}
    return "chat/completions", {**body, "max_tokens": generator.randrange(8, 80), **_streamed(generator)}


def _sampled_chat(generator: random.Random, documents: list[str], longest: int) -> Made:
    body = {"messages": _messages(generator, _text(generator, generator.randrange(10, 300))), **_sampled(generator)}
    return "chat/completions", {**body, "max_completion_tokens": generator.randrange(8, 80), **_streamed(generator)}


def _shared_prefix(generator: random.Random, documents: list[str], longest: int) -> Made:
    text = generator.choice(documents)[: longest // 2] + _text(generator, generator.randrange(5, 60))
    sampling = generator.choice(({"temperature": 0}, _sampled(generator)))
    return "completions", {"prompt": text, **sampling, "max_tokens": generator.randrange(8, 60), **_streamed(generator)}


def _long_prompt(generator: random.Random, documents: list[str], longest: int) -> Made:
    output = generator.randrange(8, 40)
    length = min(generator.randrange(1500, 3200), longest - output - 1)
    body = {"prompt": _ids(generator, length), "temperature": 0, "max_tokens": output, "ignore_eos": True}
    return "completions", {**body, **_streamed(generator)}


def _long_output(generator: random.Random, documents: list[str], longest: int) -> Made:
    body = {"prompt": _ids(generator, generator.randrange(20, 200)), "temperature": 0, "ignore_eos": True, "stream": True}
    return "completions", {
        **body,
        "max_tokens": min(generator.randrange(200, 700), longest // 2),
        "stream_options": {"include_usage": True},
    }


def _choices(generator: random.Random, documents: list[str], longest: int) -> Made:
    body = {"prompt": _text(generator, generator.randrange(40, 300)), **_sampled(generator), "n": generator.randrange(2, 6)}
    return "completions", {**body, "max_tokens": generator.randrange(8, 40), **_streamed(generator)}


def _many_choices(generator: random.Random, documents: list[str], longest: int) -> Made:
    prompts = [_text(generator, generator.randrange(20, 80)) for _ in range(generator.randrange(4, 9))]
    body = {"prompt": prompts, **_sampled(generator), "n": generator.randrange(1, 4), "max_tokens": generator.randrange(4, 16)}
    return "completions", {**body, **_streamed(generator)}


def _stopped(generator: random.Random, documents: list[str], longest: int) -> Made:
    """By strings of one or two letters, which come up by chance."""
    stops = ["".join(generator.choice("aeiouth ") for _ in range(generator.randrange(1, 3))) for _ in range(2)]
    body = {"prompt": _text(generator, generator.randrange(40, 200)), **_sampled(generator), "stop": stops}
    return "completions", {**body, "max_tokens": generator.randrange(30, 120), **_streamed(generator)}


def _logprobs(generator: random.Random, documents: list[str], longest: int) -> Made:
    sampling = generator.choice(({"temperature": 0}, _sampled(generator)))
    length = generator.randrange(8, 60)
    if generator.random() < 0.5:
        messages = _messages(generator, _text(generator, generator.randrange(10, 200)))
        body = {"messages": messages, **sampling, "max_tokens": length, "logprobs": True, "top_logprobs": generator.randrange(4)}
        return "chat/completions", {**body, **_streamed(generator)}
    body = {"prompt": _text(generator, generator.randrange(10, 200)), **sampling, "max_tokens": length, "logprobs": generator.randrange(4)}
    return "completions", {**body, **_streamed(generator)}


def _deadline(generator: random.Random, documents: list[str], longest: int) -> Made:
    """Some cannot be kept."""
    body = {"prompt": _ids(generator, generator.randrange(20, 400)), "temperature": 0, "max_tokens": generator.randrange(8, 60)}
    return "completions", {**body, "deadline_ms": generator.choice((1, 300, 3_000, 60_000)), **_streamed(generator)}


def _invalid(generator: random.Random, documents: list[str], longest: int) -> Made:
    wrong: list[Made] = [
        ("completions", {"prompt": "hello", "max_tokens": -1}),
        ("completions", {"prompt": "hello", "temperature": -1}),
        ("completions", {"prompt": [], "max_tokens": 4}),
        ("completions", {"prompt": [999_999], "max_tokens": 4}),
        ("completions", {"prompt": "hello", "max_tokens": CONTEXT_TOKENS * 2}),
        ("completions", {"prompt": "hello", "unheard_of": True}),
        ("completions", {"prompt": "hello", "n": 1000}),
        ("completions", {"prompt": _ids(generator, CONTEXT_TOKENS + 10), "max_tokens": 1}),
        ("chat/completions", {"messages": []}),
        ("chat/completions", {"messages": [{"role": "robot", "content": "hello"}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "hello"}], "tools": [{"type": "function"}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "hello"}], "top_logprobs": 3}),
    ]
    return generator.choice(wrong)


_MAKERS: dict[str, Callable[[random.Random, list[str], int], Made]] = {
    "greedy chat": _greedy_chat,
    "sampled chat": _sampled_chat,
    "shared prefix": _shared_prefix,
    "long prompt": _long_prompt,
    "long output": _long_output,
    "choices": _choices,
    "many choices": _many_choices,
    "stopped": _stopped,
    "logprobs": _logprobs,
    "deadline": _deadline,
    "invalid": _invalid,
    "second prefix": _shared_prefix,
}
