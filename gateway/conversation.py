"""How the served model is talked to: a conversation becomes the text of a prompt, by the model's own chat template, and it is known how
what the model answers is to be read."""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.tokenizer.tokenizer import Tokenizer
from gateway.api_request import Conversation, Message, Speaker, Tool, ToolCall, ToolMode
from gateway.fields import json_object
from gateway.tool_calls.families import REASONING_FAMILIES, TOOL_FAMILIES, ToolFamily, reasoning_parser_of, tool_parser_of
from gateway.tool_calls.forced import Schema
from gateway.tool_calls.reading import Reading
from gateway.tool_calls.reasoning import ReasoningMarkers
from springtide.choices import ReasoningParserName, ToolParserName
from springtide.errors import InvalidRequest

MAX_TOOLS = 512
_TAKEN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
"""Names for the template that a request has fields of its own for, or that are not for it to say."""
_LETTERS = string.ascii_letters + string.digits
_ABOUT_TOOLS = """You can call functions. Here are their signatures, one JSON object a line, in <tools></tools>:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and its arguments in <tool_call></tool_call>:
<tool_call>
{{"name": "the function's name", "arguments": {{"a parameter's name": "its value"}}}}
</tool_call>"""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rendered:
    """The prompt of a conversation."""

    text: str
    reading: Reading
    """Of what is answered."""


class ChatModel:
    """How the served model is talked to. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tool_parser: ToolParserName | Literal["auto", "none"] = "auto",
        reasoning_parser: ReasoningParserName | Literal["auto", "none"] = "auto",
    ) -> None:
        self._tokenizer = tokenizer
        self.tools: ToolFamily | None = None
        self.reasoning: ReasoningMarkers | None = None
        if not tokenizer.has_chat_template:
            return
        template = tokenizer.chat_template
        if tool_parser != "none":
            self.tools = TOOL_FAMILIES[tool_parser_of(template.source, template.knows_tools) if tool_parser == "auto" else tool_parser]
        if reasoning_parser != "none":
            name = reasoning_parser_of(template.source) if reasoning_parser == "auto" else reasoning_parser
            self.reasoning = None if name is None else REASONING_FAMILIES[name]

    def rendered(self, conversation: Conversation) -> Rendered:
        """Raises InvalidRequest."""
        template, last = self._tokenizer.chat_template, conversation.messages[-1]
        for name in conversation.template_options:
            if name in _TAKEN:
                raise InvalidRequest(f"chat_template_kwargs.{name} is not for the template to be told", param="chat_template_kwargs")
        if conversation.continue_final_message and (last.speaker is not Speaker.ASSISTANT or last.tool_calls):
            raise InvalidRequest("continue_final_message wants an assistant's text as the last message", param="continue_final_message")
        tools = self._offered(conversation)
        messages = list(self._messages(conversation.messages, tools, template.knows_tools))
        text = template.render(
            messages,
            conversation.add_generation_prompt,
            tools=[_described(tool) for tool in tools] if tools and template.knows_tools else None,
            options=conversation.template_options,
            continue_final_message=conversation.continue_final_message,
        )
        return Rendered(text, self._reading(conversation, tools, text))

    def forced_calls(self, conversation: Conversation, schema: Schema) -> str:
        """The grammar (Lark) of the calls that the answer has to be. Raises InvalidRequest."""
        choice = conversation.tool_choice
        tools = [tool for tool in conversation.tools if choice.name in ("", tool.name)]
        if self.tools is None or not tools:
            raise InvalidRequest("tool_choice: there is no such tool that could be called", param="tool_choice")
        return self.tools.grammar(tools, choice.parallel, self._literal, schema)

    def possible_calls(self, conversation: Conversation, schema: Schema) -> str:
        """The same of calls that the answer may be instead of a text. Empty: there are no tools."""
        if self.tools is None or not conversation.tools or conversation.tool_choice.mode is ToolMode.NONE:
            return ""
        return self.forced_calls(conversation, schema)

    def strict_calls(self, conversation: Conversation, schema: Schema, reading: Reading) -> str:
        """The grammar of an answer that may be text or calls, of which those of strict tools fit these. Empty: there are none. `reading` is
        of the answer."""
        choice = conversation.tool_choice
        if choice.mode is not ToolMode.AUTO or self.tools is None or not any(tool.strict for tool in conversation.tools):
            return ""
        markers = None if reading.reasoning_begun else reading.reasoning
        opening = "" if markers is None or self._tokenizer.special_id(markers.begin) is not None else markers.begin
        return self.tools.beside_text(conversation.tools, choice.parallel, self._literal, schema, opening)

    def _literal(self, text: str) -> str:
        """How a grammar writes it."""
        token_id = self._tokenizer.special_id(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    def _offered(self, conversation: Conversation) -> Sequence[Tool]:
        """The tools that the model is told of."""
        if len(conversation.tools) > MAX_TOOLS:
            raise InvalidRequest(f"tools may hold at most {MAX_TOOLS}, not {len(conversation.tools)}", param="tools")
        if not conversation.tools or conversation.tool_choice.mode is ToolMode.NONE:
            return ()
        if self.tools is None:
            raise InvalidRequest(
                "tools are not supported by this server, which does not look for calls (server.tool_parser)", param="tools"
            )
        return conversation.tools

    def _reading(self, conversation: Conversation, tools: Sequence[Tool], text: str) -> Reading:
        begun = self.reasoning is not None and text.rstrip().endswith(self.reasoning.begin)
        reasoning = None if conversation.continue_final_message and not begun else self.reasoning
        names = tuple(tool.name for tool in tools)
        return Reading(reasoning, begun, self.tools if tools else None, names, conversation.tool_choice.parallel)

    def _messages(self, messages: Sequence[Message], tools: Sequence[Tool], knows_tools: bool) -> Iterator[Json]:
        if knows_tools:
            yield from map(self._message, messages)
            return
        plain = list(_without_tools(messages))
        if tools:
            about = _ABOUT_TOOLS.format(tools="\n".join(json.dumps(_described(tool), ensure_ascii=False) for tool in tools))
            if plain[0]["role"] == Speaker.SYSTEM:
                plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{about}"}
            else:
                plain.insert(0, {"role": Speaker.SYSTEM.value, "content": about})
        yield from plain

    def _message(self, message: Message) -> Json:
        written = _plain(message)
        if message.reasoning:
            written["reasoning_content"] = message.reasoning
        if message.tool_calls:
            written["tool_calls"] = [self._call(call) for call in message.tool_calls]
        if message.speaker is Speaker.TOOL:
            written["tool_call_id"] = self._call_id(message.tool_call_id)
        return written

    def _call(self, call: ToolCall) -> Json:
        arguments = json_object(call.arguments or "{}")
        function = {"name": call.name, "arguments": call.arguments if arguments is None else arguments}
        return {"type": "function", "id": self._call_id(call.call_id), "function": function}

    def _call_id(self, call_id: str) -> str:
        """As the template wants it, the same for the same."""
        length = 0 if self.tools is None else self.tools.id_length
        if not length or (len(call_id) == length and set(call_id) <= set(_LETTERS)):
            return call_id
        number = int.from_bytes(hashlib.sha256(call_id.encode()).digest())
        return "".join(_LETTERS[number // len(_LETTERS) ** place % len(_LETTERS)] for place in range(length))


def _plain(message: Message) -> Json:
    named = {"name": message.name} if message.name else {}
    return {"role": message.speaker.value, "content": message.content, **named}


def _without_tools(messages: Sequence[Message]) -> Iterator[Json]:
    """For a template that knows none: calls as the assistant writes them, and what tools say in a user's message."""
    results: list[str] = []
    for message in messages:
        if message.speaker is Speaker.TOOL:
            results.append(f"<tool_response>\n{message.content}\n</tool_response>")
            continue
        if results:
            yield {"role": Speaker.USER.value, "content": "\n".join(results)}
            results = []
        calls = [f"<tool_call>\n{_written(call)}\n</tool_call>" for call in message.tool_calls]
        yield {**_plain(message), "content": "\n".join([*([message.content] if message.content or not calls else []), *calls])}
    if results:
        yield {"role": Speaker.USER.value, "content": "\n".join(results)}


def _written(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": json_object(call.arguments or "{}") or {}}, ensure_ascii=False)


def _described(tool: Tool) -> Json:
    """A tool as templates know it."""
    described = {"description": tool.description} if tool.description else {}
    parameters: Mapping[str, Any] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": dict(parameters)}}
