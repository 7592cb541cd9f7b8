"""What clients send, decided from a seed: a catalogue of requests, and who sends which when. Pure.

Requests come again and again, so that one calm answer to each is a reference for all of them, and prefixes are found in the pool.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Api = Literal["completions", "chat/completions", "responses", "messages", "generateContent", "streamGenerateContent"]
Json = dict[str, Any]

CONTEXT_TOKENS = 4096
ITEMS_OF_A_KIND = 6
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
        return self.body.get("stream") is True or self.api == "streamGenerateContent"

    @property
    def settings(self) -> Json:
        """Where it says how tokens are drawn."""
        settings: Json = self.body.get("generationConfig", self.body)
        return settings

    @property
    def num_choices(self) -> int:
        prompt = self.body.get("prompt")
        prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
        n = self.settings.get("n") or self.settings.get("candidateCount") or 1
        return prompts * n if isinstance(n, int) else 1

    @property
    def deadline_s(self) -> float | None:
        deadline_ms = self.body.get("deadline_ms")
        return None if deadline_ms is None else deadline_ms / 1000

    @property
    def has_time(self) -> bool:
        """It is run in idle capacity, whenever there is some."""
        return self.body.get("idle") is True

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
    for number in range(ITEMS_OF_A_KIND * len(makers)):
        kind, make = makers[number % len(makers)]
        api, body = make(generator, documents, longest_tokens)
        items.append(Item(f"{number:03}-{kind}", kind, api, body))
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
    return [_id(generator) for _ in range(length)]


def _id(generator: random.Random) -> int:
    """A token's, of those that are no special ones."""
    return generator.randrange(10, 250)


def _sampled(generator: random.Random) -> Json:
    return {
        "temperature": generator.choice((0.5, 0.8, 1.0)),
        "top_p": generator.choice((1.0, 0.95)),
        "top_k": generator.choice((0, 40)),
        "seed": generator.randrange(1 << 31),
        "frequency_penalty": generator.choice((0.0, 0.2)),
        "repetition_penalty": generator.choice((1.0, 1.1)),
    }


def _greedy_or_sampled(generator: random.Random) -> Json:
    return generator.choice(({"temperature": 0}, _sampled(generator)))


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
    salt = generator.choice(({}, {"cache_salt": "pepper"}))
    return "completions", {
        "prompt": text,
        **_greedy_or_sampled(generator),
        **salt,
        "max_tokens": generator.randrange(8, 60),
        **_streamed(generator),
    }


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
    sampling = _greedy_or_sampled(generator)
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


def _structured(generator: random.Random, documents: list[str], longest: int) -> Made:
    """Held to a schema, or to what vLLM has beside it."""
    body = {**_greedy_or_sampled(generator), "max_tokens": generator.randrange(30, 90), **_streamed(generator)}
    if generator.random() < 0.5:
        wanted = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": _VERDICT}}
        return "chat/completions", {"messages": _messages(generator, _text(generator, 60)), "response_format": wanted, **body}
    held: Json = generator.choice(
        (
            {"regex": "(ab|cd){4,12}-[0-9]{3}"},
            {"choice": ["a hall", "a queue", "nobody in the queue"]},
            {"grammar": 'root ::= word+ "."\nword ::= "the " | "hall " | "queue "'},
            {"json": _VERDICT},
        )
    )
    return "completions", {"prompt": _text(generator, 60), "structured_outputs": held, **body}


def _called(generator: random.Random, documents: list[str], longest: int) -> Made:
    """Tools that must be called."""
    choice = generator.choice(("required", {"type": "function", "function": {"name": "look_up"}}))
    body = {"messages": _messages(generator, _text(generator, 60)), "tools": _TOOLS, "tool_choice": choice}
    length = {"parallel_tool_calls": generator.random() < 0.5, "max_tokens": generator.randrange(60, 140)}
    return "chat/completions", {**body, **_greedy_or_sampled(generator), **length, **_streamed(generator)}


def _scored_prompt(generator: random.Random, documents: list[str], longest: int) -> Made:
    """The answer tells of the prompt's own tokens."""
    prompt = generator.choice((_text(generator, generator.randrange(40, 200)), _ids(generator, generator.randrange(20, 200))))
    body = {"prompt": prompt, **_greedy_or_sampled(generator), "max_tokens": generator.randrange(1, 16)}
    if generator.random() < 0.5:
        return "completions", {**body, "echo": True, "logprobs": generator.randrange(3), **_streamed(generator)}
    return "completions", {**body, "prompt_logprobs": generator.randrange(3), "n": generator.randrange(1, 3)}


def _chosen_tokens(generator: random.Random, documents: list[str], longest: int) -> Made:
    """With a say in which tokens may come, and which are the last."""
    ways: tuple[Json, ...] = (
        {"min_tokens": 24, "stop_token_ids": [_id(generator) for _ in range(12)]},
        {"bad_words": ["e", "the", "in"]},
        {"allowed_token_ids": sorted({_id(generator) for _ in range(60)})},
        {"logit_bias": {str(_id(generator)): 4.0, str(_id(generator)): -100.0}},
        {"stop": ["a", "er"], "include_stop_str_in_output": True},
        {"min_p": 0.02, "presence_penalty": 0.4},
    )
    one, other = generator.sample(ways, 2)
    body = {"prompt": _text(generator, generator.randrange(20, 120)), **_sampled(generator), "max_tokens": generator.randrange(30, 90)}
    return "completions", {**body, **one, **other, **_streamed(generator)}


def _openai_response(generator: random.Random, documents: list[str], longest: int) -> Made:
    asked: tuple[Json, ...] = (
        {},
        {"include": ["message.output_text.logprobs"], "top_logprobs": generator.randrange(3)},
        {"text": {"format": {"type": "json_schema", "name": "verdict", "schema": _VERDICT}}},
        {"tools": [{"type": "function", **tool["function"]} for tool in _TOOLS], "tool_choice": "required"},
    )
    body = {"input": _text(generator, generator.randrange(10, 200)), **_greedy_or_sampled(generator), **generator.choice(asked)}
    length = {"max_output_tokens": generator.randrange(40, 110), "store": generator.random() < 0.6}
    return "responses", {**body, **length, "stream": generator.random() < 0.6}


def _anthropic_message(generator: random.Random, documents: list[str], longest: int) -> Made:
    """Greedy: Anthropic's API has no seed."""
    asked: tuple[Json, ...] = (
        {},
        {"stop_sequences": ["a", "er"]},
        {"output_config": {"format": {"type": "json_schema", "schema": _VERDICT}}},
        {"tools": [_anthropic_tool(tool["function"]) for tool in _TOOLS], "tool_choice": {"type": "any"}},
    )
    body = {"messages": [{"role": "user", "content": _text(generator, generator.randrange(10, 200))}], **generator.choice(asked)}
    length = {"temperature": 0, "max_tokens": generator.randrange(40, 110)}
    return "messages", {**body, "system": "You answer in one sentence.", **length, "stream": generator.random() < 0.6}


def _gemini_content(generator: random.Random, documents: list[str], longest: int) -> Made:
    config: Json = {"maxOutputTokens": generator.randrange(40, 90), "temperature": generator.choice((0, 0.8)), "topK": 40}
    config |= {"seed": generator.randrange(1 << 31), "candidateCount": generator.randrange(1, 4)}
    asked: tuple[Json, ...] = (
        {},
        {"generationConfig": {**config, "responseLogprobs": True, "logprobs": 1}},
        {"generationConfig": {**config, "stopSequences": ["a", "er"]}},
        {"generationConfig": {**config, "responseMimeType": "application/json", "responseJsonSchema": _VERDICT}},
        {"tools": [{"functionDeclarations": list(map(_declaration, _TOOLS))}], "toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
    )
    said = [{"role": "user", "parts": [{"text": _text(generator, generator.randrange(10, 200))}]}]
    body = {"contents": said, "generationConfig": config, **generator.choice(asked)}
    return ("generateContent" if generator.random() < 0.4 else "streamGenerateContent"), body


def _likeliest(generator: random.Random, documents: list[str], longest: int) -> Made:
    """More outputs are made than are answered."""
    best_of = generator.randrange(2, 6)
    body = {"prompt": _text(generator, generator.randrange(40, 300)), **_sampled(generator), "n": generator.randrange(1, best_of)}
    return "completions", {**body, "best_of": best_of, "max_tokens": generator.randrange(8, 40)}


def _kept_prefix(generator: random.Random, documents: list[str], longest: int) -> Made:
    """What it begins with is to stay in the pool."""
    said = generator.choice(documents)[: longest // 2]
    asked, length = _text(generator, generator.randrange(5, 60)), generator.randrange(8, 60)
    if generator.random() < 0.5:
        marked = [{"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}]
        body = {"system": marked, "messages": [{"role": "user", "content": asked}], "temperature": 0, "max_tokens": length}
        return "messages", {**body, "stream": generator.random() < 0.6}
    messages = [{"role": "system", "content": said}, {"role": "user", "content": asked}]
    retention = generator.choice(("in_memory", "24h"))
    body = {"messages": messages, "prompt_cache_retention": retention, **_greedy_or_sampled(generator), "max_tokens": length}
    return "chat/completions", {**body, **_streamed(generator)}


def _idle(generator: random.Random, documents: list[str], longest: int) -> Made:
    """Who waits for idle capacity, and is preempted by all others."""
    body = {"prompt": _ids(generator, generator.randrange(20, 600)), **_greedy_or_sampled(generator), "idle": True}
    return "completions", {**body, "max_tokens": generator.randrange(8, 120), **_streamed(generator)}


def _invalid(generator: random.Random, documents: list[str], longest: int) -> Made:
    return generator.choice(wrong_requests(generator))


def wrong_requests(generator: random.Random) -> list[Made]:
    """Each of them is refused with 400 by whoever is asked, whatever else goes on."""
    said = [{"role": "user", "content": "hello"}]
    return [
        ("completions", {"prompt": "hello", "max_tokens": -1}),
        ("completions", {"prompt": "hello", "temperature": -1}),
        ("completions", {"prompt": [], "max_tokens": 4}),
        ("completions", {"prompt": [999_999], "max_tokens": 4}),
        ("completions", {"prompt": "hello", "max_tokens": CONTEXT_TOKENS * 2}),
        ("completions", {"prompt": "hello", "unheard_of": True}),
        ("completions", {"prompt": "hello", "n": 1000}),
        ("completions", {"prompt": _ids(generator, CONTEXT_TOKENS + 10), "max_tokens": 1}),
        ("completions", {"prompt": "hello", "structured_outputs": {"regex": "("}}),
        ("completions", {"prompt": "hello", "prompt_logprobs": 1, "stream": True}),
        ("chat/completions", {"messages": []}),
        ("chat/completions", {"messages": [{"role": "robot", "content": "hello"}]}),
        ("chat/completions", {"messages": said, "tools": [{"type": "function"}]}),
        ("chat/completions", {"messages": said, "tool_choice": "required"}),
        ("chat/completions", {"messages": said, "top_logprobs": 3}),
        ("responses", {"input": []}),
        ("responses", {"input": "hello", "tools": [{"type": "web_search"}]}),
        ("messages", {"messages": said}),
        ("messages", {"messages": said, "max_tokens": 4, "temperature": 2}),
        ("generateContent", {"contents": []}),
        ("streamGenerateContent", {"contents": [{"parts": [{"text": "hello"}]}], "generationConfig": {"responseMimeType": "text/x.enum"}}),
    ]


_VERDICT = {
    "type": "object",
    "properties": {
        "verdict": {"enum": ["yes", "no", "perhaps"]},
        "score": {"type": "integer", "minimum": 0, "maximum": 99},
        "reason": {"type": "string", "maxLength": 12},
    },
    "required": ["verdict", "score", "reason"],
    "additionalProperties": False,
}
_TOOLS: list[Json] = [
    {"type": "function", "function": {"name": name, "description": description, "parameters": _VERDICT}}
    for name, description in (("look_up", "What is known of it."), ("decide", "What becomes of it."))
]


def _anthropic_tool(function: Json) -> Json:
    return {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}


def _declaration(tool: Json) -> Json:
    function = tool["function"]
    return {"name": function["name"], "description": function["description"], "parametersJsonSchema": function["parameters"]}


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
    "structured": _structured,
    "called": _called,
    "scored prompt": _scored_prompt,
    "chosen tokens": _chosen_tokens,
    "openai response": _openai_response,
    "anthropic message": _anthropic_message,
    "gemini content": _gemini_content,
    "likeliest": _likeliest,
    "kept prefix": _kept_prefix,
    "idle": _idle,
}
KINDS = tuple(_MAKERS)
