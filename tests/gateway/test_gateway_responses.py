"""The Responses API, by OpenAI's client against nodes whose model recites."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from gateway_cluster import MODEL, Cluster, Start

from engine.tokenizer.tokenizer import Tokenizer
from gateway.app import GatewayServer
from gateway.openai import responses_jobs, responses_store
from gateway.openai.responses_format import ResponseFormat
from gateway.openai.responses_store import ResponseStore
from gateway.output import Content, Delta, Ending, PlacedToken
from springtide.errors import Unavailable
from springtide.process import ProcessArguments
from springtide.protocol.outputs import Finish, SampledToken
from springtide.protocol.usage import Usage
from springtide.valkey import ValkeyClient
from tests.support.waiting import until

REPLY = "Hello, wörld! One two three four."


def prompt_of(cluster: Cluster, tokenizer: Tokenizer) -> str:
    """What the last request's model was given to read."""
    start: Start = cluster.started[-1][1]
    return tokenizer.decode(list(start.request.token_ids), skip_special_tokens=False)


async def test_a_text_is_answered_and_the_response_kept(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    cluster.cached_tokens = 3
    made = await client.responses.create(
        model=MODEL, input="Hi.", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, user="ann", max_output_tokens=50
    )
    assert made.status == "completed" and made.output_text == REPLY and made.id.startswith("resp_")
    assert made.completed_at is not None and made.error is None and made.incomplete_details is None
    assert made.usage is not None and made.usage.input_tokens_details.cached_tokens == 3
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    assert made.usage.output_tokens_details.reasoning_tokens == 0
    assert (made.instructions, made.metadata, made.temperature, made.user) == ("Be brief.", {"a": "b"}, 0.5, "ann")

    assert await client.responses.retrieve(made.id) == made
    items = await client.responses.input_items.list(made.id)
    assert [(item.type, item.role, item.content[0].text) for item in items.data] == [("message", "user", "Hi.")]
    await client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError) as gone:
        await client.responses.retrieve(made.id)
    assert gone.value.code == "response_not_found"


async def test_a_response_is_streamed_or_not_and_nothing_else(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    path = f"/v1/responses/{(await client.responses.create(model=MODEL, input='Hi.')).id}"
    assert (await http.get(path, params={"stream": "false"})).status_code == 200
    refused = await http.get(path, params={"stream": "perhaps"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream"


async def test_what_is_not_to_be_stored_is_not(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(model=MODEL, input="Hi.", store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)


async def test_a_stream_has_all_events_in_order(client: openai.AsyncOpenAI) -> None:
    events = [event async for event in await client.responses.create(model=MODEL, input="Hi.", stream=True)]
    kinds = [event.type for event in events]
    first, last = kinds[:4], kinds[-4:]
    assert first == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert set(kinds[4:-4]) == {"response.output_text.delta"} and len(kinds) > 10
    assert last == ["response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    completed: Any = events[-1]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == REPLY
    assert completed.response.output_text == REPLY and completed.response.usage.output_tokens > 5
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {completed.response.output[0].id}
    # It is there as soon as its last event is.
    assert await client.responses.retrieve(completed.response.id) == completed.response


async def test_the_clients_own_stream_helper_puts_the_response_together(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model=MODEL, input="Hi.") as stream:
        snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert final.output_text == snapshots[-1] == REPLY


async def test_cut_output_makes_an_incomplete_response(client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(model=MODEL, input="Hi.", max_output_tokens=3)
    assert whole.status == "incomplete" and whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens" and whole.output[0].status == "incomplete"
    events = [event async for event in await client.responses.create(model=MODEL, input="Hi.", max_output_tokens=3, stream=True)]
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == whole.output_text


async def test_an_empty_answer_is_a_message_without_text(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    cluster.script = lambda start: ()
    made = await client.responses.create(model=MODEL, input="Hi.")
    assert made.output_text == "" and [item.type for item in made.output] == ["message"]
    kinds = [event.type async for event in await client.responses.create(model=MODEL, input="Hi.", stream=True)]
    assert kinds[2:5] == ["response.output_item.added", "response.content_part.added", "response.output_text.done"]


async def test_log_probabilities_are_in_the_message(client: openai.AsyncOpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "input": "Hi.", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    whole = await client.responses.create(**options)
    entries = whole.output[0].content[0].logprobs
    assert "".join(bytes(byte for entry in entries for byte in entry.bytes).decode()) == REPLY
    assert all(entry.logprob == -0.5 and len(entry.top_logprobs) == 2 for entry in entries)
    events = [event async for event in await client.responses.create(**options, stream=True)]
    streamed = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    assert events[-1].response.output[0].content[0].logprobs == entries
    assert (await client.responses.retrieve(whole.id)).output[0].content[0].logprobs == []


@pytest.mark.parametrize("together", [1, 2, 5])
def test_streamed_log_probabilities_are_the_same_however_tokens_come(together: int) -> None:
    """Some have no text: of a character's bytes the first ones, and special tokens."""
    tokens = [PlacedToken(SampledToken(number, -0.5), 0) for number in range(5)]
    texts = ("", "a", "", "b", "")
    written = ResponseFormat("r", "resp", {}, 0, lambda placed: {"token": placed.token.token_id})
    events = list(written.begin())
    for begin in range(0, len(tokens), together):
        text = "".join(texts[begin : begin + together])
        events += written.delta(Delta(0, (Content(text),) if text else (), tuple(tokens[begin : begin + together])), Usage(0, 0, 0))
    events += written.delta(Delta(0, (), ending=Ending(Finish.STOP)), Usage(0, 0, 0))
    shown = [json.loads(event.decode().partition("data: ")[2]) for event in events]
    deltas = [event for event in shown if event["type"] == "response.output_text.delta"]
    assert [entry["token"] for delta in deltas for entry in delta["logprobs"]] == [0, 1, 2, 3, 4]
    assert "".join(delta["delta"] for delta in deltas) == "ab"
    assert [event["type"] for event in shown].count("response.output_item.added") == 1


@asynccontextmanager
async def other_client(arguments: ProcessArguments, cluster: Cluster, **server: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """Of a gateway with other settings."""
    config = arguments.config.model_copy(update={"server": arguments.config.server.model_copy(update=server)})
    gateway = GatewayServer(replace(arguments, config=config), cluster.conductor.address)
    await gateway.start()
    async with openai.AsyncOpenAI(base_url=f"http://{gateway.http_address}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client.with_options(default_headers={"X-Springtide-Tenant": "other"})
    await gateway.close()


async def test_a_response_is_kept_for_as_long_as_is_set(arguments: ProcessArguments, cluster: Cluster) -> None:
    async with other_client(arguments, cluster, responses_ttl_s=0.05) as client, asyncio.timeout(20):
        made = await client.responses.create(model=MODEL, input="Hi.")
        with pytest.raises(openai.NotFoundError) as gone:
            while True:
                # Each use lets it live longer.
                await asyncio.sleep(0.2)
                await client.responses.retrieve(made.id)
    assert gone.value.code == "response_not_found"


async def test_responses_have_as_many_bytes_as_are_set(arguments: ProcessArguments, cluster: Cluster) -> None:
    async with other_client(arguments, cluster, responses_size=10_000) as client:
        first, *_, last = [await client.responses.create(model=MODEL, input="word " * 300) for _ in range(8)]
        assert (await client.responses.retrieve(last.id)).id == last.id
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)


# ---- conversations ----


async def test_a_conversation_goes_on_from_a_response_without_its_instructions(
    client: openai.AsyncOpenAI, cluster: Cluster, tokenizer: Tokenizer
) -> None:
    first = await client.responses.create(model=MODEL, input="One?", instructions="Be a pirate.")
    second = await client.responses.create(model=MODEL, input="Two?", previous_response_id=first.id, instructions="Be a cook.")
    third = await client.responses.create(model=MODEL, input=[{"role": "user", "content": "Three?"}], previous_response_id=second.id)
    prompt = prompt_of(cluster, tokenizer)
    places = [prompt.index(text) for text in ("One?", REPLY, "Two?", "Three?")]
    assert places == sorted(places) and prompt.count(REPLY) == 2
    assert "pirate" not in prompt and "cook" not in prompt
    assert third.previous_response_id == second.id

    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=first.id):
        await client.responses.create(model=MODEL, input="Four?", previous_response_id=third.id)


async def test_an_item_can_be_referred_to(client: openai.AsyncOpenAI, cluster: Cluster, tokenizer: Tokenizer) -> None:
    first = await client.responses.create(model=MODEL, input="One?")
    reference: Any = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "Go on."}]
    second = await client.responses.create(model=MODEL, input=reference)
    prompt = prompt_of(cluster, tokenizer)
    assert prompt.index(REPLY) < prompt.index("Go on.") and "One?" not in prompt
    items = await client.responses.input_items.list(second.id, order="asc")
    assert items.data[0].id == first.output[0].id
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_nobody_0"}])


async def test_input_items_come_in_pages(client: openai.AsyncOpenAI) -> None:
    turns: Any = [{"role": "user", "content": f"Number {number}."} for number in range(5)]
    made = await client.responses.create(model=MODEL, input=turns)
    pages = [page async for page in (await client.responses.input_items.list(made.id, limit=2, order="asc")).iter_pages()]
    assert [len(page.data) for page in pages] == [2, 2, 1]
    assert [item.content[0].text for page in pages for item in page.data] == [turn["content"] for turn in turns]
    with pytest.raises(openai.BadRequestError, match="'msg_none'") as caught:
        await client.responses.input_items.list(made.id, after="msg_none")
    assert caught.value.param == "after"


async def test_calls_and_their_outputs_are_one_turn_each(client: openai.AsyncOpenAI) -> None:
    turns: Any = [
        {"role": "user", "content": "How warm is it?"},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Ulm"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "12"},
    ]
    assert (await client.responses.create(model=MODEL, input=turns)).output_text == REPLY
    with pytest.raises(openai.BadRequestError, match="no function_call with call_id 'c1'"):
        await client.responses.create(model=MODEL, input=[turns[0], turns[2]])


async def test_with_truncation_the_oldest_turns_make_room(client: openai.AsyncOpenAI, cluster: Cluster, tokenizer: Tokenizer) -> None:
    turns: Any = [{"role": "user", "content": f"Turn {number}: " + "word " * 300} for number in range(10)]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model=MODEL, input=turns, instructions="Be brief.")
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "input"
    made = await client.responses.create(model=MODEL, input=turns, instructions="Be brief.", truncation="auto", max_output_tokens=50)
    prompt = prompt_of(cluster, tokenizer)
    assert "Be brief." in prompt and "Turn 9:" in prompt and "Turn 0:" not in prompt and made.output_text == REPLY


async def test_the_tokens_of_a_prompt_are_counted(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model=MODEL, input="One?", instructions="Be brief.")
    counted = await client.responses.input_tokens.count(model=MODEL, input="One?", instructions="Be brief.")
    assert first.usage is not None and counted.input_tokens == first.usage.input_tokens
    second = await client.responses.create(model=MODEL, input="Two?", previous_response_id=first.id)
    counted = await client.responses.input_tokens.count(model=MODEL, input="Two?", previous_response_id=first.id)
    assert second.usage is not None and counted.input_tokens == second.usage.input_tokens


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


async def test_a_function_is_called_and_its_output_answered(client: openai.AsyncOpenAI, cluster: Cluster, tokenizer: Tokenizer) -> None:
    answer, call = tokenizer.encode(REPLY), tokenizer.encode(CALL)
    cluster.script = lambda start: call
    options: Any = {"model": MODEL, "tools": [WEATHER]}
    first = await client.responses.create(**options, input="How warm is it in Ulm?")
    (called,) = first.output
    assert called.type == "function_call" and called.name == "weather" and json.loads(called.arguments) == {"city": "Ulm"}

    events = [event async for event in await client.responses.create(**options, input="How warm is it in Ulm?", stream=True)]
    assert [event.type for event in events if "arguments.delta" not in event.type] == [
        *("response.created", "response.in_progress", "response.output_item.added"),
        *("response.function_call_arguments.done", "response.output_item.done", "response.completed"),
    ]
    assert "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta") == called.arguments

    cluster.script = lambda start: answer
    output: Any = [{"type": "function_call_output", "call_id": called.call_id, "output": "12 degrees"}]
    second = await client.responses.create(**options, input=output, previous_response_id=first.id)
    prompt = prompt_of(cluster, tokenizer)
    assert prompt.index("How warm") < prompt.index('{"name": "weather", "arguments": {"city": "Ulm"}}') < prompt.index("12 degrees")
    assert second.output_text == REPLY


# ---- what is refused ----


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp", "server_label": "x", "server_url": "http://x"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True, "store": False}, "background"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]}, "input[0].content"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": "x", "colour": "red"}]}, "input[0].colour"),
        ({"input": []}, "input"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"colour": "red"}, "colour"),
        ({"previous_response_id": "resp_nothing"}, "previous_response_id"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(http: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    answer = await http.post("/v1/responses", json={"model": MODEL, "input": "Hi.", **fields})
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param


async def test_tenants_do_not_see_each_others_responses(http: httpx.AsyncClient) -> None:
    mine, other = {"x-springtide-tenant": "ann"}, {"x-springtide-tenant": "bob"}
    made = (await http.post("/v1/responses", json={"model": MODEL, "input": "Hi."}, headers=mine)).json()
    path = f"/v1/responses/{made['id']}"
    assert (await http.get(path, headers=mine)).status_code == 200
    for request in (http.get(path, headers=other), http.delete(path, headers=other), http.get(f"{path}/input_items", headers=other)):
        assert (await request).status_code == 404
    body = {"model": MODEL, "input": "Hi.", "previous_response_id": made["id"]}
    assert (await http.post("/v1/responses", json=body, headers=other)).status_code == 404


# ---- in the background ----


async def ended(client: openai.AsyncOpenAI, response_id: str) -> Any:
    while (response := await client.responses.retrieve(response_id)).status == "in_progress":  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return response


async def test_a_background_response_is_polled_for(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(model=MODEL, input="Hi.", background=True)
    assert made.status == "in_progress" and made.output == [] and made.background
    response = await ended(client, made.id)
    assert response.status == "completed" and response.output_text == REPLY and response.usage.output_tokens > 5
    # Its end is final.
    assert (await client.responses.cancel(made.id)).status == "completed"
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel((await client.responses.create(model=MODEL, input="Hi.")).id)


async def test_a_background_stream_can_be_taken_up_again(client: openai.AsyncOpenAI, gateway: GatewayServer) -> None:
    stream = await client.responses.create(model=MODEL, input="Hi.", background=True, stream=True)
    first: list[Any] = []
    async for event in stream:
        first.append(event)
        if len(first) == 6:
            break
    await stream.close()
    response_id = first[0].response.id
    rest = [event async for event in await client.responses.retrieve(response_id, stream=True, starting_after=first[-1].sequence_number)]
    events = [*first, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == REPLY
    assert events[-1].type == "response.completed"


async def test_a_background_response_is_cancelled(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    cluster.nodes["decode-0"].pause_at = cluster.nodes["decode-1"].pause_at = 4
    stream = await client.responses.create(model=MODEL, input="Hi.", background=True, stream=True)
    events: list[Any] = [await anext(stream) for _ in range(6)]
    cancelled = await client.responses.cancel(events[0].response.id)
    assert cancelled.status == "cancelled"
    events += [event async for event in stream]
    assert events[-1].type == "response.incomplete" and events[-1].response.status == "cancelled"
    await until(lambda: cluster.idle)
    text = (await client.responses.retrieve(cancelled.id)).output_text
    assert text and REPLY.startswith(text) and text != REPLY


async def test_of_background_responses_that_are_asked_for_at_once_as_many_begin_as_may(
    client: openai.AsyncOpenAI, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses_jobs, "MOST_JOBS", 2)
    for node in cluster.nodes.values():
        node.pause_at = 0
    asked = (client.responses.create(model=MODEL, input="Hi.", background=True) for _ in range(6))
    made = await asyncio.gather(*asked, return_exceptions=True)
    begun = [one for one in made if not isinstance(one, BaseException)]
    assert len(begun) == 2 and sum(isinstance(one, openai.RateLimitError) for one in made) == 4
    await client.responses.cancel(begun[0].id)
    async with asyncio.timeout(10):
        while True:
            try:
                await client.responses.create(model=MODEL, input="Hi.", background=True)
                break
            except openai.RateLimitError:
                await asyncio.sleep(0.01)
    for node in cluster.nodes.values():
        node.patience.set()


async def test_a_background_response_is_whole_though_answers_of_valkey_do_not_come(
    client: openai.AsyncOpenAI, gateway: GatewayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked for has been done, as when the machine stood still for longer than answers are waited for."""
    calls = itertools.count()

    def unheard(method: Callable[..., Awaitable[Any]], error: Exception) -> Callable[..., Awaitable[Any]]:
        async def call(*arguments: Any, **named: Any) -> Any:
            answer = await method(*arguments, **named)
            if next(calls) % 2:
                raise error
            return answer

        return call

    for module in (responses_jobs, responses_store):
        monkeypatch.setattr(module, "AGAIN_S", 0.01)
    for name in ("end", "add_events", "end_run"):
        monkeypatch.setattr(ResponseStore, name, unheard(getattr(ResponseStore, name), Unavailable("no answer came")))
    monkeypatch.setattr(ValkeyClient, "xread", unheard(ValkeyClient.xread, TimeoutError("no answer came")))
    events = [event async for event in await client.responses.create(model=MODEL, input="Hi.", background=True, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == REPLY
    assert events[-1].type == "response.completed"
    assert (await ended(client, events[0].response.id)).output_text == REPLY


@pytest.fixture
async def second(arguments: ProcessArguments, cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of another gateway before the same Conductor."""
    gateway = GatewayServer(arguments, cluster.conductor.address)
    await gateway.start()
    async with openai.AsyncOpenAI(base_url=f"http://{gateway.http_address}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client
    await gateway.close()


async def test_any_gateway_has_all_responses(
    client: openai.AsyncOpenAI, second: openai.AsyncOpenAI, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses_jobs, "RENEW_S", 0.05)
    first = await client.responses.create(model=MODEL, input="One?")
    assert await second.responses.retrieve(first.id) == first
    assert (await second.responses.create(model=MODEL, input="Two?", previous_response_id=first.id)).output_text == REPLY

    cluster.nodes["decode-0"].pause_at = cluster.nodes["decode-1"].pause_at = 4
    made = await client.responses.create(model=MODEL, input="Hi.", background=True)
    events = await second.responses.retrieve(made.id, stream=True)
    assert [(await anext(events)).type for _ in range(4)][-1] == "response.content_part.added"
    await second.responses.cancel(made.id)
    assert [event.type async for event in events][-1] == "response.incomplete"
    await until(lambda: cluster.idle)


async def test_whoever_follows_a_response_that_is_deleted_is_told(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    cluster.nodes["decode-0"].pause_at = cluster.nodes["decode-1"].pause_at = 4
    made = await client.responses.create(model=MODEL, input="Hi.", background=True)
    async with (
        httpx.AsyncClient(base_url=str(client.base_url), timeout=20) as http,
        http.stream("GET", f"responses/{made.id}", params={"stream": "true"}) as answer,
    ):
        lines = answer.aiter_lines()
        async for line in lines:
            if "response.content_part.added" in line:
                break
        await client.responses.delete(made.id)
        rest = [line async for line in lines if line.startswith("data: ")]
    last = json.loads(rest[-1].removeprefix("data: "))
    assert last["type"] == "error" and last["code"] == "response_not_found" and last["sequence_number"] > 3
    await until(lambda: cluster.idle)


async def test_the_events_of_a_response_are_kept_while_it_is_made(gateway: GatewayServer) -> None:
    store = ResponseStore(gateway._valkey, "another-cluster", 60.0, 1 << 20)
    await store.begin_run("", "resp_1")
    await store.add_events("", "resp_1", [b"data: {}\n\n"], 0, last=False)
    await gateway._valkey.pexpire(store._events_key("", "resp_1"), 1000)
    assert await store.renew_run("", "resp_1")
    assert await gateway._valkey.pttl(store._events_key("", "resp_1")) > 1000 * (responses_store.EVENTS_KEPT_S - 60)


async def test_a_response_whose_gateway_dies_has_failed(
    client: openai.AsyncOpenAI, second: openai.AsyncOpenAI, gateway: GatewayServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses_store, "LEASE_S", 1.0)
    cluster.nodes["decode-0"].pause_at = cluster.nodes["decode-1"].pause_at = 4
    made = await client.responses.create(model=MODEL, input="Hi.", background=True)
    await gateway.close()
    events = [event async for event in await second.responses.retrieve(made.id, stream=True)]
    assert events[-1].type == "response.failed" and [event.sequence_number for event in events] == list(range(len(events)))
    failed = await ended(second, made.id)
    assert failed.status == "failed" and failed.error is not None and failed.error.code == "server_error"
    with pytest.raises(openai.BadRequestError, match="failed"):
        await second.responses.create(model=MODEL, input="Go on.", previous_response_id=made.id)
