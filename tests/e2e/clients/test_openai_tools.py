"""Tools, formats and what benchmarks send, by OpenAI's own client against a running cluster."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from tests.support.cluster import Cluster

QUESTION: list[Any] = [{"role": "user", "content": "How is the weather in Rome, and what time is it there?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "The weather in a city.", "parameters": CITY}}
TIME: Any = {"type": "function", "function": {"name": "time_now", "description": "The time.", "parameters": {"type": "object"}}}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tool_that_is_named_is_called_with_arguments_of_its_schema(cluster: Cluster, client: openai.OpenAI, temperature: float) -> None:
    options: Any = {"model": cluster.model, "messages": QUESTION, "tools": [WEATHER, TIME], "tool_choice": NAMED, "seed": 3}
    whole = client.chat.completions.create(**options, temperature=temperature)
    (call,) = whole.choices[0].message.tool_calls
    assert whole.choices[0].finish_reason == "tool_calls" and call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), CITY)
    chunks = list(client.chat.completions.create(**options, temperature=temperature, stream=True))
    pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert pieces[0].function.name == "weather"
    assert "".join(piece.function.arguments or "" for piece in pieces) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_some_tool_is_called_where_one_has_to_be(cluster: Cluster, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=cluster.model, messages=QUESTION, tools=[WEATHER, TIME], tool_choice="required", temperature=1, seed=5, max_tokens=300
    )
    calls = answer.choices[0].message.tool_calls
    assert calls and {call.function.name for call in calls} <= {"weather", "time_now"}


def test_an_agents_loop_comes_to_its_end(cluster: Cluster, client: openai.OpenAI) -> None:
    messages, choice = list(QUESTION), NAMED
    for _ in range(3):
        answer = client.chat.completions.create(
            model=cluster.model, messages=messages, tools=[WEATHER], tool_choice=choice, temperature=0, max_tokens=60
        )
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "24 degrees, sunny"} for call in message.tool_calls]
        choice = "none"
    assert len(messages) == 4 and messages[-1].content


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)
    mood: Literal["good", "bad"]


def test_an_answer_is_parsed_into_the_clients_own_type(cluster: Cluster, client: openai.OpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": "Make up a person."}]
    for temperature in (0, 1):
        answer = client.chat.completions.parse(
            model=cluster.model, messages=asked, response_format=Person, temperature=temperature, seed=1, max_tokens=200
        )
        assert isinstance(answer.choices[0].message.parsed, Person)


def test_a_format_leaves_calls_possible(cluster: Cluster, client: openai.OpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": "Make up a person."}]
    answer = client.chat.completions.parse(
        model=cluster.model,
        messages=asked,
        response_format=Person,
        tools=[openai.pydantic_function_tool(Person, name="person")],
        temperature=0,
        max_tokens=200,
    )
    message = answer.choices[0].message
    assert isinstance(message.parsed, Person) or (
        message.tool_calls and isinstance(message.tool_calls[0].function.parsed_arguments, Person)
    )


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, r"[a-c]{3}-[0-9]{2}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"regex": "(ab){1,3}!"}}, r"(ab){1,3}!"),
        ({"structured_outputs": {"grammar": 'start: "x" ("y" | "z")'}}, "x[yz]"),
    ],
)
def test_vllms_formats_hold(cluster: Cluster, client: openai.OpenAI, extra: dict[str, Any], pattern: str) -> None:
    answer = client.completions.create(model=cluster.model, prompt="Say it:", max_tokens=40, temperature=1, seed=2, extra_body=extra)
    assert re.fullmatch(pattern, answer.choices[0].text)


def test_what_guidellm_and_evalscope_send_is_served(cluster: Cluster, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=cluster.model,
        messages=QUESTION,
        max_completion_tokens=8,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        extra_body={"min_tokens": 0, "ignore_eos": True, "skip_special_tokens": True, "chat_template_kwargs": {}},
    )
    counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts == sorted(counts) and counts[-1] == 8


def test_the_models_own_sampling_is_the_default(cluster: Cluster) -> None:
    body = {"model": cluster.model, "messages": QUESTION, "max_tokens": 30, "seed": 11}
    own = {"temperature": 0.2, "top_p": 0.9}
    plain, told, hot = (
        httpx.post(f"{cluster.url}/v1/chat/completions", json={**body, **extra}, timeout=60).json()["choices"][0]["message"]["content"]
        for extra in ({}, own, {"temperature": 2.0, "top_p": 1.0})
    )
    assert plain == told != hot
