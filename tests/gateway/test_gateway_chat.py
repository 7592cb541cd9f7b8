"""Chat Completions beyond plain text, with OpenAI's own client: tools, reasoning, what templates are told, usage while it streams."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from gateway_cluster import MODEL, Cluster

from engine.tokenizer.tokenizer import Tokenizer

QUESTION: list[Any] = [{"role": "user", "content": "How is it in Rome?"}]
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
ARGUMENTS = '{"city": "Rome, \\"IT\\""}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


def says(cluster: Cluster, tokenizer: Tokenizer, text: str) -> None:
    reply = tokenizer.encode(text)
    cluster.script = lambda start: reply


def prompt_of(cluster: Cluster, tokenizer: Tokenizer) -> str:
    """Of the last request."""
    return tokenizer.decode(list(cluster.started[-1][1].request.token_ids), skip_special_tokens=False)


async def test_a_call_of_a_tool_is_told_as_such(client: openai.AsyncOpenAI, cluster: Cluster, tokenizer: Tokenizer) -> None:
    says(cluster, tokenizer, f"Let me look.\n{CALL}")
    choice = (await client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[WEATHER])).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and (call.function.name, call.function.arguments) == ("weather", ARGUMENTS) and call.id


async def test_calls_are_streamed_piece_by_piece(client: openai.AsyncOpenAI, cluster: Cluster, tokenizer: Tokenizer) -> None:
    says(cluster, tokenizer, f"{CALL}\n{CALL}")
    stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[WEATHER], stream=True)
    deltas = [chunk.choices[0].delta for chunk in [chunk async for chunk in stream]]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls if call.function and call.function.name] == [(0, "weather"), (1, "weather")]
    for index in (0, 1):
        pieces = [call.function.arguments or "" for call in calls if call.index == index and call.function]
        assert "".join(pieces) == ARGUMENTS and len(pieces) > 5
    assert len({call.id for call in calls if call.id}) == 2
    assert not any(delta.content for delta in deltas)


async def test_one_call_at_most_where_one_is_wanted(client: openai.AsyncOpenAI, cluster: Cluster, tokenizer: Tokenizer) -> None:
    says(cluster, tokenizer, f"{CALL}\n{CALL}")
    answer = await client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[WEATHER], parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls or []) == 1


@pytest.mark.parametrize("options", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
async def test_without_tools_nothing_is_a_call(
    client: openai.AsyncOpenAI, cluster: Cluster, tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    says(cluster, tokenizer, CALL)
    choice = (await client.chat.completions.create(model=MODEL, messages=QUESTION, **options)).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")
    assert "weather" not in prompt_of(cluster, tokenizer)


async def test_an_agents_turns_go_into_the_prompt(client: openai.AsyncOpenAI, cluster: Cluster, tokenizer: Tokenizer) -> None:
    says(cluster, tokenizer, CALL)
    first = await client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[WEATHER])
    message = first.choices[0].message
    assert message.tool_calls
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    says(cluster, tokenizer, "Sunny.")
    answer = await client.chat.completions.create(model=MODEL, messages=[*QUESTION, message, result], tools=[WEATHER])
    assert answer.choices[0].message.content == "Sunny." and answer.choices[0].finish_reason == "stop"
    prompt = prompt_of(cluster, tokenizer)
    assert json.dumps(json.loads(ARGUMENTS)) in prompt and "<tool_response>\nsunny\n</tool_response>" in prompt


async def test_usage_is_told_with_each_chunk_where_it_is_wanted(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True, stream_options=options)
    usages = [chunk.usage for chunk in [chunk async for chunk in stream]]
    counts = [usage.completion_tokens for usage in usages if usage is not None]
    assert len(counts) == len(usages) and counts == sorted(counts) and counts[0] < counts[-1]


async def test_an_answer_goes_on_with_the_last_message(client: openai.AsyncOpenAI, cluster: Cluster, tokenizer: Tokenizer) -> None:
    begun: Any = [*QUESTION, {"role": "assistant", "content": "It is"}]
    await client.chat.completions.create(model=MODEL, messages=begun, extra_body={"continue_final_message": True})
    assert prompt_of(cluster, tokenizer).endswith("<|im_start|>assistant\nIt is")


async def test_a_stop_string_is_kept_where_that_is_wanted(client: openai.AsyncOpenAI) -> None:
    kept = {"include_stop_str_in_output": True}
    answer = await client.completions.create(model=MODEL, prompt="x", stop=["! One"], extra_body=kept)
    assert answer.choices[0].text == "Hello, wörld! One"
    assert answer.choices[0].model_extra == {"stop_reason": "! One"}


async def test_of_a_long_prompt_the_end_is_taken_where_that_is_wanted(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    last = list(range(400, 405))
    for count, expected in ((5, last), (-1, None)):
        options = {"truncate_prompt_tokens": count}
        await client.completions.create(model=MODEL, prompt=[*[7] * 3000, *last], max_tokens=4, extra_body=options)
        request = cluster.started[-1][1].request
        taken = list(request.token_ids[: request.num_prompt_tokens])
        assert taken == expected if expected else len(taken) == 1996 and taken[-5:] == last


async def test_salts_keep_blocks_apart(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    for salt in ("a", "b", "a", None):
        await client.completions.create(model=MODEL, prompt=[7] * 100, extra_body={"cache_salt": salt})
    first, second, third, plain = (request.block_keys for request in cluster.conductor.requests)
    assert first == third and len({first, second, plain}) == 3
