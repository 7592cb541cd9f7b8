"""Anthropic's façade: what a body asks for, and how an answer is written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message as SdkMessage

from gateway.anthropic.answers import MessagesFormat, error_json
from gateway.anthropic.requests import CountMessageTokensRequest, MessagesRequest
from gateway.api_request import ApiRequest, CacheMark, Conversation, FormatKind, Message, Speaker, ToolCall, ToolChoice, ToolMode
from gateway.bodies import parse_body
from gateway.output import CallArguments, CallBegun, Content, Delta, Ending, Reasoning, gathered
from springtide.errors import InvalidRequest, Overloaded, SpringtideError, Unauthenticated, Unavailable
from springtide.protocol.outputs import Finish
from springtide.protocol.usage import Usage

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {"name": "weather", "description": "The weather.", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Köln"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
WORDS = [{"type": "text", "text": "So?"}]
KEEP = {"type": "ephemeral"}
USAGE = Usage(prompt_tokens=100, completion_tokens=7, cached_tokens=64)


def asked(**fields: Any) -> ApiRequest:
    body = {"model": "m", "max_tokens": 50, "messages": HELLO, **fields}
    return parse_body(json.dumps(body).encode(), MessagesRequest, 10_000).request()


def conversation(**fields: Any) -> Conversation:
    prompt = asked(**fields).prompt
    assert isinstance(prompt, Conversation)
    return prompt


def refused(**fields: Any) -> str:
    """The field that a refusal names."""
    with pytest.raises(InvalidRequest) as error:
        asked(**fields)
    assert error.value.param is not None and error.value.message.startswith(error.value.param.split("[")[0].split(".")[0])
    return error.value.param


class TestWhatABodyAsksFor:
    def test_a_text_is_a_message_and_the_system_comes_first(self) -> None:
        prompt = conversation(system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}])
        assert prompt.messages == (Message(Speaker.SYSTEM, "Be brief.\nBe kind."), Message(Speaker.USER, "Hello"))
        assert conversation(system="Be brief.").messages[0] == Message(Speaker.SYSTEM, "Be brief.")
        assert prompt.add_generation_prompt and not prompt.continue_final_message

    def test_neighbours_of_the_same_role_are_one_message(self) -> None:
        messages = [
            *HELLO,
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": "Go"},
            {"role": "assistant", "content": "od"},
        ]
        prompt = conversation(messages=messages)
        assert prompt.messages == (Message(Speaker.USER, "Hello\nagain"), Message(Speaker.ASSISTANT, "Good"))
        assert prompt.continue_final_message and not prompt.add_generation_prompt

    def test_calls_their_results_and_what_was_thought(self) -> None:
        thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]}
        said = [thought, {"type": "text", "text": "Let me see."}, CALL]
        messages = [*HELLO, {"role": "assistant", "content": said}, {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}]
        assert conversation(messages=messages, tools=[WEATHER]).messages == (
            Message(Speaker.USER, "Hello"),
            Message(Speaker.ASSISTANT, "Let me see.", "Hm.", (ToolCall("toolu_1", "weather", '{"city": "Köln"}'),)),
            Message(Speaker.TOOL, "rain", tool_call_id="toolu_1", name="weather"),
            Message(Speaker.USER, "So?"),
        )

    def test_neighbours_call_and_answer_together(self) -> None:
        other, rain, sun = {**CALL, "id": "toolu_2"}, {**RESULT, "content": "rain"}, {**RESULT, "tool_use_id": "toolu_2", "content": "sun"}
        calls = [{"role": "assistant", "content": [call]} for call in (CALL, other)]
        results: list[Any] = [{"role": "user", "content": content} for content in ([sun], [rain], "So?")]
        apart, together = (
            conversation(messages=[*HELLO, *calls, *results]),
            conversation(
                messages=[*HELLO, {"role": "assistant", "content": [CALL, other]}, {"role": "user", "content": [sun, rain, *WORDS]}]
            ),
        )
        assert apart == together
        assert [(each.speaker, each.content) for each in apart.messages[2:]] == [
            (Speaker.TOOL, "sun"),
            (Speaker.TOOL, "rain"),
            (Speaker.USER, "So?"),
        ]

    def test_a_result_that_is_an_error_says_so(self) -> None:
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such city", "is_error": True}
        messages = [*HELLO, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result]}]
        assert conversation(messages=messages).messages[-1].content == "Error: no such city"

    @pytest.mark.parametrize(
        ("choice", "meant"),
        [
            ({"type": "auto"}, ToolChoice()),
            ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(parallel=False)),
            ({"type": "any"}, ToolChoice(ToolMode.REQUIRED)),
            ({"type": "tool", "name": "weather"}, ToolChoice(ToolMode.REQUIRED, "weather")),
            ({"type": "none"}, ToolChoice(ToolMode.NONE)),
        ],
    )
    def test_tool_choice(self, choice: dict[str, Any], meant: ToolChoice) -> None:
        assert conversation(tools=[WEATHER], tool_choice=choice).tool_choice == meant

    def test_sampling_is_what_the_client_has_set(self) -> None:
        assert asked().sampling == {}
        request = asked(temperature=0, top_p=0.5, top_k=3, stop_sequences=["END"])
        assert request.sampling == {"temperature": 0, "top_p": 0.5, "top_k": 3} and request.stop == ("END",) and request.max_tokens == 50
        assert asked(max_tokens=0).max_tokens == 0

    def test_marks_are_on_what_they_were_on(self) -> None:
        messages = [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": KEEP}, {"type": "text", "text": "b"}]}]
        system = [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
        prompt = conversation(messages=messages, system=system, tools=[{**WEATHER, "cache_control": {"type": "ephemeral", "ttl": "1h"}}])
        assert prompt.tools[0].cache_mark == CacheMark(3600.0)
        assert [message.cache_marks for message in prompt.messages] == [(CacheMark(3600.0, 1),), (CacheMark(300.0, 1),)]
        assert asked(cache_control=KEEP).cache.keep_all_s == 300.0

    def test_marks_have_bounds_and_an_order(self) -> None:
        many = [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": KEEP}] * 4}]
        assert asked(messages=many)
        assert refused(messages=many, cache_control=KEEP) == "cache_control"
        assert refused(messages=many[:1], system=[], tools=[{**WEATHER, "cache_control": KEEP}]) == "cache_control"
        one = [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]}]
        assert refused(messages=one, tools=[{**WEATHER, "cache_control": KEEP}]) == "cache_control"

    def test_a_schema_for_the_answer(self) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        wanted = {"type": "json_schema", "schema": schema}
        said: list[dict[str, Any]] = [{"output_config": {"format": wanted}}, {"output_format": wanted}]
        for fields in said:
            written = asked(**fields).format
            assert written is not None and written.kind is FormatKind.JSON_SCHEMA and json.loads(written.source) == schema
        assert [asked(**fields).names["format"] for fields in said] == ["output_config.format", "output_format"]

    def test_thinking_is_the_template_s(self) -> None:
        assert conversation().template_options == {}
        assert conversation(thinking={"type": "disabled"}).template_options == {"enable_thinking": False}
        assert conversation(thinking={"type": "adaptive"}).template_options == {"enable_thinking": True}
        enabled = conversation(thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000, output_config={"effort": "low"})
        assert enabled.template_options == {"enable_thinking": True, "reasoning_effort": "low"}

    def test_what_asks_for_nothing_is_accepted(self) -> None:
        assert asked(
            metadata={"user_id": "u"},
            service_tier="auto",
            container=None,
            mcp_servers=[],
            context_management=None,
            inference_geo=None,
            speed="standard",
            diagnostics={"previous_message_id": None},
            tools=[{**WEATHER, "type": "custom", "defer_loading": False, "allowed_callers": ["direct"], "eager_input_streaming": True}],
        )

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"temperature": 1.5}, "temperature"),
            ({"max_tokens": -1}, "max_tokens"),
            ({"messages": []}, "messages"),
            ({"nonsense": 1}, "nonsense"),
            ({"container": "c"}, "container"),
            ({"thread": {"type": "create"}}, "thread"),
            ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
            ({"stop_sequences": [""]}, "stop_sequences[0]"),
            ({"stop_sequences": ["\ud800"]}, "stop_sequences[0]"),
            ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
            ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
            ({"messages": [{"role": "user", "content": [CALL]}]}, "messages[0].content[0]"),
            ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}, "messages[0].content[0].x"),
            ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
            ({"messages": [*HELLO, {"role": "assistant", "content": [CALL]}]}, "messages"),
            ({"messages": [*HELLO, {"role": "assistant", "content": [CALL]}, *HELLO]}, "messages[2].content"),
            ({"messages": [*HELLO, {"role": "assistant", "content": [CALL]}, *HELLO, *HELLO]}, "messages[3].content"),
            (
                {"messages": [*HELLO, {"role": "assistant", "content": [CALL]}, *HELLO, {"role": "assistant", "content": "So"}]},
                "messages[2].content",
            ),
            ({"messages": [*HELLO, {"role": "assistant", "content": [CALL]}, {"role": "system", "content": "x"}]}, "messages[2].content"),
            (
                {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
                "messages[0].content[0].tool_use_id",
            ),
            ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
            ({"messages": [*HELLO, {"role": "assistant", "content": [CALL, CALL]}]}, "messages[1].content[1].id"),
            (
                {"messages": [*HELLO, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [RESULT, RESULT]}]},
                "messages[2].content[1].tool_use_id",
            ),
            ({"tools": [WEATHER, WEATHER]}, "tools"),
            ({"tools": [{**WEATHER, "name": "the weather\x00"}]}, "tools[0].name"),
            ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
            ({"tools": [{**WEATHER, "input_schema": {"\ud800": 1}}]}, "tools[0].input_schema"),
            ({"tool_choice": {"type": "any"}}, "tool_choice"),
            ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
            ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
            ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "thinking.budget_tokens"),
            ({"diagnostics": {"previous_message_id": "msg"}}, "diagnostics.previous_message_id"),
            ({"output_config": {"format": {"type": "grammar"}}}, "output_config.format.type"),
        ],
    )
    def test_what_cannot_be_honoured_is_refused_by_name(self, fields: dict[str, Any], param: str) -> None:
        assert refused(**fields) == param

    def test_counting_takes_no_max_tokens(self) -> None:
        body = {"model": "m", "messages": HELLO, "system": "s", "tools": [WEATHER]}
        request = parse_body(json.dumps(body).encode(), CountMessageTokensRequest, 10_000).request()
        assert isinstance(request.prompt, Conversation) and len(request.prompt.messages) == 2 and len(request.prompt.tools) == 1


DELTAS = [
    Delta(0, (Reasoning("Hm"),)),
    Delta(0, (Reasoning("."), Content("Let me "))),
    Delta(0, (Content("see."), CallBegun(0, "c0", "weather"), CallArguments(0, '{"city":'))),
    Delta(0, (CallArguments(0, '"Köln"}'), CallBegun(1, "c1", "weather"), CallArguments(1, "{}"))),
    Delta(0, (), ending=Ending(Finish.STOP, called=True)),
]


def written(*, shows_thinking: bool = True) -> MessagesFormat:
    return MessagesFormat("msg-1", "m", ["END"], shows_thinking)


def events(deltas: list[Delta], **options: bool) -> list[dict[str, Any]]:
    form = written(**options)
    raw = b"".join([*form.begin(), *(piece for delta in deltas for piece in form.delta(delta, USAGE)), *form.end(USAGE)]).decode()
    found = []
    for event in raw.split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def whole(deltas: list[Delta], **options: bool) -> dict[str, Any]:
    message: dict[str, Any] = json.loads("".join(written(**options).whole(gathered(deltas, USAGE))))
    SdkMessage.model_validate(message, strict=False)
    return message


class TestHowAnAnswerIsWritten:
    def test_whole(self) -> None:
        message = whole(DELTAS)
        assert message["content"] == [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "c0", "name": "weather", "input": {"city": "Köln"}},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {}},
        ]
        assert message["stop_reason"] == "tool_use" and message["stop_sequence"] is None

    def test_what_was_found_in_the_cache_is_not_among_the_input_tokens(self) -> None:
        usage = whole(DELTAS)["usage"]
        assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (36, 64, 7)

    def test_a_stream_s_events_make_the_same_message(self) -> None:
        blocks: list[dict[str, Any]] = []
        arguments: dict[int, str] = {}
        told = events(DELTAS)
        for event in told:
            match event["type"]:
                case "content_block_start":
                    assert event["index"] == len(blocks)
                    blocks.append(event["content_block"])
                case "content_block_delta":
                    delta = event["delta"]
                    assert event["index"] == len(blocks) - 1
                    match delta["type"]:
                        case "text_delta":
                            blocks[-1]["text"] += delta["text"]
                        case "thinking_delta":
                            blocks[-1]["thinking"] += delta["thinking"]
                        case "input_json_delta":
                            arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
        for index, text in arguments.items():
            blocks[index]["input"] = json.loads(text)
        assert blocks == whole(DELTAS)["content"]
        kinds = [event["type"] for event in told]
        assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
        assert told[-2]["delta"]["stop_reason"] == "tool_use" and told[-2]["usage"]["output_tokens"] == 7

    def test_thinking_that_is_not_to_be_shown_is_an_empty_block(self) -> None:
        assert whole(DELTAS, shows_thinking=False)["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}
        assert not [event for event in events(DELTAS, shows_thinking=False) if "thinking" in event.get("delta", {})]

    @pytest.mark.parametrize(
        ("ending", "reason", "sequence"),
        [
            (Ending(Finish.STOP), "end_turn", None),
            (Ending(Finish.STOP, stop=7), "end_turn", None),
            (Ending(Finish.LENGTH), "max_tokens", None),
            (Ending(Finish.LENGTH, called=True), "max_tokens", None),
            (Ending(Finish.STOP, stop="END"), "stop_sequence", "END"),
            (Ending(Finish.STOP, stop="</tool>", called=True), "tool_use", None),
        ],
    )
    def test_why_it_stopped(self, ending: Ending, reason: str, sequence: str | None) -> None:
        deltas = [Delta(0, (Content("a"),)), Delta(0, (), ending=ending)]
        assert (whole(deltas)["stop_reason"], whole(deltas)["stop_sequence"]) == (reason, sequence)
        (last,) = [event["delta"] for event in events(deltas) if event["type"] == "message_delta"]
        assert (last["stop_reason"], last["stop_sequence"]) == (reason, sequence)

    def test_a_prompt_alone_is_a_message_without_content(self) -> None:
        message = whole([Delta(0, (), ending=Ending(Finish.LENGTH))])
        assert message["content"] == [] and message["stop_reason"] == "max_tokens"

    def test_arguments_that_were_cut_off_are_an_empty_object(self) -> None:
        deltas = [
            Delta(0, (CallBegun(0, "c", "weather"), CallArguments(0, '{"ci'))),
            Delta(0, (), ending=Ending(Finish.LENGTH, called=True)),
        ]
        assert whole(deltas)["content"][0]["input"] == {}

    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            (InvalidRequest("max_tokens is odd", param="max_tokens"), "invalid_request_error"),
            (Unauthenticated("who are you?"), "authentication_error"),
            (Overloaded("later", retry_after_s=2.0, reason="ttft"), "rate_limit_error"),
            (Unavailable("gone"), "overloaded_error"),
            (SpringtideError("a bug"), "api_error"),
        ],
    )
    def test_errors_have_anthropic_s_types(self, error: SpringtideError, kind: str) -> None:
        body = error_json(error, "msg-1")
        assert body["type"] == "error" and body["error"]["type"] == kind and body["request_id"] == "msg-1"
        (event,) = written().failed(error)
        assert event.startswith(b"event: error\ndata: ") and json.loads(event.split(b"data: ")[1]) == body
