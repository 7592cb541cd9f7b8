"""What a model is told of tools, calls and their results, by its own template or in its stead."""

from __future__ import annotations

from typing import Literal

import pytest

from engine.tokenizer.chat_template import ChatTemplate
from engine.tokenizer.tokenizer import Tokenizer
from gateway.api_request import Conversation, Message, Speaker, Tool, ToolCall, ToolChoice, ToolMode
from gateway.conversation import MAX_TOOLS, ChatModel
from gateway.tool_calls.families import TOOL_FAMILIES
from springtide.choices import ToolParserName
from springtide.errors import InvalidRequest

WEATHER = Tool("weather", "How it is.", {"type": "object", "properties": {"city": {"type": "string"}}})
ASKED = Message(Speaker.USER, "How is it in Rome?")
CALLED = Message(Speaker.ASSISTANT, "", tool_calls=(ToolCall("call_1", "weather", '{"city": "Rome"}'),))
TOLD = Message(Speaker.TOOL, "sunny", tool_call_id="call_1", name="weather")
HERMES = """{%- if tools %}TOOLS{% for tool in tools %} {{ tool.function | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}[{{ message.role }}]
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }} {{ call.function.arguments.city }}</tool_call>{% endfor %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% if thinking %}<think>{% endif %}{% endif %}"""
MISTRAL = """{% for message in messages %}{% if message.tool_calls %}{% for call in message.tool_calls %}[TOOL_CALLS]{{ call.id }}
{%- if call.id | length != 9 %}{{ raise_exception("nine letters") }}{% endif %}{% endfor %}{% elif message.role == "tool" %}
{{- message.tool_call_id }}{% endif %}{% endfor %}{{ tools | length }}"""


def model(tokenizer: Tokenizer, template: str, tool_parser: ToolParserName | Literal["auto", "none"] = "auto") -> ChatModel:
    return ChatModel(Tokenizer(tokenizer._backend, ChatTemplate(template, {})), tool_parser)


LLAMA_3_1 = (
    """{{- '{"name": function name, "parameters": dictionary of argument name and its value}.' }}{{- tools }}{{- "<|python_tag|>" }}"""
)
LLAMA_3_2 = """{{- '[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]' }}{{- tools }}"""
LLAMA_4 = """{{- tools }}{{- "<|python_start|>" }}{{- message.content }}{{- "<|python_end|>" }}"""


@pytest.mark.parametrize(
    ("template", "family"),
    [
        (HERMES, "hermes"),
        (MISTRAL, "mistral"),
        (LLAMA_3_1, "llama3"),
        (LLAMA_3_1.replace("<|python_tag|>", ""), "llama3"),
        (LLAMA_3_2, "pythonic"),
        (LLAMA_4, "pythonic"),
        (LLAMA_4.replace("tools", "messages"), "hermes"),
        ("{{ tools }}", "hermes"),
    ],
)
def test_how_calls_are_written_is_seen_by_the_template_unless_it_is_said(
    tokenizer: Tokenizer, template: str, family: ToolParserName
) -> None:
    assert model(tokenizer, template).tools is TOOL_FAMILIES[family]
    said: ToolParserName = "pythonic" if family != "pythonic" else "mistral"
    assert model(tokenizer, template, said).tools is TOOL_FAMILIES[said]
    deaf = model(tokenizer, template, "none")
    assert deaf.tools is None
    with pytest.raises(InvalidRequest, match=r"server\.tool_parser") as caught:
        deaf.rendered(Conversation((ASKED,), (WEATHER,)))
    assert caught.value.param == "tools"


def test_a_template_is_given_tools_calls_and_reasoning_as_it_knows_them(tokenizer: Tokenizer) -> None:
    thought = Message(Speaker.ASSISTANT, "Sunny.", reasoning="Easy.")
    rendered = model(tokenizer, HERMES).rendered(Conversation((ASKED, CALLED, TOLD, thought), (WEATHER,)))
    assert rendered.text == (
        'TOOLS {"name": "weather", "description": "How it is.", "parameters": {"type": "object", "properties": '
        '{"city": {"type": "string"}}}}[user]How is it in Rome?[assistant]<tool_call>weather Rome</tool_call>'
        "[tool]sunny[assistant]<think>Easy.</think>Sunny.[assistant]"
    )
    assert rendered.reading.tools is TOOL_FAMILIES["hermes"] and rendered.reading.tool_names == ("weather",)


def test_a_template_that_knows_no_tools_has_them_in_the_systems_message(tokenizer: Tokenizer) -> None:
    text = ChatModel(tokenizer).rendered(Conversation((ASKED, CALLED, TOLD), (WEATHER,))).text
    system, user, assistant, results, _ = text.split("<|im_start|>")[1:]
    assert system.startswith("system\n") and '"name": "weather"' in system and "<tool_call>" in system
    assert user == "user\nHow is it in Rome?<|im_end|>\n"
    assert assistant == 'assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
    assert results == "user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
    own = ChatModel(tokenizer).rendered(Conversation((Message(Speaker.SYSTEM, "Be brief."), ASKED), (WEATHER,))).text
    assert own.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")


def test_who_may_call_nothing_is_told_of_nothing(tokenizer: Tokenizer) -> None:
    plain = ChatModel(tokenizer).rendered(Conversation((ASKED,)))
    none = ChatModel(tokenizer).rendered(Conversation((ASKED,), (WEATHER,), ToolChoice(ToolMode.NONE)))
    assert none == plain and plain.reading.tools is None


def test_mistrals_ids_have_nine_letters_and_stay_the_same(tokenizer: Tokenizer) -> None:
    text = model(tokenizer, MISTRAL).rendered(Conversation((ASKED, CALLED, TOLD), (WEATHER,))).text
    call_id = text.removeprefix("[TOOL_CALLS]")[:9]
    assert text == f"[TOOL_CALLS]{call_id}{call_id}1" and call_id.isalnum()


def test_reasoning_that_the_prompt_begins_is_read_as_such(tokenizer: Tokenizer) -> None:
    chat = model(tokenizer, HERMES)
    assert not chat.rendered(Conversation((ASKED,))).reading.reasoning_begun
    assert chat.rendered(Conversation((ASKED,), template_options={"thinking": True})).reading.reasoning_begun


def test_the_last_message_can_be_continued(tokenizer: Tokenizer) -> None:
    begun = Message(Speaker.ASSISTANT, "It is ")
    text = ChatModel(tokenizer).rendered(Conversation((ASKED, begun), add_generation_prompt=False, continue_final_message=True)).text
    assert text.endswith("<|im_start|>assistant\nIt is ")
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        ChatModel(tokenizer).rendered(Conversation((ASKED,), add_generation_prompt=False, continue_final_message=True))


@pytest.mark.parametrize("begun", ["<", "i", "|", "assistant", "<|im_end|>", " two  spaces ", ""])
def test_what_is_continued_is_found_at_its_place(tokenizer: Tokenizer, begun: str) -> None:
    """Not where the template itself writes the same."""
    conversation = Conversation((ASKED, Message(Speaker.ASSISTANT, begun)), add_generation_prompt=False, continue_final_message=True)
    text = ChatModel(tokenizer).rendered(conversation).text
    assert text.endswith(f"<|im_end|>\n<|im_start|>assistant\n{begun}")


def test_half_a_character_in_a_calls_arguments_is_no_failure(tokenizer: Tokenizer) -> None:
    """Models write it as an escape, and clients send it back."""
    called = Message(Speaker.ASSISTANT, "", tool_calls=(ToolCall("c1", "weather", '{"city": "\\ud83d"}'),))
    for source in (HERMES, None):
        chat = ChatModel(tokenizer) if source is None else model(tokenizer, source)
        chat.rendered(Conversation((ASKED, called, TOLD), (WEATHER,))).text.encode()


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template"])
def test_a_request_cannot_say_what_is_not_for_it_to_say(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        ChatModel(tokenizer).rendered(Conversation((ASKED,), template_options={name: []}))


def test_tools_beyond_the_bound_are_refused_whoever_asks(tokenizer: Tokenizer) -> None:
    tools = tuple(Tool(f"f{i}") for i in range(MAX_TOOLS + 1))
    assert model(tokenizer, HERMES).rendered(Conversation((ASKED,), tools[1:])).text
    with pytest.raises(InvalidRequest, match=f"tools may hold at most {MAX_TOOLS}, not {MAX_TOOLS + 1}"):
        model(tokenizer, HERMES).rendered(Conversation((ASKED,), tools))


def test_what_a_template_makes_of_deep_nesting_is_an_error_of_the_request(tokenizer: Tokenizer) -> None:
    deep: dict[str, object] = {}
    for _ in range(3000):
        deep = {"a": deep}
    with pytest.raises(InvalidRequest):
        model(tokenizer, HERMES).rendered(Conversation((ASKED,), (Tool("deep", parameters=deep),)))
