"""Anthropic's and Google's clients, unmodified, against a gateway whose model recites a script."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import pytest
from gateway_cluster import MODEL, Cluster
from google import genai
from google.genai import errors as genai_errors
from google.genai import types

from engine.tokenizer.tokenizer import Tokenizer
from gateway.app import GatewayServer
from springtide.process import ProcessArguments
from springtide.protocol import wire
from springtide.protocol.scheduling import Reason, Rejection
from springtide.rpc import common_pb2 as pb
from tests.support.waiting import until

SAID = "Hello, wörld! One two three four."
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [{"name": "weather", "description": "How it is.", "input_schema": _CITY}]
CONTENTS = [{"parts": [{"text": "Hello"}]}]


@pytest.fixture
async def claude(gateway: GatewayServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=f"http://{gateway.http_address}", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
async def gemini(gateway: GatewayServer) -> AsyncIterator[Any]:
    client = genai.Client(api_key="none", http_options=types.HttpOptions(base_url=f"http://{gateway.http_address}", timeout=20_000))
    yield client.aio
    await client.aio.aclose()


def fail(cluster: Cluster) -> None:
    for name in ("decode-0", "decode-1"):
        cluster.nodes[name].failure = pb.Failure(code=pb.FAILURE_CODE_INTERNAL, message="lost the store")


def one_call(cluster: Cluster, tokenizer: Tokenizer) -> None:
    """The model asks how the weather is, and knows it once it has been told."""
    asked = tokenizer.encode('Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>')
    known = tokenizer.encode("It rains.")
    cluster.script = lambda start: known if "rain in" in tokenizer.decode(start.request.token_ids) else asked


class TestAnthropic:
    async def test_a_message(self, claude: anthropic.AsyncAnthropic, cluster: Cluster) -> None:
        cluster.cached_tokens = 5
        message = await claude.messages.create(model=MODEL, max_tokens=50, messages=HELLO, system="Be brief.")
        assert [block.text for block in message.content if block.type == "text"] == [SAID]
        assert message.stop_reason == "end_turn" and message.model == MODEL and message._request_id == message.id
        assert message.usage.cache_read_input_tokens == 5 and message.usage.input_tokens > 5 and message.usage.output_tokens > 5

    async def test_the_streaming_helper_says_what_the_whole_message_says(self, claude: anthropic.AsyncAnthropic) -> None:
        whole = await claude.messages.create(model=MODEL, max_tokens=50, messages=HELLO)
        async with claude.messages.stream(model=MODEL, max_tokens=50, messages=HELLO) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == SAID and [block.type for block in final.content] == [block.type for block in whole.content] == ["text"]
        assert final.usage == whole.usage and final.stop_reason == "end_turn"

    async def test_a_stream_begins_with_what_was_cached_and_written(self, claude: anthropic.AsyncAnthropic, cluster: Cluster) -> None:
        cluster.cached_tokens = 16
        asked: Any = {
            "model": MODEL,
            "max_tokens": 50,
            "messages": HELLO,
            "system": [{"type": "text", "text": "The tide. " * 60, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        }
        whole = await claude.messages.create(**asked)
        async with claude.messages.stream(**asked) as stream:
            begun = await anext(aiter(stream))
            final = await stream.get_final_message()
        assert begun.type == "message_start" and begun.message.usage.cache_read_input_tokens == 16
        assert begun.message.usage.input_tokens == whole.usage.input_tokens
        assert final.usage.cache_creation and final.usage.cache_creation.ephemeral_1h_input_tokens > 50
        assert final.usage == whole.usage

    async def test_why_it_stopped(self, claude: anthropic.AsyncAnthropic) -> None:
        cut = await claude.messages.create(model=MODEL, max_tokens=3, messages=HELLO)
        assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 3
        stopped = await claude.messages.create(model=MODEL, max_tokens=50, messages=HELLO, stop_sequences=["two", "three"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "two")
        assert [block.text for block in stopped.content if block.type == "text"] == [SAID.split("two")[0]]

    async def test_tokens_are_counted_as_they_are_used(self, claude: anthropic.AsyncAnthropic) -> None:
        counted = await claude.messages.count_tokens(model=MODEL, messages=HELLO, system="Be brief.")
        used = await claude.messages.create(model=MODEL, max_tokens=1, messages=HELLO, system="Be brief.")
        assert counted.input_tokens == used.usage.input_tokens

    async def test_models_are_anthropic_s(self, claude: anthropic.AsyncAnthropic) -> None:
        assert [model.id async for model in claude.models.list()] == [MODEL]
        model = await claude.models.retrieve(MODEL)
        assert model.type == "model" and model.max_input_tokens == 2000 and model.created_at.year >= 2026

    async def test_errors_are_anthropic_s(self, claude: anthropic.AsyncAnthropic, cluster: Cluster) -> None:
        with pytest.raises(anthropic.BadRequestError) as invalid:
            await claude.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": [{"type": "image"}]}])  # type: ignore[typeddict-item,misc,list-item]
        assert invalid.value.type == "invalid_request_error" and "messages[0].content[0]" in str(invalid.value.api_message)
        assert invalid.value.request_id
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await claude.messages.create(model="other", max_tokens=5, messages=HELLO)
        assert unknown.value.type == "not_found_error"
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            await claude.post("/v1/messages", body={"model": MODEL, "messages": HELLO}, cast_to=object)
        with pytest.raises(anthropic.NotFoundError):
            await claude.post("/v1/messages/batches/nonsense", body={}, cast_to=object)
        cluster.conductor.rejections.append(wire.REJECTION.encode(Rejection(Reason.TTFT, "too much to do", 2.0)))
        with pytest.raises(anthropic.RateLimitError) as busy:
            await claude.messages.create(model=MODEL, max_tokens=5, messages=HELLO)
        assert busy.value.type == "rate_limit_error" and busy.value.response.headers["retry-after"] == "2"

    async def test_a_tool_is_called_and_its_result_is_read(
        self, claude: anthropic.AsyncAnthropic, cluster: Cluster, tokenizer: Tokenizer
    ) -> None:
        one_call(cluster, tokenizer)
        whole = await claude.messages.create(model=MODEL, max_tokens=90, messages=HELLO, tools=TOOLS)
        async with claude.messages.stream(model=MODEL, max_tokens=90, messages=HELLO, tools=TOOLS) as stream:
            streamed = await stream.get_final_message()
        for message in (whole, streamed):
            text, call = message.content
            assert message.stop_reason == "tool_use" and text.type == "text" and text.text.strip() == "Let me see."
            assert call.type == "tool_use" and (call.name, call.input) == ("weather", {"city": "Köln"})
            result: list[Any] = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain in Köln"}]
            said: list[Any] = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": result}]
            answer = await claude.messages.create(model=MODEL, max_tokens=90, messages=said, tools=TOOLS)
            assert [block.text for block in answer.content if block.type == "text"] == ["It rains."] and answer.stop_reason == "end_turn"

    async def test_results_over_neighbouring_messages_are_read(
        self, claude: anthropic.AsyncAnthropic, cluster: Cluster, tokenizer: Tokenizer
    ) -> None:
        one_call(cluster, tokenizer)
        calls: list[Any] = [{"type": "tool_use", "id": f"toolu_{city}", "name": "weather", "input": {"city": city}} for city in ("a", "b")]
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "rain in Köln"} for call in calls]
        users: list[Any] = [{"role": "user", "content": [result]} for result in results]
        said: list[Any] = [*HELLO, {"role": "assistant", "content": calls}, *users]
        answer = await claude.messages.create(model=MODEL, max_tokens=90, messages=said, tools=TOOLS)
        assert [block.text for block in answer.content if block.type == "text"] == ["It rains."]
        counted = await claude.messages.count_tokens(model=MODEL, messages=said, tools=TOOLS)
        together = [*said[:-2], {"role": "user", "content": results}]
        assert counted == await claude.messages.count_tokens(model=MODEL, messages=together, tools=TOOLS)

    async def test_the_client_s_own_tool_runner_works(
        self, claude: anthropic.AsyncAnthropic, cluster: Cluster, tokenizer: Tokenizer
    ) -> None:
        one_call(cluster, tokenizer)

        @anthropic.beta_async_tool
        async def weather(city: str) -> str:
            """How it is.

            Args:
                city: Where.
            """
            return f"rain in {city}"

        runner = claude.beta.messages.tool_runner(model=MODEL, max_tokens=90, messages=HELLO, tools=[weather])
        final = await runner.until_done()
        assert [block.text for block in final.content if block.type == "text"] == ["It rains."]

    async def test_a_client_that_leaves_a_stream_frees_everything(self, claude: anthropic.AsyncAnthropic, cluster: Cluster) -> None:
        cluster.script = lambda start: [100] * 1000
        async with claude.messages.stream(model=MODEL, max_tokens=1500, messages=HELLO) as stream:
            await anext(stream.text_stream)
        await until(lambda: cluster.idle)

    async def test_a_prompt_alone_is_computed(self, claude: anthropic.AsyncAnthropic) -> None:
        message = await claude.messages.create(model=MODEL, max_tokens=0, messages=HELLO)
        assert message.content == [] and message.usage.output_tokens == 0 and message.stop_reason == "max_tokens"

    async def test_a_stream_that_fails_ends_with_an_error(self, claude: anthropic.AsyncAnthropic, cluster: Cluster) -> None:
        fail(cluster)
        with pytest.raises(anthropic.APIStatusError) as failed:
            async with claude.messages.stream(model=MODEL, max_tokens=50, messages=HELLO) as stream:
                await stream.get_final_message()
        assert failed.value.type == "overloaded_error" and "decode-" not in str(failed.value.api_message)


class TestGemini:
    async def test_a_content(self, gemini: Any, cluster: Cluster) -> None:
        cluster.cached_tokens = 5
        answer = await gemini.models.generate_content(model=MODEL, contents="Hello", config={"system_instruction": "Be brief."})
        assert answer.text == SAID and answer.candidates[0].finish_reason is types.FinishReason.STOP
        usage = answer.usage_metadata
        assert usage.cached_content_token_count == 5 and usage.total_token_count == usage.prompt_token_count + usage.candidates_token_count
        assert answer.model_version == MODEL and answer.response_id

    async def test_a_stream_says_what_the_whole_answer_says(self, gemini: Any) -> None:
        pieces = [piece async for piece in await gemini.models.generate_content_stream(model=MODEL, contents="Hello")]
        assert "".join(piece.text or "" for piece in pieces) == SAID and len(pieces) > 1
        assert pieces[-1].candidates[0].finish_reason is types.FinishReason.STOP
        whole = await gemini.models.generate_content(model=MODEL, contents="Hello")
        assert pieces[-1].usage_metadata.total_token_count == whole.usage_metadata.total_token_count

    async def test_without_sse_a_stream_is_a_json_list(self, http: httpx.AsyncClient) -> None:
        for version in ("v1beta", "v1"):
            reply = await http.post(f"/{version}/models/{MODEL}:streamGenerateContent", json={"contents": CONTENTS})
            assert reply.headers["content-type"] == "application/json"
            parts = [part for piece in reply.json() for part in piece["candidates"][0]["content"]["parts"]]
            assert "".join(part["text"] for part in parts) == SAID

    async def test_a_chat_remembers(self, gemini: Any) -> None:
        chat = gemini.chats.create(model=MODEL)
        first = await chat.send_message("Hello")
        async for _ in await chat.send_message_stream("And then?"):
            pass
        third = await chat.send_message("And then?")
        assert third.text == SAID and [content.role for content in chat.get_history(curated=True)].count("user") == 3
        assert third.usage_metadata.prompt_token_count > first.usage_metadata.prompt_token_count + 40

    async def test_a_function_is_called_and_its_response_is_read(self, gemini: Any, cluster: Cluster, tokenizer: Tokenizer) -> None:
        one_call(cluster, tokenizer)
        declared = types.FunctionDeclaration(
            name="weather", parameters=types.Schema(type=types.Type.OBJECT, properties={"city": types.Schema(type=types.Type.STRING)})
        )
        config = types.GenerateContentConfig(tools=[types.Tool(function_declarations=[declared])])
        asked = types.Content(role="user", parts=[types.Part(text="How is it?")])
        answer = await gemini.models.generate_content(model=MODEL, contents=[asked], config=config)
        (call,) = answer.function_calls
        assert (call.name, call.args) == ("weather", {"city": "Köln"})
        told = types.Part.from_function_response(name="weather", response={"result": "rain in Köln"})
        contents = [asked, answer.candidates[0].content, types.Content(role="user", parts=[told])]
        assert (await gemini.models.generate_content(model=MODEL, contents=contents, config=config)).text == "It rains."
        pieces = [piece async for piece in await gemini.models.generate_content_stream(model=MODEL, contents=[asked], config=config)]
        assert [call.args for piece in pieces for call in piece.function_calls or []] == [{"city": "Köln"}]

    async def test_the_client_s_own_function_calling_works(self, gemini: Any, cluster: Cluster, tokenizer: Tokenizer) -> None:
        one_call(cluster, tokenizer)

        async def weather(city: str) -> str:
            """How it is."""
            return f"rain in {city}"

        chat = gemini.chats.create(model=MODEL, config=types.GenerateContentConfig(tools=[weather]))
        assert (await chat.send_message("How is it?")).text == "It rains."

    async def test_why_it_stopped_and_several_candidates(self, gemini: Any) -> None:
        config = types.GenerateContentConfig(max_output_tokens=3, candidate_count=2, seed=1, temperature=0.5, top_k=4)
        cut = await gemini.models.generate_content(model=MODEL, contents="Hello", config=config)
        assert [candidate.finish_reason for candidate in cut.candidates] == [types.FinishReason.MAX_TOKENS] * 2
        stopped = await gemini.models.generate_content(model=MODEL, contents="Hello", config={"stop_sequences": ["two"]})
        assert stopped.text == SAID.split("two")[0]

    async def test_logprobs(self, gemini: Any) -> None:
        config = types.GenerateContentConfig(response_logprobs=True, logprobs=2)
        answer = await gemini.models.generate_content(model=MODEL, contents="Hello", config=config)
        result = answer.candidates[0].logprobs_result
        assert "".join(entry.token for entry in result.chosen_candidates) and answer.candidates[0].avg_logprobs == -0.5
        assert all(len(entry.candidates) == 2 for entry in result.top_candidates)

    async def test_tokens_are_counted_as_they_are_used(self, gemini: Any) -> None:
        counted = await gemini.models.count_tokens(model=MODEL, contents="Hello")
        used = await gemini.models.generate_content(model=MODEL, contents="Hello")
        assert counted.total_tokens == used.usage_metadata.prompt_token_count

    async def test_tokens_of_a_context_that_is_kept_count(self, gemini: Any, http: httpx.AsyncClient) -> None:
        kept = await gemini.caches.create(model=MODEL, config=types.CreateCachedContentConfig(contents="A long story. " * 20, ttl="300s"))
        path, asked = f"/v1beta/models/{MODEL}:countTokens", {"contents": CONTENTS}
        alone = (await http.post(path, json={"generateContentRequest": asked})).json()
        counted = (await http.post(path, json={"generateContentRequest": {**asked, "cachedContent": kept.name}})).json()
        assert alone["cachedContentTokenCount"] == 0 < 60 < counted["cachedContentTokenCount"]
        assert counted["totalTokens"] > alone["totalTokens"] + 60

    async def test_models_are_gemini_s(self, gemini: Any, http: httpx.AsyncClient) -> None:
        assert [model.name async for model in await gemini.models.list()] == [f"models/{MODEL}"]
        model = await gemini.models.get(model=MODEL)
        assert model.input_token_limit == 2000 and "generateContent" in model.supported_actions
        assert (await http.get(f"/v1beta/models/{MODEL}")).json()["name"] == f"models/{MODEL}"
        assert (await http.get("/v1/models")).json()["object"] == "list", "without a header it is OpenAI's"

    async def test_errors_are_google_s(self, gemini: Any, http: httpx.AsyncClient, cluster: Cluster) -> None:
        with pytest.raises(genai_errors.ClientError) as invalid:
            await gemini.models.generate_content(model=MODEL, contents=types.Part.from_bytes(data=b"x", mime_type="image/png"))
        assert (invalid.value.code, invalid.value.status) == (400, "INVALID_ARGUMENT") and "inlineData" in str(invalid.value.message)
        with pytest.raises(genai_errors.ClientError) as unknown:
            await gemini.models.generate_content(model="other", contents="Hello")
        assert (unknown.value.code, unknown.value.status) == (404, "NOT_FOUND")
        with pytest.raises(genai_errors.ClientError, match="batchEmbedContents is not served"):
            await gemini.models.embed_content(model=MODEL, contents="Hello")
        cluster.conductor.rejections.append(wire.REJECTION.encode(Rejection(Reason.TTFT, "too much to do", 2.0)))
        with pytest.raises(genai_errors.ClientError) as busy:
            await gemini.models.generate_content(model=MODEL, contents="Hello")
        assert (busy.value.code, busy.value.status) == (429, "RESOURCE_EXHAUSTED")
        reply = await http.get("/v1beta/nonsense")
        assert reply.status_code == 404 and reply.json()["error"]["status"] == "NOT_FOUND"

    async def test_a_stream_that_fails_ends_with_an_error(self, gemini: Any, http: httpx.AsyncClient, cluster: Cluster) -> None:
        fail(cluster)
        with pytest.raises(genai_errors.ServerError) as failed:
            async for _ in await gemini.models.generate_content_stream(model=MODEL, contents="Hello"):
                pass
        assert (failed.value.code, failed.value.status) == (503, "UNAVAILABLE") and "decode-" not in str(failed.value.message)
        reply = await http.post(f"/v1beta/models/{MODEL}:streamGenerateContent", json={"contents": CONTENTS})
        last = reply.json() if reply.status_code == 503 else reply.json()[-1]
        assert last["error"]["status"] == "UNAVAILABLE"

    async def test_a_client_that_leaves_a_stream_frees_everything(self, gemini: Any, cluster: Cluster) -> None:
        cluster.script = lambda start: [100] * 1000
        stream = await gemini.models.generate_content_stream(model=MODEL, contents="Hello")
        await anext(stream)
        await stream.aclose()
        await until(lambda: cluster.idle)


async def serving(arguments: ProcessArguments, cluster: Cluster, **server: Any) -> AsyncIterator[str]:
    """The URL of a gateway with other settings."""
    config = arguments.config.model_copy(update={"server": arguments.config.server.model_copy(update=server)})
    gateway = GatewayServer(replace(arguments, config=config), cluster.conductor.address)
    await gateway.start()
    try:
        yield f"http://{gateway.http_address}"
    finally:
        await gateway.close()


class TestThinking:
    @pytest.fixture
    async def url(self, arguments: ProcessArguments, cluster: Cluster, tokenizer: Tokenizer) -> AsyncIterator[str]:
        said = tokenizer.encode("<think>\nFirst the one, then the other.\n</think>\n\nBoth.")
        cluster.script = lambda start: said
        async for url in serving(arguments, cluster, reasoning_parser="think"):
            yield url

    async def test_anthropic_s_blocks_of_thinking(self, url: str) -> None:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=20) as claude:
            asked: dict[str, Any] = {"model": MODEL, "max_tokens": 90, "messages": HELLO, "thinking": {"type": "adaptive"}}
            whole = await claude.messages.create(**asked)
            async with claude.messages.stream(**asked) as stream:
                streamed = await stream.get_final_message()
            for message in (whole, streamed):
                thinking, text = message.content
                assert thinking.type == "thinking" and thinking.thinking == "First the one, then the other."
                assert text.type == "text" and text.text == "Both."
            more: list[Any] = [*HELLO, {"role": "assistant", "content": whole.content}, {"role": "user", "content": "And now?"}]
            assert (await claude.messages.create(**{**asked, "messages": more})).content
            hidden = await claude.messages.create(**{**asked, "thinking": {"type": "adaptive", "display": "omitted"}})
            assert hidden.content[0].type == "thinking" and hidden.content[0].thinking == ""

    async def test_openai_s_reasoning_is_left_out_for_who_does_not_want_it(self, url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            for included in (True, False):
                asked = {"model": MODEL, "messages": HELLO, "include_reasoning": included}
                message = (await http.post("/v1/chat/completions", json=asked)).json()["choices"][0]["message"]
                assert message["content"] == "Both."
                assert message.get("reasoning_content") == ("First the one, then the other." if included else None)
                streamed = (await http.post("/v1/chat/completions", json={**asked, "stream": True})).text
                assert ('"reasoning_content"' in streamed) is included and "data: [DONE]" in streamed

    async def test_gemini_s_thoughts_are_shown_to_who_wants_them(self, url: str) -> None:
        gemini: Any = genai.Client(api_key="none", http_options=types.HttpOptions(base_url=url, timeout=20_000)).aio
        config = types.GenerateContentConfig(thinking_config=types.ThinkingConfig(include_thoughts=True))
        answer = await gemini.models.generate_content(model=MODEL, contents="Hello", config=config)
        parts = answer.candidates[0].content.parts
        assert [(bool(part.thought), part.text) for part in parts] == [(True, "First the one, then the other."), (False, "Both.")]
        assert answer.text == "Both."
        plain = await gemini.models.generate_content(model=MODEL, contents="Hello")
        assert [part.text for part in plain.candidates[0].content.parts] == ["Both."]
        pieces = [piece async for piece in await gemini.models.generate_content_stream(model=MODEL, contents="Hello")]
        assert "".join(piece.text or "" for piece in pieces) == "Both."
        await gemini.aclose()


async def test_clients_wait_for_a_stream_that_says_nothing_for_long(arguments: ProcessArguments, cluster: Cluster) -> None:
    """Some read past what says that it lives; Google's take everything for a piece of the answer."""
    prefill = cluster.nodes["prefill-0"]
    prefill.pause_at = 0
    async for url in serving(arguments, cluster, stream_ping_s=0.05):
        google: Any = genai.Client(api_key="none", http_options=types.HttpOptions(base_url=url, timeout=20_000)).aio
        claude = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=20)

        async def from_google(client: Any = google) -> str:
            pieces = await client.models.generate_content_stream(model=MODEL, contents="Hello")
            return "".join([piece.text or "" async for piece in pieces])

        async def from_anthropic(client: anthropic.AsyncAnthropic = claude) -> str:
            async with client.messages.stream(model=MODEL, max_tokens=50, messages=HELLO) as stream:
                return "".join([text async for text in stream.text_stream])

        said = asyncio.gather(from_google(), from_anthropic())
        await until(lambda: len(cluster.attempts_on("prefill-0")) == 2)
        await asyncio.sleep(0.3)  # several pings
        prefill.patience.set()
        assert await said == [SAID, SAID]
        await claude.close()
        await google.aclose()


async def test_keys_are_taken_where_each_api_sends_them(arguments: ProcessArguments, cluster: Cluster) -> None:
    keys = {f"sha256:{hashlib.sha256(b'secret').hexdigest()}": "acme"}
    async for url in serving(arguments, cluster, api_keys=keys):
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            message = {"model": MODEL, "max_tokens": 3, "messages": HELLO}
            generate = f"/v1beta/models/{MODEL}:generateContent"
            assert (await http.post("/v1/messages", json=message, headers={"x-api-key": "secret"})).status_code == 200
            assert (await http.post("/v1/messages", json=message, headers={"authorization": "Bearer secret"})).status_code == 200
            assert (await http.post(generate, json={"contents": CONTENTS}, headers={"x-goog-api-key": "secret"})).status_code == 200
            assert (await http.post(generate, json={"contents": CONTENTS}, params={"key": "secret"})).status_code == 200
            refused = await http.post("/v1/messages", json=message, headers={"x-api-key": "guessed"})
            assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
            assert refused.headers["request-id"] == refused.headers["x-request-id"] == refused.json()["request_id"]
            refused = await http.post(generate, json={"contents": CONTENTS}, params={"key": "guessed"})
            assert refused.status_code == 401 and refused.json()["error"]["status"] == "UNAUTHENTICATED"
            assert (await http.post("/v1/messages", json=message, params={"key": "secret"})).status_code == 401, "no place for keys there"
