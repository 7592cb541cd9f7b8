"""Gemini's façade: what a body asks for, and how an answer is written."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from google.genai import types as sdk

from engine.tokenizer.tokenizer import Tokenizer
from gateway.api_request import ApiRequest, Conversation, FormatKind, Message, Speaker, ToolCall, ToolChoice, ToolMode
from gateway.bodies import parse_body
from gateway.gemini.answers import ContentFormat, error_json
from gateway.gemini.requests import CountTokensRequest, GenerateContentRequest
from gateway.gemini.schema import json_schema
from gateway.output import CallArguments, CallBegun, Content, Delta, Ending, PlacedToken, Reasoning, gathered
from springtide.errors import InvalidRequest, ModelNotFound, Overloaded, SpringtideError, Unauthenticated, Unavailable
from springtide.protocol.outputs import Finish, SampledToken, TokenLogprob
from springtide.protocol.usage import Usage

HELLO = [{"role": "user", "parts": [{"text": "Hello"}]}]
WEATHER = {"name": "weather", "description": "The weather.", "parameters": {"type": "OBJECT", "properties": {"city": {"type": "STRING"}}}}
TOOLS = [{"functionDeclarations": [WEATHER, {"name": "clock"}]}]
USAGE = Usage(prompt_tokens=100, completion_tokens=7, cached_tokens=64, reasoning_tokens=2)


def asked(model: str = "models/m", **fields: Any) -> ApiRequest:
    return parse_body(json.dumps({"contents": HELLO, **fields}).encode(), GenerateContentRequest, 10_000).request(model)


def conversation(**fields: Any) -> Conversation:
    prompt = asked(**fields).prompt
    assert isinstance(prompt, Conversation)
    return prompt


def refused(**fields: Any) -> str:
    """The field that a refusal names."""
    with pytest.raises(InvalidRequest) as error:
        asked(**fields)
    assert error.value.param is not None
    return error.value.param


def call(**fields: Any) -> dict[str, Any]:
    return {
        "role": "model",
        "parts": [{"functionCall": {"name": "weather", "args": {"city": "Köln"}, **fields}, "thoughtSignature": "YQ=="}],
    }


def response(**fields: Any) -> dict[str, Any]:
    return {"role": "user", "parts": [{"functionResponse": {"name": "weather", "response": {"result": "rain"}, **fields}}]}


class TestWhatABodyAsksFor:
    def test_a_text_is_a_message_and_the_system_comes_first(self) -> None:
        prompt = conversation(systemInstruction={"parts": [{"text": "Be brief."}], "role": "user"})
        assert prompt.messages == (Message(Speaker.SYSTEM, "Be brief."), Message(Speaker.USER, "Hello"))
        assert asked("m").model == asked("models/m").model == "m"

    def test_what_the_model_said_goes_on_where_it_ended(self) -> None:
        pieces = [{"role": "model", "parts": [{"text": text}]} for text in ("Go", "od")]
        thought = {"role": "model", "parts": [{"text": "Hm.", "thought": True}]}
        asking = {"parts": [{"text": "Why?"}, {"text": "How?"}]}
        assert conversation(contents=[*HELLO, thought, *pieces, asking]).messages == (
            Message(Speaker.USER, "Hello"),
            Message(Speaker.ASSISTANT, "Good", "Hm."),
            Message(Speaker.USER, "Why?\nHow?"),
        )
        assert conversation(contents=[*HELLO, *pieces]).continue_final_message

    def test_calls_and_their_responses(self) -> None:
        for fields, call_id in (({"id": "x"}, "x"), ({}, "call-0")):
            assert conversation(contents=[*HELLO, call(**fields), response(**fields)], tools=TOOLS).messages == (
                Message(Speaker.USER, "Hello"),
                Message(Speaker.ASSISTANT, "", tool_calls=(ToolCall(call_id, "weather", '{"city": "Köln"}'),)),
                Message(Speaker.TOOL, '{"result": "rain"}', tool_call_id=call_id, name="weather"),
            )

    def test_responses_without_ids_answer_in_order(self) -> None:
        both = {"role": "model", "parts": call()["parts"] * 2}
        answers = {"role": "user", "parts": [*response(response={"n": 1})["parts"], *response(response={"n": 2})["parts"]]}
        tools = [message for message in conversation(contents=[*HELLO, both, answers]).messages if message.speaker is Speaker.TOOL]
        assert [(message.tool_call_id, message.content) for message in tools] == [("call-0", '{"n": 1}'), ("call-1", '{"n": 2}')]

    @pytest.mark.parametrize(
        ("config", "choice", "names"),
        [
            ({}, ToolChoice(), ["weather", "clock"]),
            ({"mode": "AUTO"}, ToolChoice(), ["weather", "clock"]),
            ({"mode": "any"}, ToolChoice(ToolMode.REQUIRED), ["weather", "clock"]),
            ({"mode": "ANY", "allowedFunctionNames": ["clock"]}, ToolChoice(ToolMode.REQUIRED), ["clock"]),
            ({"mode": "NONE"}, ToolChoice(ToolMode.NONE), ["weather", "clock"]),
        ],
    )
    def test_function_calling(self, config: dict[str, Any], choice: ToolChoice, names: list[str]) -> None:
        prompt = conversation(tools=TOOLS, toolConfig={"functionCallingConfig": config})
        assert prompt.tool_choice == choice and [tool.name for tool in prompt.tools] == names

    def test_a_function_s_parameters_are_a_json_schema(self) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "string"}}}
        declared = [WEATHER, {"name": "f", "parameters_json_schema": schema, "response_json_schema": {"type": "string"}}]
        tools = conversation(tools=[{"function_declarations": declared}]).tools
        assert tools[0].parameters == {"type": "object", "properties": {"city": {"type": "string"}}} and tools[1].parameters == schema
        strict = conversation(tools=TOOLS, toolConfig={"functionCallingConfig": {"mode": "VALIDATED"}})
        assert all(tool.strict for tool in strict.tools) and strict.tool_choice == ToolChoice()

    def test_sampling_in_either_case_is_what_the_client_has_set(self) -> None:
        assert asked().sampling == {} and asked().max_tokens is None
        camel = {"topK": 3.0, "topP": 0.5, "maxOutputTokens": 9, "stopSequences": ["END"], "candidateCount": 2, "seed": -5}
        snake = {"top_k": 3, "top_p": 0.5, "max_output_tokens": 9, "stop_sequences": ["END"], "candidate_count": 2, "seed": "-5"}
        for request in (asked(generationConfig=camel), asked(generation_config=snake)):
            assert request.sampling == {"top_k": 3, "top_p": 0.5, "seed": -5}
            assert (request.max_tokens, request.stop, request.n) == (9, ("END",), 2)
        assert asked(generationConfig={"responseLogprobs": True, "logprobs": 3}).sampling == {"logprobs": 3}

    def test_what_the_answer_is_held_to(self) -> None:
        def form(**config: Any) -> tuple[FormatKind, Any] | None:
            found = asked(generationConfig=config).format
            return None if found is None else (found.kind, json.loads(found.source or "null"))

        words = {"type": "STRING", "enum": ["a", "b"]}
        assert form() is None and form(responseMimeType="text/plain") is None
        assert form(responseMimeType="application/json") == (FormatKind.JSON_OBJECT, None)
        assert form(responseMimeType="application/json", responseSchema=words) == (
            FormatKind.JSON_SCHEMA,
            {"type": "string", "enum": ["a", "b"]},
        )
        assert form(responseMimeType="application/json", responseJsonSchema={"const": 1}) == (FormatKind.JSON_SCHEMA, {"const": 1})
        assert form(responseMimeType="text/x.enum", responseSchema=words) == (FormatKind.CHOICE, ["a", "b"])

    def test_thinking_is_the_template_s(self) -> None:
        def options(**config: Any) -> Any:
            return conversation(generationConfig={"thinkingConfig": config}).template_options

        assert options() == {} and options(include_thoughts=True) == {}
        assert options(thinkingBudget=0) == {"enable_thinking": False} and options(thinking_budget=-1) == {"enable_thinking": True}
        assert options(thinkingLevel="low") == {"reasoning_effort": "low"}

    def test_a_cache_has_the_system_and_the_tools(self) -> None:
        assert asked(cachedContent="cachedContents/abc").cache.cache_id == "abc"
        assert refused(cachedContent="cachedContents/abc", systemInstruction={"parts": [{"text": "s"}]}) == "systemInstruction"
        assert refused(cachedContent="cachedContents/abc", tools=TOOLS) == "tools"

    def test_what_asks_for_nothing_is_accepted(self) -> None:
        assert asked(
            model="models/m",
            safetySettings=[{"category": "HARM_CATEGORY_HATE_SPEECH", "threshold": "BLOCK_NONE"}],
            labels={},
            generationConfig={"responseModalities": ["TEXT"], "speechConfig": None},
        )

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"contents": []}, "contents"),
            ({"nonsense": 1}, "nonsense"),
            ({"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": ""}}]}]}, "contents[0].parts[0].inlineData"),
            ({"contents": [{"parts": [{"fileData": {"fileUri": "x"}}]}]}, "contents[0].parts[0].fileData"),
            ({"contents": [{"parts": [{}]}]}, "contents[0].parts[0]"),
            ({"contents": [{"role": "assistant", "parts": []}]}, "contents[0].role"),
            ({"contents": [{"role": "system", "parts": [{"text": "s"}]}]}, "contents[0].role"),
            ({"contents": [response()]}, "contents[0].parts[0]"),
            ({"contents": [*HELLO, call(id="x"), response(id="x", name="clock")]}, "contents[2].parts[0]"),
            ({"contents": [*HELLO, call(id="x"), call(id="x"), response(id="x")]}, "contents[2].parts[0]"),
            ({"contents": [*HELLO, call()]}, "contents"),
            ({"contents": [*HELLO, call(id="a"), response(id="b")]}, "contents[2].parts[0]"),
            ({"tools": [{"googleSearch": {}}]}, "tools[0].googleSearch"),
            ({"tools": [*TOOLS, *TOOLS]}, "tools"),
            ({"tools": [{"functionDeclarations": [{"name": "the weather\x00"}]}]}, "tools[0].functionDeclarations[0].name"),
            ({"tools": [{"codeExecution": {}}]}, "tools[0].codeExecution"),
            ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "toolConfig.functionCallingConfig"),
            (
                {"tools": TOOLS, "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["x"]}}},
                "toolConfig.functionCallingConfig",
            ),
            ({"safetySettings": [{"threshold": "BLOCK_ONLY_HIGH"}]}, "safetySettings[0].threshold"),
            ({"generationConfig": {"candidateCount": 0}}, "generationConfig.candidateCount"),
            ({"generationConfig": {"topK": 2.5}}, "generationConfig.topK"),
            ({"generationConfig": {"logprobs": 2}}, "generationConfig.logprobs"),
            ({"generationConfig": {"responseModalities": ["AUDIO"]}}, "generationConfig.responseModalities"),
            ({"generationConfig": {"responseSchema": {"type": "STRING"}}}, "generationConfig.responseMimeType"),
            (
                {"generationConfig": {"responseMimeType": "application/json", "responseSchema": {"oneOf": []}}},
                "generationConfig.responseSchema",
            ),
            ({"labels": {"a": "b"}}, "labels"),
        ],
    )
    def test_what_cannot_be_honoured_is_refused_by_name(self, fields: dict[str, Any], param: str) -> None:
        assert refused(**fields) == param

    def test_a_format_is_known_by_the_field_that_it_is_in(self) -> None:
        for field in ("responseSchema", "responseJsonSchema"):
            config = {"responseMimeType": "application/json", field: {"type": "string"}}
            assert asked(generationConfig=config).names["format"] == f"generationConfig.{field}"

    def test_a_model_in_the_body_is_the_one_in_the_path(self) -> None:
        with pytest.raises(InvalidRequest, match="'other', but 'm' in the path"):
            parse_body(json.dumps({"model": "other", "contents": HELLO}).encode(), GenerateContentRequest, 10_000).request("models/m")

    def test_counting_takes_contents_or_a_whole_request(self) -> None:
        def counted(**body: Any) -> ApiRequest:
            return parse_body(json.dumps(body).encode(), CountTokensRequest, 10_000).request("models/m")

        inner = {"model": "models/m", "contents": HELLO, "systemInstruction": {"parts": [{"text": "s"}]}}
        alone, with_system = counted(contents=HELLO).prompt, counted(generateContentRequest=inner).prompt
        assert isinstance(alone, Conversation) and isinstance(with_system, Conversation)
        assert len(alone.messages) == 1 and len(with_system.messages) == 2
        with pytest.raises(InvalidRequest, match="one of them alone"):
            counted()

    def test_thousands_of_calls_are_answered_as_soon_as_they_are_read(self) -> None:
        many = {"role": "model", "parts": call()["parts"] * 20_000}
        answers = {"role": "user", "parts": response()["parts"] * 20_000}
        body = json.dumps({"contents": [*HELLO, many, answers]}).encode()
        assert isinstance(parse_body(body, GenerateContentRequest, 10**6).request("m").prompt, Conversation)


class TestSchemas:
    def test_words_of_openapi_become_those_of_json_schema(self) -> None:
        schema = {
            "type": "OBJECT",
            "property_ordering": ["b", "a"],
            "required": ["a"],
            "properties": {
                "a": {"type": "INTEGER", "nullable": True, "format": "int32"},
                "b": {"type": "ARRAY", "items": {"type": "STRING", "format": "date-time"}, "minItems": "1", "max_items": 2},
                "c": {"any_of": [{"type": "NUMBER"}, {"type": "STRING", "enum": ["x"], "nullable": True}], "example": 1},
            },
        }
        converted = json_schema(schema, closed=True)
        jsonschema.Draft202012Validator.check_schema(converted)
        assert list(converted["properties"]) == ["b", "a", "c"]
        validator = jsonschema.Draft202012Validator(converted)
        for value in ({"a": None}, {"a": 1, "b": ["2026-01-01T00:00:00Z"]}, {"a": 1, "c": None}, {"a": 1, "c": "x"}):
            assert validator.is_valid(value)
        for value in ({}, {"a": "1"}, {"a": 1, "b": []}, {"a": 1, "c": "y"}, {"a": 1, "d": 1}):
            assert not validator.is_valid(value)

    def test_numbers_have_no_bound_here(self) -> None:
        assert json_schema({"maxItems": 10**400}) == {"maxItems": 10**400}

    def test_references_are_kept(self) -> None:
        schema = {"$defs": {"T": {"type": "STRING"}}, "type": "OBJECT", "properties": {"t": {"$ref": "#/$defs/T"}}}
        assert jsonschema.Draft202012Validator(json_schema(schema)).is_valid({"t": "x"})

    @pytest.mark.parametrize(
        "schema",
        [
            {"type": "FOO"},
            {"oneOf": []},
            {"properties": []},
            {"items": 1},
            {"minItems": "x"},
            {"minItems": 1e999},
            {"anyOf": 1},
            {"minItems": -1},
        ],
    )
    def test_what_is_no_schema_is_refused(self, schema: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"^(has|must be)"):
            json_schema(schema)

    def test_depth_has_a_bound(self) -> None:
        schema: dict[str, Any] = {"type": "STRING"}
        for _ in range(500):
            schema = {"type": "ARRAY", "items": schema}
        with pytest.raises(ValueError, match="may be nested at most 64 deep"):
            json_schema(schema)


TOKEN = PlacedToken(SampledToken(42, -0.5, (TokenLogprob(42, -0.5), TokenLogprob(43, float("-inf")))), 0)
DELTAS = [
    Delta(0, (Reasoning("Hm."), Content("Let me ")), (TOKEN,)),
    Delta(0, (Content("see."), CallBegun(0, "c0", "weather"), CallArguments(0, '{"city":')), (TOKEN,)),
    Delta(0, (CallArguments(0, '"Köln"}'), CallBegun(1, "c1", "clock"), CallArguments(1, "{}"))),
    Delta(0, (), ending=Ending(Finish.STOP, called=True)),
]


def written(tokenizer: Tokenizer, events: bool = True, shows_thoughts: bool = True, wants_logprobs: bool = False) -> ContentFormat:
    return ContentFormat("r-1", "m", tokenizer, events=events, shows_thoughts=shows_thoughts, wants_logprobs=wants_logprobs)


def streamed(form: ContentFormat, deltas: list[Delta]) -> str:
    pieces = [*form.begin(), *(piece for delta in deltas for piece in form.delta(delta, USAGE)), *form.end(USAGE)]
    return b"".join(pieces).decode()


def whole(form: ContentFormat, deltas: list[Delta]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads("".join(form.whole(gathered(deltas, USAGE))))
    sdk.GenerateContentResponse.model_validate(answer)
    return answer


class TestHowAnAnswerIsWritten:
    def test_whole(self, tokenizer: Tokenizer) -> None:
        answer = whole(written(tokenizer), DELTAS)
        assert answer["candidates"][0]["content"]["parts"] == [
            {"text": "Hm.", "thought": True},
            {"text": "Let me see."},
            {"functionCall": {"id": "c0", "name": "weather", "args": {"city": "Köln"}}},
            {"functionCall": {"id": "c1", "name": "clock", "args": {}}},
        ]
        assert answer["candidates"][0]["finishReason"] == "STOP" and answer["modelVersion"] == "m"
        usage = answer["usageMetadata"]
        assert (usage["promptTokenCount"], usage["candidatesTokenCount"], usage["totalTokenCount"]) == (100, 5, 107)
        assert (usage["cachedContentTokenCount"], usage["thoughtsTokenCount"]) == (64, 2)

    def test_thoughts_are_told_when_they_are_wanted(self, tokenizer: Tokenizer) -> None:
        for answer in (whole(written(tokenizer, shows_thoughts=False), DELTAS),):
            assert not [part for part in answer["candidates"][0]["content"]["parts"] if part.get("thought")]
        assert "Hm." not in streamed(written(tokenizer, shows_thoughts=False), DELTAS)

    def test_a_stream_of_events_and_a_list_say_the_same(self, tokenizer: Tokenizer) -> None:
        raw = streamed(written(tokenizer), DELTAS)
        events = [json.loads(event.removeprefix("data: ")) for event in raw.split("\n\n")[:-1]]
        assert json.loads(streamed(written(tokenizer, events=False), DELTAS)) == events
        parts = [part for event in events for part in event["candidates"][0]["content"]["parts"]]
        assert parts[1:3] == [{"text": "Let me "}, {"text": "see."}] and [part["functionCall"]["name"] for part in parts[3:5]] == [
            "weather",
            "clock",
        ]
        assert [event["candidates"][0].get("finishReason") for event in events] == [None, None, None, "STOP"]

    def test_every_content_has_a_part_as_google_s_client_wants_it(self, tokenizer: Tokenizer) -> None:
        raw = streamed(written(tokenizer), [Delta(0, (Content("a"),)), Delta(0, (), ending=Ending(Finish.STOP))])
        last = json.loads(raw.split("\n\n")[-2].removeprefix("data: "))
        assert last["candidates"][0]["content"]["parts"] == [{"text": ""}]

    def test_a_list_is_whole_however_it_ends(self, tokenizer: Tokenizer) -> None:
        form = written(tokenizer, events=False)
        begun = [*form.begin(), *form.delta(DELTAS[0], USAGE)]
        ended = json.loads(b"".join([*begun, *form.failed(Unavailable("gone"))]))
        assert ended[1]["error"]["status"] == "UNAVAILABLE"
        empty = written(tokenizer, events=False)
        assert json.loads(b"".join([*empty.begin(), *empty.end(USAGE)])) == []

    def test_candidates_are_told_apart(self, tokenizer: Tokenizer) -> None:
        deltas = [Delta(index, (Content(str(index)),), ending=Ending(finish)) for index, finish in enumerate([Finish.STOP, Finish.LENGTH])]
        candidates = whole(written(tokenizer), deltas)["candidates"]
        assert [(c["index"], c["content"]["parts"][0]["text"], c["finishReason"]) for c in candidates] == [
            (0, "0", "STOP"),
            (1, "1", "MAX_TOKENS"),
        ]

    def test_logprobs(self, tokenizer: Tokenizer) -> None:
        candidate = whole(written(tokenizer, wants_logprobs=True), DELTAS)["candidates"][0]
        result = candidate["logprobsResult"]
        assert len(result["chosenCandidates"]) == len(result["topCandidates"]) == 2 and candidate["avgLogprobs"] == -0.5
        assert result["chosenCandidates"][0] == {"token": tokenizer.token_text(42), "tokenId": 42, "logProbability": -0.5}
        assert [entry["logProbability"] for entry in result["topCandidates"][0]["candidates"]] == [-0.5, -9999.0]
        assert '"logprobsResult"' in streamed(written(tokenizer, wants_logprobs=True), DELTAS)

    def test_a_call_whose_arguments_are_no_object_is_not_told(self, tokenizer: Tokenizer) -> None:
        begun = Delta(0, (CallBegun(0, "c", "weather"), CallArguments(0, '{"ci')))
        for finish, reason in ((Finish.STOP, "MALFORMED_FUNCTION_CALL"), (Finish.LENGTH, "MAX_TOKENS")):
            (candidate,) = whole(written(tokenizer), [begun, Delta(0, (), ending=Ending(finish, called=True))])["candidates"]
            assert candidate["content"]["parts"] == [{"text": ""}] and candidate["finishReason"] == reason

    @pytest.mark.parametrize(
        ("error", "code", "status"),
        [
            (InvalidRequest("contents is odd", param="contents"), 400, "INVALID_ARGUMENT"),
            (ModelNotFound("no such model", param="model"), 404, "NOT_FOUND"),
            (Unauthenticated("who are you?"), 401, "UNAUTHENTICATED"),
            (Overloaded("later", retry_after_s=2.0, reason="ttft"), 429, "RESOURCE_EXHAUSTED"),
            (Unavailable("gone"), 503, "UNAVAILABLE"),
            (SpringtideError("a bug"), 500, "INTERNAL"),
        ],
    )
    def test_errors_are_google_s(self, error: SpringtideError, code: int, status: str) -> None:
        told = error_json(error)["error"]
        assert (told["code"], told["status"]) == (code, status)

    def test_errors_say_which_field_and_when_to_come_back(self) -> None:
        (violation,) = error_json(InvalidRequest("contents is odd", param="contents"))["error"]["details"]
        assert violation["fieldViolations"][0]["field"] == "contents"
        retry = error_json(Overloaded("later", retry_after_s=1.2, reason="ttft"))["error"]["details"][0]
        assert retry["retryDelay"] == "2s"
