"""Anthropic's and Google's clients, unmodified, against a running cluster."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import anthropic
import pytest
from google import genai
from google.genai import types
from pydantic import BaseModel, Field

from tests.support.cluster import Cluster

QUESTION: list[Any] = [{"role": "user", "content": "Name three colours."}]
GREEDY = {"temperature": 0}
"""Anthropic's newest client has no argument for it."""
LONG = "You answer in one short sentence, and you never speak of the weather, of politics or of yourself. " * 12


@pytest.fixture(scope="module")
def claude(cluster: Cluster) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=cluster.url, api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def gemini(cluster: Cluster) -> genai.Client:
    return genai.Client(api_key="none", http_options=types.HttpOptions(base_url=cluster.url, timeout=120_000))


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_anthropic_s_stream_says_what_the_whole_message_says(cluster: Cluster, claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(model=cluster.model, max_tokens=24, extra_body=GREEDY, messages=QUESTION)
    with claude.messages.stream(model=cluster.model, max_tokens=24, extra_body=GREEDY, messages=QUESTION) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text and text == text_of(whole) == text_of(final)
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens


def test_anthropic_s_usage_tells_what_was_found_in_the_pool(cluster: Cluster, claude: anthropic.Anthropic) -> None:
    options: dict[str, Any] = {"model": cluster.model, "max_tokens": 4, "extra_body": GREEDY, "system": LONG, "messages": QUESTION}
    counted = claude.messages.count_tokens(model=cluster.model, system=LONG, messages=QUESTION).input_tokens
    first, second = (claude.messages.create(**options).usage for _ in range(2))
    for usage in (first, second):
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert first.cache_read_input_tokens == 0 and (second.cache_read_input_tokens or 0) >= 128


def test_anthropic_s_answer_goes_on_with_the_assistant_s_words(cluster: Cluster, claude: anthropic.Anthropic) -> None:
    begun: list[Any] = [*QUESTION, {"role": "assistant", "content": "Three colours are red, green and"}]
    answer = text_of(claude.messages.create(model=cluster.model, max_tokens=6, extra_body=GREEDY, messages=begun))
    assert answer and not answer.startswith("Three colours"), "it is the rest alone"


async def test_anthropic_s_asynchronous_client_asks_several_at_once(cluster: Cluster) -> None:
    async with anthropic.AsyncAnthropic(base_url=cluster.url, api_key="none", max_retries=0, timeout=120) as client:
        asked = [client.messages.create(model=cluster.model, max_tokens=12, extra_body=GREEDY, messages=QUESTION) for _ in range(4)]
        answers = {text_of(message) for message in await asyncio.gather(*asked)}
    assert len(answers) == 1


def test_google_s_stream_says_what_the_whole_answer_says(cluster: Cluster, gemini: genai.Client) -> None:
    config = types.GenerateContentConfig(max_output_tokens=24, temperature=0)
    whole = gemini.models.generate_content(model=cluster.model, contents="Name three colours.", config=config)
    pieces = list(gemini.models.generate_content_stream(model=cluster.model, contents="Name three colours.", config=config))
    assert whole.text and "".join(piece.text or "" for piece in pieces) == whole.text
    assert whole.candidates is not None and pieces[-1].candidates is not None
    assert pieces[-1].candidates[0].finish_reason == whole.candidates[0].finish_reason


def test_the_second_turn_of_google_s_chat_finds_the_first(cluster: Cluster, gemini: genai.Client) -> None:
    config = types.GenerateContentConfig(max_output_tokens=24, temperature=0, system_instruction=LONG)
    chat = gemini.chats.create(model=cluster.model, config=config)
    first = chat.send_message("Name three colours.").usage_metadata
    second = chat.send_message("And three animals.").usage_metadata
    assert (
        first is not None and second is not None and (second.cached_content_token_count or 0) >= (first.prompt_token_count or 0) // 64 * 64
    )


def test_all_three_apis_give_the_same_answer_to_the_same_question(
    cluster: Cluster, claude: anthropic.Anthropic, gemini: genai.Client
) -> None:
    message = claude.messages.create(model=cluster.model, max_tokens=16, extra_body=GREEDY, messages=QUESTION)
    config = types.GenerateContentConfig(max_output_tokens=16, temperature=0)
    content = gemini.models.generate_content(model=cluster.model, contents="Name three colours.", config=config)
    assert text_of(message) == content.text


class Colour(BaseModel):
    name: Annotated[str, Field(max_length=20)]
    warm: bool


def test_anthropic_s_parsed_messages_are_of_the_model_that_was_asked_for(cluster: Cluster, claude: anthropic.Anthropic) -> None:
    parsed = claude.messages.parse(model=cluster.model, max_tokens=100, messages=QUESTION, output_format=Colour)
    assert isinstance(parsed.parsed_output, Colour)


def test_google_s_parsed_answers_are_of_the_schema_that_was_asked_for(cluster: Cluster, gemini: genai.Client) -> None:
    config = types.GenerateContentConfig(max_output_tokens=100, response_mime_type="application/json", response_schema=Colour)
    assert isinstance(gemini.models.generate_content(model=cluster.model, contents="Name a colour.", config=config).parsed, Colour)
    words = types.Schema(type=types.Type.STRING, enum=["red", "green"])
    config = types.GenerateContentConfig(max_output_tokens=10, response_mime_type="text/x.enum", response_schema=words)
    assert gemini.models.generate_content(model=cluster.model, contents="Name a colour.", config=config).text in ("red", "green")


WEATHER: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}


def test_a_tool_that_anthropic_s_client_demands_is_called(cluster: Cluster, claude: anthropic.Anthropic) -> None:
    tools: list[Any] = [{"name": name, "input_schema": WEATHER} for name in ("weather", "news")]
    for choice, names in (({"type": "any"}, {"weather", "news"}), ({"type": "tool", "name": "news"}, {"news"})):
        options: dict[str, Any] = {"tools": tools, "tool_choice": {**choice, "disable_parallel_tool_use": True}, "messages": QUESTION}
        message = claude.messages.create(model=cluster.model, max_tokens=200, **options)
        (call,) = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == "tool_use" and call.name in names and isinstance(call.input["city"], str)


def test_a_function_that_google_s_client_demands_is_called(cluster: Cluster, gemini: genai.Client) -> None:
    declared = [types.FunctionDeclaration(name=name, parameters_json_schema=WEATHER) for name in ("weather", "news")]
    calling = types.FunctionCallingConfig(mode=types.FunctionCallingConfigMode.ANY, allowed_function_names=["news"])
    config = types.GenerateContentConfig(
        max_output_tokens=300,
        tools=[types.Tool(function_declarations=declared)],
        tool_config=types.ToolConfig(function_calling_config=calling),
    )
    calls = gemini.models.generate_content(model=cluster.model, contents="How is it?", config=config).function_calls
    assert calls and {call.name for call in calls} == {"news"} and all(isinstance((call.args or {})["city"], str) for call in calls)
