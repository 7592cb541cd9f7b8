"""OpenAI's client and its Responses API, unmodified, against a running cluster."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.support.cluster import Cluster

LONG = "Tell me a long story about the sea and the moon. " * 4


WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False},
    "strict": True,
}


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_a_stream_says_what_the_whole_response_says(cluster: Cluster, client: openai.OpenAI) -> None:
    options: Any = {"model": cluster.model, "input": "Name three colours.", "max_output_tokens": 400, "temperature": 0}
    whole = client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text and text == whole.output_text == final.output_text
    assert client.responses.retrieve(final.id).output_text == text


def test_the_second_turn_reuses_the_first_answer(cluster: Cluster, client: openai.OpenAI) -> None:
    first = client.responses.create(
        model=cluster.model, input=LONG, max_output_tokens=200, temperature=0, extra_body={"ignore_eos": True, "repetition_penalty": 1.2}
    )
    second = client.responses.create(
        model=cluster.model, input="And then?", previous_response_id=first.id, max_output_tokens=8, temperature=0
    )
    assert first.usage is not None and second.usage is not None
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached > first.usage.input_tokens // 64 * 64, "only the prompt was reused, not the answer"


def test_a_function_is_called_and_its_output_answered(cluster: Cluster, client: openai.OpenAI) -> None:
    options: Any = {"model": cluster.model, "tools": [WEATHER], "max_output_tokens": 60, "temperature": 0}
    question = "What is the weather in Paris?"
    first = client.responses.create(**options, input=question, tool_choice={"type": "function", "name": "get_weather"})
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert call.name == "get_weather" and set(json.loads(call.arguments)) == {"city"}

    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 21 degrees."}]
    second = client.responses.create(**options, input=output, previous_response_id=first.id, tool_choice="none")
    assert [item.type for item in second.output] == ["message"] and second.output_text

    events = list(client.responses.create(**options, input=question, tool_choice={"type": "function", "name": "get_weather"}, stream=True))
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert "".join(pieces) == done.arguments == call.arguments


class City(BaseModel):
    name: Literal["Paris", "Rome", "Ulm"]
    warm: bool


def test_an_answer_is_parsed_as_what_it_was_to_be(cluster: Cluster, client: openai.OpenAI) -> None:
    options: Any = {"model": cluster.model, "input": "Tell me of a city in France, as JSON.", "max_output_tokens": 60}
    parsed = [client.responses.parse(**options, text_format=City, extra_body={"seed": seed}).output_parsed for seed in range(3)]
    assert all(isinstance(city, City) for city in parsed)
    with client.responses.stream(**options, text_format=City) as stream:
        assert isinstance(stream.get_final_response().output_parsed, City)
    anything = client.responses.create(**options, text={"format": {"type": "json_object"}}, temperature=0)
    assert anything.status == "incomplete" or isinstance(json.loads(anything.output_text), dict)
    for background in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            nonsense: Any = {"type": "json_schema", "name": "x", "schema": {"type": "colour"}}
            client.responses.create(**options, text={"format": nonsense}, background=background)
        assert refused.value.param == "text.format"


async def test_the_asynchronous_client_follows_a_background_response(cluster: Cluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        options: Any = {"model": cluster.model, "input": LONG, "temperature": 0}
        stream = await client.responses.create(**options, max_output_tokens=16, background=True, stream=True)
        events = [event async for event in stream]
        again = [event async for event in await client.responses.retrieve(events[0].response.id, stream=True, starting_after=3)]
        assert again == events[4:] and events[-1].type == "response.incomplete"

        made = await client.responses.create(**options, max_output_tokens=2000, background=True, extra_body={"ignore_eos": True})
        cancelled = await client.responses.cancel(made.id)
        assert cancelled.status == "cancelled" == (await client.responses.retrieve(made.id)).status
